"""A causal language model: steps in place of epochs, ignored labels, perplexity.

mpirun -np 4 --oversubscribe python examples/trainings/language_model.py
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpitrain

VOCABULARY, LENGTH, END, IGNORED = 64, 32, 0, -100


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Crops of a long text, random ones to train on; the text is made here.

    What follows the end of the first document is ignored.
    """

    def __init__(self, num: int, seed: int, *, is_random: bool) -> None:
        table = np.random.default_rng(7).integers(1, VOCABULARY, (VOCABULARY, 3))
        random = np.random.default_rng(seed)
        self.num, self.is_random = num, is_random
        self.text = np.empty(8000, np.int64)
        token = 1
        for place in range(len(self.text)):
            is_end = random.random() < 0.03
            token = END if is_end else int(table[token, random.integers(3)])
            self.text[place] = token

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        last = len(self.text) - LENGTH
        start = int(torch.randint(last, ())) if self.is_random else index * LENGTH
        crop = torch.from_numpy(self.text[start : start + LENGTH + 1])
        inputs, labels = crop[:-1], crop[1:].clone()
        if len(ends := (inputs == END).nonzero()):
            labels[int(ends[0]) :] = IGNORED
        return inputs, labels


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, **options)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        found = self.tokens(tokens) + self.positions.weight[:length]
        mask = found.new_full((length, length), -torch.inf).triu(1)
        return self.head(self.blocks(found, mask=mask, is_causal=True))


class LanguageModel(mpitrain.Task):
    def loss(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, and whether it counts, `(N, tokens)`."""
        losses = F.cross_entropy(outputs.mT, labels, reduction="none")
        return losses, labels != IGNORED

    def derived_metrics(self, values: Any) -> dict[str, float]:
        return {"perplexity": math.exp(values["loss"])}


DEFAULTS = mpitrain.TrainConfig(
    max_steps=60,
    validate_every_steps=30,
    global_batch_size=8,
    optimizer="adamw",
    lr=3e-3,
    weight_decay=0.1,
    warmup_steps=20,
    clip_grad_norm=1.0,
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        Transformer(),
        Crops(480, seed=0, is_random=True),
        Crops(101, seed=1, is_random=False),
        config,
        world=world,
        task=LanguageModel(),
    )


if __name__ == "__main__":
    build().fit()

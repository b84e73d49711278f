"""An endless stream of sequences: batches of a number of tokens, not of samples.

mpirun -np 4 --oversubscribe python examples/trainings/stream.py
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import mpitrain

VOCABULARY = 50
TOKENS = 320  # of a global batch, padding included
POOL = 256  # sequences that are sorted by length; each epoch has other ones


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences, and whether token 7 comes before token 9; made when they are read."""

    def __init__(self, num: int, seed: int) -> None:
        self.num, self.seed = num, seed

    def __len__(self) -> int:
        return self.num

    def length(self, index: int) -> int:
        return int(np.random.default_rng([self.seed, index]).integers(4, 40))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng([self.seed, index, 1])
        sequence = random.integers(10, VOCABULARY, self.length(index))
        first, second = random.choice(len(sequence), 2, replace=False)
        sequence[first], sequence[second] = 7, 9
        return torch.from_numpy(sequence), torch.tensor(int(first < second))


class Reader(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found, _ = self.recurrent(self.embedding(tokens))
        last = (tokens > 0).sum(1) - 1
        return self.head(found[torch.arange(len(found)), last])


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, targets = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True), torch.stack(targets)


def batches_of(data: Sequences, seed: int, epoch: int) -> list[list[int]]:
    """Return the samples of each batch: of about one length, in random order."""
    found: list[list[int]] = [[]]
    for index in sorted(range((epoch - 1) * POOL, epoch * POOL), key=data.length):
        if data.length(index) * (len(found[-1]) + 1) > TOKENS:
            found.append([])
        found[-1].append(index)
    order = np.random.default_rng([seed, epoch]).permutation(len(found))
    return [found[place] for place in order]


DEFAULTS = mpitrain.TrainConfig(
    max_steps=60, validate_every_steps=20, optimizer="adam", lr=1e-2
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    train = Sequences(sys.maxsize, seed=1)
    return mpitrain.Trainer(
        Reader(),
        train,
        Sequences(101, seed=2),
        config,
        world=world,
        collate_fn=collate,
        batch_sampler=partial(batches_of, train),
        loss=lambda outputs, targets: F.cross_entropy(
            outputs, targets, reduction="none"
        ),
        metrics={"accuracy": lambda outputs, it: (outputs.argmax(1) == it).float()},
    )


if __name__ == "__main__":
    build().fit()

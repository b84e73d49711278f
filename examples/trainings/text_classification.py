"""A classifier of texts: a model of Transformers, early stopping by F1, AUROC.

The run is recorded, and resumes in its folder. Needs `pip install transformers
torchmetrics`.

mpirun -np 4 --oversubscribe python examples/trainings/text_classification.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC, BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification

import mpitrain


class Reviews(Dataset[dict[str, Tensor]]):
    """Padded sentences of numbers, as a tokenizer returns them; made here."""

    def __init__(self, num: int, seed: int, length: int = 24) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = (torch.rand(num, generator=random) < 0.3).long()
        self.ids = torch.randint(15, 200, (num, length), generator=random)
        words = torch.randint(5, 15, (num, 3), generator=random)  # of a good review
        self.ids[:, 1:4] = torch.where(
            self.labels[:, None] > 0, words, self.ids[:, 1:4]
        )
        lengths = torch.randint(6, length, (num, 1), generator=random)
        self.ids[torch.arange(length) >= lengths] = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, label = self.ids[index], self.labels[index]
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": label}


def network() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=200,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Classification(mpitrain.Task):
    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.logits, batch["labels"], reduction="none")

    def update_metrics(self, outputs: Any, batch: dict[str, Tensor]) -> None:
        for metric in self.metric_objects.values():
            metric.update(outputs.logits.softmax(1)[:, 1], batch["labels"])


DEFAULTS = mpitrain.TrainConfig(
    epochs=10,
    global_batch_size=16,
    optimizer="adamw",
    lr=5e-3,
    weight_decay=0.01,
    bias_decay=False,
    schedule="linear",
    warmup_steps=10,
    clip_grad_norm=1.0,
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        network(),
        Reviews(400, seed=1),
        Reviews(65, seed=2),
        config,
        world=world,
        task=Classification(),
        metrics={"f1": BinaryF1Score(), "auroc": BinaryAUROC()},
    )


if __name__ == "__main__":
    folder = "runs/text"
    trainer = build()
    trainer.callbacks += [
        mpitrain.EarlyStopping("f1", patience=3),
        mpitrain.Recorder(folder),
        mpitrain.Checkpointer(folder, best_by="max:f1", load_best_at_end=True),
    ]
    trainer.fit()

"""The default training with Lightning's Trainer: what its manual shows, on CPUs.

    python benchmarks/peers/lightning_ddp.py --ranks 8

Same data, network, batch, epochs, optimizer and schedule as `python -m mpitrain`; no
mpitrain in it. Lightning starts the other ranks itself.
"""

from __future__ import annotations

import argparse
import math
import os

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchrun_ddp import EPOCHS, GLOBAL_BATCH_SIZE, LR, ConvNet, cosine, digits


class Classifier(lightning.LightningModule):
    """Network, loss and optimizer."""

    def __init__(self, steps_per_epoch: int) -> None:
        super().__init__()
        self.model = ConvNet()
        self.steps_per_epoch = steps_per_epoch

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        x, y = batch
        correct = (self.model(x).argmax(1) == y).float().mean()
        self.log("val_accuracy", correct, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        schedule = cosine(optimizer, self.steps_per_epoch)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args().ranks
    train, val = digits()
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=EPOCHS,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
    )
    batch_size = GLOBAL_BATCH_SIZE // ranks
    trainer.fit(
        Classifier(math.ceil(len(train) / GLOBAL_BATCH_SIZE)),
        DataLoader(train, batch_size=batch_size, shuffle=True),
        DataLoader(val, batch_size=256),
    )
    if trainer.is_global_zero:
        print(f"val_accuracy {trainer.callback_metrics['val_accuracy']:.2%}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

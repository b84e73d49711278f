"""The same with Lightning, which torchrun restarts.

torchrun --standalone --nproc-per-node 4 --max-restarts 99 faults_lightning.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from faults_torchrun import EVERY_STEPS, STEP_SECONDS
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchrun_ddp import ConvNet, digits, start


class Classifier(lightning.LightningModule):
    """Network, loss and optimizer; writes when a step was done."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ConvNet()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs), labels)

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(STEP_SECONDS)
        if self.global_rank == 0:
            with Path("steps").open("a") as file:
                file.write(f"{time.time()} {self.global_step}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main() -> None:
    start()
    world_size = int(os.environ["WORLD_SIZE"])
    Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[
            ModelCheckpoint(
                "checkpoints", every_n_train_steps=EVERY_STEPS, save_last=True
            )
        ],
    )
    last = Path("checkpoints/last.ckpt")
    loader = DataLoader(digits()[0], batch_size=64 // world_size, shuffle=True)
    trainer.fit(Classifier(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main()

"""The same with `mpitrain.Trainer`, which `supervise --restarts` restarts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from faults_torchrun import STEP_SECONDS
from torchrun_ddp import ConvNet, digits

import mpitrain


class Steps(mpitrain.Callback):
    """Writes processes, and when a step was done."""

    def on_fit_start(self, trainer: mpitrain.Trainer) -> None:
        """Write the process of the rank."""
        self.is_rank_zero = trainer.world.is_rank_zero
        Path(f"pid-{trainer.world.rank}").write_text(str(os.getpid()))

    def on_step_end(self, trainer: mpitrain.Trainer) -> None:
        """Write the step."""
        time.sleep(STEP_SECONDS)
        if self.is_rank_zero:
            with Path("steps").open("a") as file:
                file.write(f"{time.time()} {trainer.state.step}\n")


def main() -> None:
    torch.manual_seed(1)
    config = mpitrain.TrainConfig(
        max_steps=1_000_000, global_batch_size=64, lr=0.01, epochs=10_000_000
    )
    callbacks = mpitrain.default_callbacks("run", config, progress="lines")
    train, _ = digits()
    trainer = mpitrain.Trainer(
        ConvNet(), train, None, config, callbacks=[*callbacks, Steps()]
    )
    trainer.fit()


if __name__ == "__main__":
    main()

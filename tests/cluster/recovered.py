"""A training that faults strike: a callback writes its steps, and raises if asked."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mpitrain

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.02"))


class Told(mpitrain.Callback):
    """Writes the rank's process, and when a step was done; raises if it is asked to."""

    def on_fit_start(self, trainer: mpitrain.Trainer) -> None:
        """Write which process the rank is."""
        self.rank = trainer.world.rank if trainer.world else 0
        host = trainer.world.hostname if trainer.world else ""
        Path(f"pid-{self.rank}").write_text(f"{os.getpid()} {host}")

    def on_step_end(self, trainer: mpitrain.Trainer) -> None:
        """Write the step."""
        time.sleep(STEP_SECONDS)
        if (asked := Path(f"raise-{self.rank}")).exists():
            asked.unlink()
            raise ArithmeticError("this is the fault")
        if self.rank == 0:
            with Path("steps").open("a") as file:
                file.write(f"{time.time()} {trainer.state.step}\n")


def main(run_dir: str, num_steps: int, strategy: str) -> None:
    """Train, and print the SHA-256 of the weights."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 50), torch.randint(3, (640,)))
    model = nn.Sequential(
        nn.Linear(50, 100), nn.ReLU(), nn.Dropout(0.1), nn.Linear(100, 3)
    )
    config = mpitrain.TrainConfig(
        max_steps=num_steps,
        global_batch_size=16,
        strategy=strategy,  # type: ignore[arg-type]
        bitwise=True,
    )
    trainer = mpitrain.Trainer(
        model,
        data,
        data,
        config,
        callbacks=[*mpitrain.default_callbacks(run_dir, config), Told()],
    )
    trainer.fit()
    weights = b"".join(it.numpy().tobytes() for it in trainer.state_dict().values())
    if trainer.world is not None and trainer.world.is_rank_zero:
        print("weights", hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    with mpitrain.init(device="cpu", hang_timeout_seconds=9.0):
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

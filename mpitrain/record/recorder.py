"""Rank zero's record of a run: metrics, result and screen, as the training goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpitrain.record.console import Console, Lines
from mpitrain.record.events import Epoch
from mpitrain.record.folder import Metrics, write_json
from mpitrain.world import World


class Silent:
    """The listener of all ranks but rank zero."""

    def step_done(self, step: int) -> None:
        """Do nothing."""

    def epoch_done(self, epoch: Epoch) -> None:
        """Do nothing."""


class Recorder:
    """Writes ``metrics.jsonl`` and ``result.json`` and moves the screen.

    Args:
        run_dir: The run folder.
        world: Where rank zero stands.
        start_seconds: From the process's start to the ready process group.

    Attributes:
        console: The screen.
    """

    def __init__(self, run_dir: Path, world: World, start_seconds: float) -> None:
        self.console: Console = Lines(0)
        self._run_dir = run_dir
        self._metrics = Metrics(run_dir)
        self._result: dict[str, Any] = {
            "status": "running",
            "val_accuracy": None,
            "val_loss": None,
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "backend": world.backend,
            "start_seconds": start_seconds,
            "train_seconds": 0.0,
            "epochs": 0,
            "steps": 0,
        }
        # Written before any rank trains, and again at the end only: a rank that fails
        # writes into it, too (`fail`), and must not be written over.
        write_json(run_dir / "result.json", self._result)

    def step_done(self, step: int) -> None:
        """Move the screen on."""
        self.console.step_done(step)

    def epoch_done(self, epoch: Epoch) -> None:
        """Write a line per step and one for the epoch."""
        first_step = epoch.step - len(epoch.step_losses) + 1
        steps = zip(epoch.step_losses, epoch.learning_rates, strict=True)
        for step, (loss, rate) in enumerate(steps, start=first_step):
            self._metrics.write(
                "step", epoch=epoch.epoch, step=step, train_loss=loss, lr=rate
            )
        self._metrics.write(
            "epoch",
            epoch=epoch.epoch,
            step=epoch.step,
            train_loss=epoch.train_loss,
            val_loss=epoch.val_loss,
            val_accuracy=epoch.val_accuracy,
            train_samples=epoch.train_samples,
            val_samples=epoch.val_samples,
            epoch_seconds=epoch.epoch_seconds,
            samples_per_second=epoch.train_samples / epoch.steps_seconds,
        )
        self._result.update(
            val_accuracy=epoch.val_accuracy,
            val_loss=epoch.val_loss,
            train_seconds=self._result["train_seconds"] + epoch.epoch_seconds,
            epochs=epoch.epoch,
            steps=epoch.step,
        )
        self.console.epoch_done(epoch)

    def finish(self) -> None:
        """Write that the run is finished, and say what came out."""
        self._metrics.close()
        self._result["status"] = "finished"
        write_json(self._run_dir / "result.json", self._result)
        epochs = self._result["epochs"]
        self.console.say(
            f"finished: val_accuracy {self._result['val_accuracy']:.2%} after "
            f"{epochs} epoch{'s' * (epochs != 1)}, "
            f"{self._result['train_seconds']:.1f} s of training, "
            f"{self._result['start_seconds']:.1f} s to start; "
            f"see {shown(self._run_dir)}"
        )


def fail(run_dir: Path, message: str) -> None:
    """Write into ``result.json`` that the run failed, from whichever rank knows.

    Args:
        run_dir: The run folder.
        message: Why, as the screen says it.
    """
    file = run_dir / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    write_json(file, {**result, "status": "failed", "error": message})


def shown(path: Path) -> str:
    """Write a path as a person would: relative to here where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)

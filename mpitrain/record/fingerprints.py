"""``fingerprints.jsonl``: hashes of the weights, for ``python -m mpitrain diff``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpitrain.record.jsonl import CLOSE_SECONDS, JsonlReader, JsonlWriter
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import StepMetrics

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

FILE = "fingerprints.jsonl"
NUM_DIGITS = 16  # of a hash: 64 bits


class Fingerprints(Callback):
    """Writes a hash of each tensor of the model, every ``every_steps`` steps.

    With ``bitwise`` also the loss of each micro-batch of that step. With ``None`` it
    only drops what an earlier job wrote after the checkpoint.
    """

    def __init__(self, run_dir: Path, every_steps: int | None) -> None:
        self._path = run_dir / FILE
        self._every = every_steps
        self._before: Mapping[str, Any] = {}
        self._lines: JsonlWriter | None = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drop what was written after the checkpoint."""
        self._before = state

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file."""
        return {} if self._lines is None else {"bytes": self._lines.num_bytes}

    def flush(self) -> None:
        """Sync the file to the disk; in any thread."""
        if self._lines is not None:
            self._lines.sync()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the file, on rank zero."""
        is_used = self._every is not None or self._path.exists()
        if trainer.engine.world.is_rank_zero and is_used:
            # An earlier job may have written a checkpoint without this callback.
            default = None if trainer.state.step else 0
            num_bytes = self._before.get("bytes", default)
            self._lines = JsonlWriter(self._path, keep_bytes=num_bytes)

    def on_step_end(self, trainer: Trainer) -> None:
        """Write the hashes."""
        step, engine = trainer.state.step, trainer.engine
        is_due = self._every is not None and not step % self._every
        # Of shards all ranks gather the weights, which rank zero alone writes.
        is_collective = engine.strategy.is_sharded
        if not is_due or (self._lines is None and not is_collective):
            return
        state = engine.strategy.full_state_dict()
        if self._lines is not None:
            weights = {
                engine.part.prefix + name: hash_of(value)
                for name, value in state.items()
                if isinstance(value, Tensor)
            }
            self._lines.write({"step": step, "weights": weights})

    def on_metrics(self, trainer: Trainer, steps: Sequence[StepMetrics]) -> None:
        """Write the losses of micro-batches."""
        if self._every is None or self._lines is None:
            return
        # Not strict: without fixed micro-batches there are no losses of each.
        for metrics, losses in zip(steps, trainer.micro_batch_losses, strict=False):
            if metrics.step % self._every == 0:
                self._lines.write({"step": metrics.step, "losses": losses})

    def close(self, *_: Any, **__: Any) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
        self._lines = None

    on_fit_end = on_stop = close

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Close the file; a disk that takes nothing is not waited for."""
        if self._lines is not None:
            self._lines.close(CLOSE_SECONDS)
        self._lines = None


def hash_of(tensor: Tensor) -> str:
    """Return a hash of a CPU tensor's values, type and shape.

    >>> hash_of(torch.zeros(2)) == hash_of(torch.zeros(2, 1))
    False
    """
    values = tensor.contiguous().flatten().view(torch.uint8).numpy()
    # Bytes alone are equal for another shape, and for zeros of another type.
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(values.data)
    return found.hexdigest()[:NUM_DIGITS]


class FingerprintFile(JsonlReader):
    """The content of ``fingerprints.jsonl``, by step."""

    def _clear(self) -> None:
        self.weights: dict[int, dict[str, str]] = {}
        self.losses: dict[int, dict[str, float]] = {}

    def _add(self, row: Any) -> None:
        if "weights" in row:
            self.weights[row["step"]] = row["weights"]
        else:
            named = {f"micro-batch {n}": loss for n, loss in enumerate(row["losses"])}
            self.losses[row["step"]] = named

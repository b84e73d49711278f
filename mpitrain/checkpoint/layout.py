"""Where checkpoints are, and which of them are kept. Imports no torch.

    runs/NAME/checkpoints/step-00000120/     or step-00000120-epoch-5/, at its end;
                                             -val/ after a validation within it
        rank-0.bin ...    the tensors of each rank
        tensors.json      which tensor is where in them
        metadata.json     the state of the training, and its configuration
        SHA256SUMS        of all these files; `sha256sum -c SHA256SUMS` reads it

A checkpoint is written into a folder whose name begins with a dot, and renamed when all
files have reached the disk. So a checkpoint with its name was complete once; the sums
tell whether it still is.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.format import BrokenCheckpoint, read_metadata
from mpitrain.errors import DataError

FOLDER = "checkpoints"

NAME = re.compile(r"step-(\d+)(?:-epoch-(\d+)|(-val))?")


@dataclass(frozen=True, kw_only=True, order=True)
class Checkpoint:
    """A checkpoint that was complete once. Of a run, the newer is the greater."""

    step: int  # steps of the training that are in it
    epoch: int  # the epoch that was just evaluated; 0: within an epoch
    is_validated: bool = False  # within an epoch
    # Its folder. Not compared: one folder has several paths, by links or relative ones.
    path: Path = field(compare=False)

    def metadata(self) -> dict[str, Any]:
        """Read the state of the training and its configuration."""
        return read_metadata(self.path, self.step, self.epoch)


def name_of(step: int, epoch: int = 0, *, is_validated: bool = False) -> str:
    """Return the name of a checkpoint's folder.

    >>> name_of(120), name_of(120, 5), name_of(120, is_validated=True)
    ('step-00000120', 'step-00000120-epoch-5', 'step-00000120-val')
    """
    kind = f"-epoch-{epoch}" if epoch else "-val" * is_validated
    return f"step-{step:08}{kind}"


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, the newest first; they may be broken."""
    folder = run_dir / FOLDER
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((it for path in paths if (it := _checkpoint(path))), reverse=True)


def checkpoint_at(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder."""
    found = _checkpoint(path)
    if found is None or not path.is_dir():
        raise DataError(
            f"{path} is no checkpoint; expected a run folder, or a folder such as "
            f"runs/NAME/{FOLDER}/{name_of(120)}"
        )
    return found


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the best metric, of those that have the newest's."""
    metrics: dict[Checkpoint, float] = {}
    best_by = None
    for checkpoint in checkpoints:
        with contextlib.suppress(BrokenCheckpoint):
            found = checkpoint.metadata()
            if found["metric"] is None:
                continue
            of_this = found.get("best_by")  # not in older checkpoints
            best_by = best_by or of_this
            if of_this in (None, best_by):
                metrics[checkpoint] = found["metric"]
    # The newest stand first: of two equals `max` takes that.
    return max(metrics, key=metrics.__getitem__, default=None)


def set_aside(checkpoint: Checkpoint, suffix: str) -> Path:
    """Rename a checkpoint so that it is not found any more; return its new path."""
    path, number = checkpoint.path, 1
    aside = path.with_name(f"{path.name}.{suffix}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{suffix}-{number}")
    path.rename(aside)
    return aside


def remove_unfinished(run_dir: Path, log: Callable[[str], object]) -> None:
    """Remove incomplete checkpoints; no other process may write into this run."""
    # Also what `remove_whole` has renamed, and a kill has left.
    for path in (run_dir / FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
        log(f"removed {path}, which was incomplete")


def remove_old(run_dir: Path, keep: int | None) -> None:
    """Remove all but the newest `keep`, the best and the last verified one."""
    if keep is None:
        return
    found = list_checkpoints(run_dir)
    # Newer ones than the verified one may be set aside yet (docs/decisions/0019).
    kept = (best_of(found), _last_verified(found))
    for checkpoint in found[keep:]:
        if checkpoint not in kept:
            remove_whole(checkpoint.path)


def _last_verified(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest one before a step that was verified; see `Verification`."""
    step = 0
    with contextlib.suppress(BrokenCheckpoint, IndexError):
        trainer = checkpoints[0].metadata()["trainer"] or {}
        step = trainer.get("state", {}).get("verified_step", 0)
    return next((it for it in checkpoints if it.step <= step), None)


def remove_whole(path: Path) -> None:
    """Remove a folder, first its name: a part of it must not look complete."""
    doomed = path.with_name(f".{path.name}.old")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _checkpoint(path: Path) -> Checkpoint | None:
    if (match := NAME.fullmatch(path.name)) is None:
        return None
    step, epoch = int(match[1]), int(match[2] or 0)
    return Checkpoint(step=step, epoch=epoch, is_validated=bool(match[3]), path=path)

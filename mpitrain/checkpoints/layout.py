"""Where checkpoints lie, and whether they are whole. Imports no torch.

    runs/NAME/checkpoints/step-00000120/     or step-00000120-epoch-5/, at its end
        rank-0.bin ...    numbers: each rank's share, one piece of memory
        tensors.json      which tensor lies where in them
        facts.json        what else belongs to the training
        SHA256SUMS        of all these files, as `sha256sum -c SHA256SUMS` reads it

A checkpoint is written beside, in a folder whose name begins with a dot, and gets its
name when all of it has reached the disk. So what has the name was whole once; the sums
tell whether it still is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mpitrain.errors import DataError

FOLDER = "checkpoints"
SUMS = "SHA256SUMS"
TENSORS = "tensors.json"
FACTS = "facts.json"

FORMAT = 1
"""Raised when older programs could not read what is written."""

CHUNK_BYTES = 4 << 20
"""Read, written and summed up at once."""

MOST_JSON_BYTES = 1 << 28
"""Files that are read as text are not longer."""

_NUMBER, _NONE, _MOST = (int, float), type(None), 2**53
_TEXTS = "run stage strategy config.model config.data config.precision"
_COUNTS = (
    "config.epochs config.probe_epochs data.image_size so_far.num_steps "
    "so_far.epoch_steps so_far.num_samples so_far.skipped_steps so_far.skipped_samples "
    "so_far.val_samples"
)
_FROM_ONE = "world_size config.global_batch_size data.in_channels so_far.epoch"
SCHEMA: Mapping[str, tuple[tuple[type, ...], float | None, float | None]] = {
    **dict.fromkeys(_TEXTS.split(), ((str,), None, None)),
    **dict.fromkeys(_COUNTS.split(), ((int,), 0, _MOST)),
    **dict.fromkeys(_FROM_ONE.split(), ((int,), 1, _MOST)),
    "config.seed": ((int,), 0, math.inf),
    "data.num_classes": ((int, _NONE), 1, _MOST),
    "num_samples": ((dict,), None, None),
    "so_far.loss_sum": (_NUMBER, -math.inf, math.inf),
    "so_far.steps_seconds": (_NUMBER, 0, _MOST),
    "so_far.taken": ((list,), 0, _MOST),
    "so_far.values": ((dict,), -math.inf, math.inf),
    "scale": ((list,), 0, 2.0**200),
    "extra_state": ((dict,), None, None),
    "goodness": ((*_NUMBER, _NONE), -(2.0**1000), 2.0**1000),
    "record": ((dict, _NONE), None, None),
    "record.metrics_bytes": ((int, _NONE), 0, _MOST),
    "record.values": ((dict, _NONE), None, None),
}
"""Of each field in `FACTS` its types, and the least and most that it, or each number in
it, may be. From minus infinity on means any number, NaN too; None: not looked at."""

NAME = re.compile(r"step-(\d+)(?:-epoch-(\d+))?")
SHARE = re.compile(r"rank-\d+\.bin")


NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a file that is gone; others may be a file server's that is ill."""


class BrokenCheckpoint(DataError):
    """A checkpoint that is not whole, or not what it says.

    Args:
        path: Its folder.
        why: What is wrong with it.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"checkpoint {path} is broken: {why}")
        self.path = path
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.why)


@dataclass(frozen=True, kw_only=True, order=True)
class Checkpoint:
    """A checkpoint that has its name."""

    step: int
    """Steps of the training that are in it."""
    epoch: int
    """The epoch that was just judged; 0: within an epoch."""
    path: Path
    """Its folder."""

    def facts(self) -> dict[str, Any]:
        """Read what was written down beside the tensors.

        Raises:
            BrokenCheckpoint: It cannot be read, or cannot be so.
        """
        found = read_json(self.path, FACTS)
        _check_facts(self, found)
        return found


def name_of(step: int, epoch: int = 0) -> str:
    """Return the name of a checkpoint's folder.

    >>> name_of(120), name_of(120, 5)
    ('step-00000120', 'step-00000120-epoch-5')
    """
    return f"step-{step:08}" + (f"-epoch-{epoch}" if epoch else "")


def find(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run, the newest first; they may be broken."""
    folder = run_dir / FOLDER
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [_checkpoint(path) for path in paths if NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def checkpoint_at(path: Path) -> Checkpoint:
    """Return the checkpoint that a folder is.

    Raises:
        DataError: It is none.
    """
    if not NAME.fullmatch(path.name) or not path.is_dir():
        raise DataError(
            f"{path} is no checkpoint; expected a run folder, or a folder such as "
            f"runs/NAME/{FOLDER}/{name_of(120)}"
        )
    return _checkpoint(path)


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the one with the best value, of those that were written with one."""
    best: tuple[float, Checkpoint] | None = None
    for checkpoint in checkpoints:  # the newest first: of two equals it stays
        with contextlib.suppress(BrokenCheckpoint):
            value = checkpoint.facts().get("goodness")
            if value is not None and (best is None or value > best[0]):
                best = value, checkpoint
    return None if best is None else best[1]


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the sums of all files, and let them reach the disk."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    write_durably(folder / SUMS, lines.encode())
    sync_folder(folder)


def read_sums(path: Path) -> dict[str, str]:
    """Read the sums of a checkpoint's files, by name.

    Args:
        path: Its folder.

    Raises:
        BrokenCheckpoint: They are not there, or do not cover all files.
    """
    text = _text_of(path, SUMS)
    sums: dict[str, str] = {}
    *lines, rest = text.split("\n")
    if rest:
        raise BrokenCheckpoint(path, f"{SUMS} ends within a line")
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line)
        if match is None:
            raise BrokenCheckpoint(path, f"{SUMS} has the line {line[:80]!r}")
        sums[match[2]] = match[1]
    for name in (TENSORS, FACTS):
        if name not in sums:
            raise BrokenCheckpoint(path, f"{SUMS} lacks {name}")
    return sums


def check_file(
    path: Path,
    name: str,
    expected: str,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Make sure that a file of a checkpoint has the bytes that were written.

    Args:
        path: The checkpoint's folder.
        name: Of the file.
        expected: Its SHA-256.
        progress: Told now and then.

    Raises:
        BrokenCheckpoint: It has not.
        OSError: It is there, and cannot be read.
    """
    found = hashlib.sha256()
    with open_file(path, name) as file:
        while piece := file.read(CHUNK_BYTES):
            found.update(piece)
            progress()
    if found.hexdigest() != expected:
        raise BrokenCheckpoint(path, f"{name} has other bytes than {SUMS} says")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read a file of a checkpoint that holds a JSON object.

    Raises:
        BrokenCheckpoint: It does not.
        DataError: It is of a format that we do not know.
    """
    text = _text_of(path, name)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(path, f"{name}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("format"), int):
        raise BrokenCheckpoint(path, f"{name} names no format")
    if found["format"] != FORMAT:
        raise DataError(
            f"{path / name} is of format {found['format']}, expected {FORMAT}: another "
            "version of mpitrain wrote it"
        )
    return found


def write_json(folder: Path, name: str, values: Mapping[str, Any]) -> str:
    """Write a JSON object, and let it reach the disk; return its SHA-256."""
    data = json.dumps({"format": FORMAT, **values}).encode()
    write_durably(folder / name, data)
    return hashlib.sha256(data).hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file, and let it reach the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Let a folder's names reach the disk, where its file system can tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(checkpoint: Checkpoint, why: str) -> Path:
    """Give a checkpoint a name under which it is not found, and return that.

    Args:
        checkpoint: One that is not to be gone on from.
        why: One word, such as ``"broken"``, which ends the new name.
    """
    path = checkpoint.path
    for number in itertools.count(1):
        suffix = why if number == 1 else f"{why}-{number}"
        aside = path.with_name(f"{path.name}.{suffix}")
        if not aside.exists():
            path.rename(aside)
            return aside
    raise AssertionError


def remove_unfinished(run_dir: Path, say: Callable[[str], object]) -> None:
    """Remove what writers left that did not come to an end.

    For one process, that knows that no other writes into this run.

    Args:
        run_dir: The run folder.
        say: Told of each.
    """
    for path in (run_dir / FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
        say(f"removed {path}, which was not written to its end")


def remove_superfluous(run_dir: Path, keep: int | None) -> None:
    """Remove all whole checkpoints but the newest ones and the best one.

    Args:
        run_dir: The run folder.
        keep: How many of the newest stay; ``None``: all.
    """
    if keep is None:
        return
    found = find(run_dir)
    best = best_of(found)
    for checkpoint in found[keep:]:
        if checkpoint == best:
            continue
        # First the name: what is removed in part must not look whole.
        doomed = checkpoint.path.with_name(f".{checkpoint.path.name}.old")
        with contextlib.suppress(OSError):
            checkpoint.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _checkpoint(path: Path) -> Checkpoint:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return Checkpoint(step=int(match[1]), epoch=int(match[2] or 0), path=path)


def open_file(path: Path, name: str) -> BinaryIO:
    """Open a file of a checkpoint; never one that could block, or has no end.

    Raises:
        BrokenCheckpoint: It is not there, or no regular file.
        OSError: It is there, and cannot be read.
    """
    try:
        if not stat.S_ISREG((path / name).stat().st_mode):
            raise BrokenCheckpoint(path, f"{name} is no regular file")
        return (path / name).open("rb", buffering=0)
    except NOT_THERE as error:
        raise BrokenCheckpoint(path, f"{name}: {error.strerror}") from None


def _text_of(path: Path, name: str) -> str:
    with open_file(path, name) as file:
        data = file.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES:
        raise BrokenCheckpoint(path, f"{name} has more than {MOST_JSON_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BrokenCheckpoint(path, f"{name} is no text") from None


def _check_facts(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
    """Make sure that facts are of the schema, and of this checkpoint.

    Raises:
        BrokenCheckpoint: They are not.
    """
    for name, (types, least, most) in SCHEMA.items():
        value: Any = facts
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        parts = list(value.values()) if isinstance(value, dict) else value
        is_good = type(value) in types
        if is_good and value is not None and least is not None and most is not None:
            is_good = all(
                type(it) in _NUMBER and (least == -math.inf or least <= it <= most)
                for it in (parts if isinstance(parts, list) else [parts])
            )
        if not is_good:
            why = f"{FACTS}: {name} is {repr(value)[:80]}"
            raise BrokenCheckpoint(checkpoint.path, why)
    so_far, config = facts["so_far"], facts["config"]
    for is_so, why in (
        (so_far["num_steps"] == checkpoint.step, "so_far.num_steps is not the name's"),
        (
            checkpoint.epoch in (0, so_far["epoch"] - 1),
            "so_far.epoch is not the name's",
        ),
        (
            so_far["epoch"] <= config["epochs"] + config["probe_epochs"] + 1,
            "so_far.epoch is after the last one",
        ),
        (all(f"so_far.{it}" in SCHEMA for it in so_far), "so_far has other fields"),
        (len(facts["scale"]) == 2, "scale has not two numbers"),
    ):
        if not is_so:
            raise BrokenCheckpoint(checkpoint.path, f"{FACTS}: {why}")

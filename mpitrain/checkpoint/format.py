"""The files of a checkpoint, and whether they can be trusted. Imports no torch.

`metadata.json`:

    format, run, step, world_size   the run's id; the ranks that wrote the checkpoint
    token                           of this attempt to write it
    extra_state                     of modules that have any
    model_config                    of a model of Transformers or timm, or null
    metric                          what the best checkpoint is chosen by, or null
    user_state                      of `Checkpointer.save`, or null
    objects                         likewise: the states of its objects, but for tensors
    trainer                         of `Trainer`, or null: config, num_samples, data,
                                    stage, strategy, state, loss_scale, callbacks

A file that is missing or makes no sense raises `BrokenCheckpoint`, one that cannot be
read just now OSError, one of another format `DataError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mpitrain.errors import DataError, UsageError
from mpitrain.files import sync
from mpitrain.launch.job import heartbeat

SUMS = "SHA256SUMS"
TENSORS = "tensors.json"
METADATA = "metadata.json"

FORMAT = 2  # raised when other versions cannot read what is written
CHUNK_BYTES = 4 << 20  # read, written and hashed at once

MAX_JSON_BYTES = 1 << 28  # more is damage, and must not fill the memory

TENSOR_FILE = re.compile(r"rank-\d+\.bin")

# A missing file; other errors may be a file server's that is ill.
NOT_THERE = FileNotFoundError, IsADirectoryError, NotADirectoryError


class BrokenCheckpoint(DataError):
    """A checkpoint that is incomplete, or was changed."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is broken: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason)


# --- sums -------------------------------------------------------------------------


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the SHA-256 of all files, and sync the folder."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    write_durably(folder / SUMS, lines.encode())
    sync(folder)  # the names of the files: their own fsync leaves these out


def read_sums(path: Path) -> dict[str, str]:
    """Read the SHA-256 of a checkpoint's files, by name."""
    text = _read_text(path, SUMS)
    sums: dict[str, str] = {}
    *lines, rest = text.split("\n")
    if rest:
        raise BrokenCheckpoint(path, f"{SUMS} ends within a line")
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line)
        if match is None:
            raise BrokenCheckpoint(path, f"{SUMS} has the line {line[:80]!r}")
        sums[match[2]] = match[1]
    for name in (TENSORS, METADATA):
        if name not in sums:
            raise BrokenCheckpoint(path, f"{SUMS} lacks {name}")
    return sums


def check_file(path: Path, name: str, expected: str) -> None:
    """Check the SHA-256 of a file of a checkpoint."""
    found = hashlib.sha256()
    with open_file(path, name) as file:
        while piece := file.read(CHUNK_BYTES):
            found.update(piece)
            heartbeat("checking checkpoints")
    if found.hexdigest() != expected:
        raise BrokenCheckpoint(path, f"{name} has other bytes than {SUMS} says")


# --- JSON -------------------------------------------------------------------------


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read a file of a checkpoint that holds a JSON object."""
    text = _read_text(path, name)
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


def encode_json(values: Mapping[str, Any]) -> bytes:
    """Return a JSON object of the current format."""
    return json.dumps({"format": FORMAT, **values}).encode()


def check_json(value: Any, what: str, hint: str = "") -> None:
    """Check that a checkpoint can hold a value, and give it back unchanged."""
    reason = _not_json(value)
    if reason:
        raise UsageError(
            f"{what} has {reason}; expected what JSON can carry: numbers, text, "
            "None, lists, and dictionaries with text as keys. A checkpoint holds "
            f"nothing that could run code when it is read{hint}"
        ).on_all_ranks()


def _not_json(value: Any) -> str:
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"the key {key!r}, of type {type(key).__name__}"
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif value is not None and not isinstance(value, str | int | float):
        return f"a {type(value).__name__}"
    return next(filter(None, map(_not_json, parts)), "")


def read_metadata(path: Path, step: int, epoch: int) -> dict[str, Any]:
    """Read the metadata of a checkpoint, and check it against the folder's name."""
    found = read_json(path, METADATA)
    try:
        reason = _check_metadata(found, step, epoch)
    except (KeyError, TypeError, AttributeError) as error:
        reason = repr(error)
    if reason:
        raise BrokenCheckpoint(path, f"{METADATA}: {reason}")
    return found


def _check_metadata(found: Mapping[str, Any], step: int, epoch: int) -> str:
    """Say what is wrong with the fields that are used before the training has them."""
    if not isinstance(found.get("run"), str):
        return f"run is {found.get('run')!r}"
    metric = found.get("metric")
    is_number = isinstance(metric, int | float) and math.isfinite(metric)
    if metric is not None and not is_number:
        return f"metric is {metric!r}"
    state = (found.get("trainer") or {}).get("state", {})
    if {found.get("step"), state.get("step", step)} != {step}:
        return "step is not the name's"
    if epoch and state.get("epoch", epoch + 1) != epoch + 1:
        return "epoch is not the name's"
    return ""


# --- files ------------------------------------------------------------------------


def write_durably(path: Path, data: bytes) -> str:
    """Write a file, and sync it to the disk; return its SHA-256."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def open_file(path: Path, name: str) -> BinaryIO:
    """Open a file of a checkpoint; never one that could block, or has no end."""
    try:
        # Before it is opened: the open of a pipe waits for a writer.
        if not stat.S_ISREG((path / name).stat().st_mode):
            raise BrokenCheckpoint(path, f"{name} is no regular file")
        return (path / name).open("rb", buffering=0)
    except NOT_THERE as error:
        raise BrokenCheckpoint(path, f"{name}: {error.strerror}") from None


def _read_text(path: Path, name: str) -> str:
    with open_file(path, name) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise BrokenCheckpoint(path, f"{name} has more than {MAX_JSON_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BrokenCheckpoint(path, f"{name} is no text") from None

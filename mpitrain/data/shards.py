"""WebDataset shards: tar files, read at any place once the place is known.

A sample is a run of members whose paths agree up to the first dot of the base name: an
image (``cat.jpg``) and a label (``cat.cls``, or ``cat.json``). One rank reads all
headers; then the length is known, and any rank reads any sample by its offset.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mpitrain.data.images import EXTENSIONS, Uniform, decode
from mpitrain.data.samples import (
    MAX_BYTES,
    PARTS,
    Array,
    BadSample,
    FileIndex,
    SampleReader,
    check_labels,
    name_classes,
)
from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError

WINDOW = 8
"""Shards among which an epoch's order is shuffled at a time."""

MAX_OPEN = 2 * WINDOW
"""Shards that a reader holds open in one process."""

MAX_HEADER_BYTES = 1 << 20
"""Maximum size of a label, or of a tar header that says its own size."""

COLUMNS = ("shards", "offsets", "sizes", "labels")
"""By sample: number of its shard, int32 `(N,)`; place and size of its image in the
shard in bytes, and label, int64 `(N,)`."""

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's path: its sample's key, and its extension."""


class ShardReader(SampleReader):
    """Reads the samples of one part, in any order."""

    def __init__(
        self, data_dir: Path, index: FileIndex, part: str, image_size: int
    ) -> None:
        super().__init__(data_dir, index, part, image_size)
        self.paths = tuple(data_dir / name for name in index.facts[f"{part}_shards"])
        self.shards, self.offsets, self.sizes = (
            index.arrays[f"{part}_{name}"] for name in COLUMNS[:3]
        )
        self._files: OrderedDict[int, int] = OrderedDict()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards; the next `read` opens what it needs."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(3, image_size, image_size)` and its label."""
        shard, offset, size = (
            int(column[index]) for column in (self.shards, self.offsets, self.sizes)
        )
        number = index - int(np.searchsorted(self.shards, shard))
        where = f"{self.paths[shard]}, sample {number}, {size} bytes from {offset}"
        try:
            data = os.pread(self._open(shard), size, offset)
        except OSError as error:
            raise BadSample(where, str(error.strerror)) from error
        if len(data) < size:
            reason = f"found {len(data)} bytes, the shard changed since its scan"
            raise BadSample(where, reason)
        return decode(data, self.image_size, uniform, where), int(self.labels[index])

    def _open(self, shard: int) -> int:
        """Return a descriptor of a shard, opened in this process."""
        if self._pid != os.getpid():  # forked: the parent keeps its own
            self.close()
            self._pid = os.getpid()
        if shard not in self._files:
            while len(self._files) >= MAX_OPEN:
                os.close(self._files.popitem(last=False)[1])
            self._files[shard] = os.open(self.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(shard)
        return self._files[shard]


def scan(data_dir: Path) -> FileIndex:
    """Read the headers and labels of all shards.

    `data_dir` has ``train/*.tar`` and ``val/*.tar``, or tar files with the word train,
    val or test in their names; maybe ``classes.txt``.
    """
    classes_file = data_dir / "classes.txt"
    names: tuple[str, ...] | None = None
    if classes_file.is_file():
        names = tuple(classes_file.read_text(encoding="utf-8").rstrip().splitlines())
    arrays: dict[str, Array] = {}
    facts: dict[str, Any] = {"channels": 3, "size": None}
    for part, shards in _find_shards(data_dir).items():
        found = [
            np.fromiter(_samples_of(data_dir / name), np.dtype((np.int64, 3)))
            for name in shards
        ]
        rows = np.concatenate(found)
        if not len(rows):
            raise DataError(
                f"{data_dir}: no samples in the {len(shards)} shards of {part!r}"
            )
        numbers = np.arange(len(shards), dtype=np.int32)
        columns = (np.repeat(numbers, list(map(len, found))), *rows.T.copy())
        arrays |= {
            f"{part}_{name}": column
            for name, column in zip(COLUMNS, columns, strict=True)
        }
        labels = arrays[f"{part}_labels"]
        facts[f"{part}_shards"] = shards
        if part == "train":
            names = name_classes(labels, names, f"{data_dir}, train")
        check_labels(labels, len(labels), len(names or ()), f"{data_dir}, {part}")
    return FileIndex(arrays=arrays, classes=names or (), facts=facts)


def order(shards: npt.NDArray[np.int32], seed: int, epoch: int) -> Indices:
    """Return an order of an epoch, int64 `(N,)`, that suits disks and caches.

    Shards come in a random order, eight at a time; their samples are shuffled. `shards`
    is the shard of each sample, int32 `(N,)`. The order is equal on all ranks.
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    num_shards = int(shards.max()) + 1 if len(shards) else 0
    window = generator.permutation(num_shards) // WINDOW
    shuffled = generator.permutation(len(shards))
    by_window = np.argsort(window[shards[shuffled]], kind="stable")
    return shuffled[by_window].astype(np.int64)


def _find_shards(data_dir: Path) -> dict[str, list[str]]:
    """Return the sorted names of the shards of each part, from `data_dir`."""
    found: dict[str, list[str]] = {part: [] for part in PARTS}
    for part in PARTS:
        paths = (data_dir / part).glob("[!.]*.tar")
        found[part] = sorted(f"{part}/{path.name}" for path in paths)
    if not any(found.values()):
        for name in sorted(path.name for path in data_dir.glob("[!.]*.tar")):
            words = re.split(r"[^a-z]+", name.lower().replace("validation", "val"))
            if len(parts := set(words) & set(PARTS)) != 1:
                raise DataError(
                    f"{data_dir / name}: expected one of the words train, val and test "
                    "in its name, as in set-train-000.tar, or folders train and val"
                )
            found[parts.pop()].append(name)
    for part in ("train", "val"):
        if not found[part]:
            raise DataError(
                f"{data_dir}: no shards of {part!r}. Expected {part}/*.tar or "
                f"*-{part}-*.tar: --data-dir FOLDER"
            )
    return {part: shards for part, shards in found.items() if shards}


def _samples_of(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, size and label of each sample of a shard."""
    seen = set()
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            for key, run in groupby(_named(path, file), key=lambda named: named[0]):
                named = [*run]
                members = {extension: member for _, extension, member in named}
                if key in seen or len(members) < len(named):
                    raise DataError(
                        f"{path}: sample {key!r} has a member twice, or members that "
                        "do not follow each other; expected each key once in a shard"
                    )
                seen.add(key)
                yield _sample(path, file, key, members)
    except (tarfile.TarError, ValueError, IndexError, OSError) as error:
        raise DataError(
            f"{path}: not a tar file, truncated or broken ({error}), or compressed. "
            "Expected plain tar (gunzip, unxz, unzstd), where each sample can be read "
            "alone"
        ) from error


def _named(path: Path, file: Any) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield (key, extension, member) of what belongs to samples."""
    for member in _members(file):
        matched = NAME.fullmatch(member.name)
        if matched is None or member.isdir():
            continue
        if not member.isreg() or member.issparse() or member.size > MAX_BYTES:
            raise DataError(
                f"{path}: {member.name!r} at byte {member.offset} has {member.size} "
                f"bytes and type {member.type!r}; expected a plain file (tar "
                f"--hard-dereference) of at most {MAX_BYTES} bytes"
            )
        yield matched[1], matched[2].lower(), member


def _members(file: Any) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file, down to its end mark; ustar, GNU or pax."""

    def read(num_bytes: int) -> bytes:
        if num_bytes > MAX_HEADER_BYTES:  # long names and pax headers are read whole
            raise tarfile.ReadError(f"a header of {num_bytes} bytes")
        return bytes(file.read(num_bytes))

    headers: Any = SimpleNamespace(read=read, seek=file.seek, tell=file.tell)
    with tarfile.open(fileobj=headers, mode="r:", encoding="utf-8") as tar:
        while (member := tar.next()) is not None:
            if member.size < 0:  # tarfile would go in circles
                raise tarfile.ReadError(f"{member.name!r} has {member.size} bytes")
            tar.members = []  # type: ignore[attr-defined]  # else all stay in memory
            yield member
        # tarfile takes a header that is cut off or overwritten for the end.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(512):
            raise tarfile.ReadError(f"no end mark at byte {tar.offset}")


def _sample(
    path: Path, file: Any, key: str, members: dict[str, tarfile.TarInfo]
) -> tuple[int, int, int]:
    """Return the offset and size of the image of a sample, and its label."""
    images = [member for name, member in members.items() if name in EXTENSIONS]
    label_member = members.get("cls") or members.get("json")
    where = f"{path}: sample {key!r}"
    if len(images) != 1 or label_member is None:
        raise DataError(
            f"{where} has {', '.join(map(repr, members))}; expected one image "
            f"({' '.join(sorted(EXTENSIONS))}) and a label (cls or json)"
        )
    size = min(label_member.size, MAX_HEADER_BYTES)
    data = os.pread(file.fileno(), size, label_member.offset_data)
    label: Any = data[:40]
    try:
        if "cls" in members:
            label = int(data)
        else:
            content = json.loads(data)
            label = content["label"] if "label" in content else content["cls"]
        is_label = type(label) is int and 0 <= label < 2**31
    except (ValueError, TypeError, KeyError, RecursionError):
        is_label = False
    if not is_label:
        raise DataError(
            f"{where} has label {label!r}; expected a whole number from 0, in json as "
            "'label' or 'cls'"
        )
    return images[0].offset_data, images[0].size, label

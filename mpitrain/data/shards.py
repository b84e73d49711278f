"""WebDataset shards: tar files, each read at any place once the place is known.

A sample is a run of members whose paths agree up to the first dot of the base name: an
image (``cat.jpg``) and a label (``cat.cls``, or ``cat.json``). One rank reads all
headers; then the length is known, and any rank reads any sample by its offset.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from tarfile import TarInfo
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mpitrain.data.classes import name_classes
from mpitrain.data.images import EXTENSIONS, Uniform, decode
from mpitrain.data.samples import MOST_BYTES, PARTS, Array, BadSample, Table
from mpitrain.data.sharding import Indices
from mpitrain.data.tar import members_of
from mpitrain.errors import DataError

WINDOW = 8
"""Shards among whose samples an epoch's order jumps about."""

MAX_OPEN = 2 * WINDOW
"""Shards that a reader holds open in one process."""

WORDS = {"train": "train", "val": "val", "validation": "val", "test": "test"}
"""The part of a shard, by a word in its name."""

MAX_LABEL = 2**31 - 1

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's path: its sample's key, and what it holds of it."""


class ShardReader:
    """Reads the samples of one part, in any order.

    Args:
        data_dir: Where `names` are found.
        names: Of the shards.
        table: The arrays ``shards``, ``offsets``, ``sizes`` and ``labels`` of the part.
        image_size: Height and width of what is read, in pixels.
    """

    def __init__(
        self,
        data_dir: Path,
        names: tuple[str, ...],
        table: dict[str, Array],
        image_size: int,
    ) -> None:
        self.data_dir = data_dir
        self.names = names
        self.shards = table["shards"]
        self.offsets = table["offsets"]
        self.sizes = table["sizes"]
        self.labels = table["labels"]
        self.image_size = image_size
        self._files: OrderedDict[int, int] = OrderedDict()
        self._pid = os.getpid()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}  # descriptors do not travel

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards; the next `read` opens what it needs."""
        while self._files:
            os.close(self._files.popitem()[1])

    def where(self, index: int) -> str:
        """Return the shard of a sample, and its place there."""
        shard = self.shards[index]
        number = index - int(np.searchsorted(self.shards, shard))
        return (
            f"{self.data_dir / self.names[shard]}, sample {number}, "
            f"{self.sizes[index]} bytes from {self.offsets[index]}"
        )

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(3, image_size, image_size)` and its label.

        Raises:
            BadSample: The shard is gone or shorter than it was, or no image is there.
        """
        size = int(self.sizes[index])
        try:
            file = self._open(int(self.shards[index]))
            data = os.pread(file, size, int(self.offsets[index]))
        except OSError as error:
            raise BadSample(self.where(index), str(error.strerror)) from error
        if len(data) < size:
            why = f"{len(data)} bytes could be read, the shard changed since its scan"
            raise BadSample(self.where(index), why)
        image = decode(data, self.image_size, uniform, self.where(index))
        return image, int(self.labels[index])

    def _open(self, shard: int) -> int:
        """Return a descriptor of a shard, opened in this process."""
        if self._pid != os.getpid():  # forked: the parent keeps its own
            self.close()
            self._pid = os.getpid()
        if shard not in self._files:
            while len(self._files) >= MAX_OPEN:
                os.close(self._files.popitem(last=False)[1])
            path = self.data_dir / self.names[shard]
            self._files[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(shard)
        return self._files[shard]


def scan(data_dir: Path, progress: Callable[[str], object] | None = None) -> Table:
    """Read the headers and labels of all shards.

    Args:
        data_dir: Folder with ``train/*.tar`` and ``val/*.tar``, or with tar files that
            have the word train, val or test in their names; maybe ``classes.txt``.
        progress: Called with a line of text after each shard.

    Returns:
        For each part, by sample: its shard int32, and offset, size (of the image, in
        bytes) and label int64. The shards' names are among the facts.

    Raises:
        DataError: There are no shards, or one is broken or holds what is no sample.
    """
    if not data_dir.is_dir():
        raise DataError(
            f"{data_dir}: no such folder. Expected one with train/*.tar and val/*.tar: "
            "--data-dir FOLDER"
        )
    names = _class_names(data_dir / "classes.txt")
    arrays: dict[str, Array] = {}
    facts: dict[str, Any] = {"channels": 3, "size": None}
    for part, shards in _find_shards(data_dir).items():
        num_classes = len(names) if names else None
        arrays |= _scan_part(data_dir, part, shards, num_classes, progress)
        facts[f"{part}_shards"] = shards
        if part == "train":
            where = f"{data_dir}, train"
            names = name_classes(arrays["train_labels"], names, where)
    assert names is not None
    return Table(arrays=arrays, classes=names, facts=facts)


def readers(data_dir: Path, table: Table, image_size: int) -> dict[str, ShardReader]:
    """Return a reader for each part.

    Args:
        data_dir: As given to `scan`.
        table: What `scan` returned, on any rank.
        image_size: Height and width of what is read, in pixels.
    """
    columns = ("shards", "offsets", "sizes", "labels")
    return {
        part: ShardReader(
            data_dir,
            tuple(table.facts[f"{part}_shards"]),
            {column: table.arrays[f"{part}_{column}"] for column in columns},
            image_size,
        )
        for part in PARTS
        if f"{part}_shards" in table.facts
    }


def order(shards: npt.NDArray[np.int32], seed: int, epoch: int) -> Indices:
    """Return an order of an epoch that disks and caches like.

    Shards come in a random order, eight at a time; within the eight, samples do.

    Args:
        shards: Each sample's shard, int32 `(N,)`.
        seed: The run's seed.
        epoch: The epoch's number.

    Returns:
        A permutation of ``0 ... N - 1``, int64 `(N,)`; equal on all ranks and machines.
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
    if any((data_dir / part).is_dir() for part in PARTS):
        for part in PARTS:
            names = sorted(path.name for path in (data_dir / part).glob("[!.]*.tar"))
            found[part] = [f"{part}/{name}" for name in names]
    else:
        for name in sorted(path.name for path in data_dir.glob("[!.]*.tar")):
            words = re.split(r"[^a-z]+", name.lower())
            parts = {WORDS[word] for word in words if word in WORDS}
            if len(parts) != 1:
                raise DataError(
                    f"{data_dir / name}: neither {' nor '.join(map(repr, PARTS))} is "
                    "the one such word in its name. Expected as in set-train-000.tar, "
                    "or folders train and val."
                )
            found[parts.pop()].append(name)
    for part in ("train", "val"):
        if not found[part]:
            folder = data_dir / part if (data_dir / part).is_dir() else data_dir
            files = ", ".join(repr(p.name) for p in sorted(folder.iterdir())[:5])
            raise DataError(
                f"{data_dir}: no shards of {part!r}. Expected {part}/*.tar or "
                f"*-{part}-*.tar; found {files or 'nothing'} in {folder}"
            )
    return {part: shards for part, shards in found.items() if shards}


def _class_names(path: Path) -> tuple[str, ...] | None:
    """Read the names of the classes, one a line; ``None`` without such a file."""
    if not path.exists():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read, {error}") from error
    names = [line.strip() for line in text.rstrip().splitlines()]
    if not names:
        raise DataError(
            f"{path}: no names. Expected one on each line, or no such file."
        )
    if "" in names:
        raise DataError(f"{path}: line {names.index('') + 1} is empty, expected a name")
    return tuple(names)


def _scan_part(
    data_dir: Path,
    part: str,
    shards: list[str],
    num_classes: int | None,
    progress: Callable[[str], object] | None,
) -> dict[str, Array]:
    """Read the headers and labels of one part."""
    found: list[npt.NDArray[np.int64]] = []
    num_samples = 0
    for number, name in enumerate(shards):
        places = _samples_of(data_dir / name, num_classes)
        rows = np.fromiter(places, np.dtype((np.int64, 3)))
        found.append(np.insert(rows, 0, number, axis=1))
        num_samples += len(rows)
        if progress:
            progress(
                f"{part}: {number + 1} of {len(shards)} shards, {num_samples} samples"
            )
    if not num_samples:
        raise DataError(
            f"{data_dir}: no samples in the {len(shards)} shards of {part!r}"
        )
    all_rows = np.concatenate(found)
    return {
        f"{part}_shards": all_rows[:, 0].astype(np.int32),
        f"{part}_offsets": np.ascontiguousarray(all_rows[:, 1]),
        f"{part}_sizes": np.ascontiguousarray(all_rows[:, 2]),
        f"{part}_labels": np.ascontiguousarray(all_rows[:, 3]),
    }


def _samples_of(path: Path, num_classes: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, size and label of each sample of a shard."""
    seen: set[str] = set()
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: no regular file, expected a tar file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened, {error.strerror}") from error
    with file:
        for key, run in groupby(_named(path, file), key=lambda named: named[0]):
            members: dict[str, TarInfo] = {}
            where = ""
            for _, extension, member in run:
                where = where or f"{path}: sample {key!r} at byte {member.offset}"
                if extension in members:
                    raise DataError(f"{where} has {extension!r} twice, expected once")
                members[extension] = member
            if key in seen:
                raise DataError(
                    f"{where} was there before. Expected the members of a sample to "
                    "follow each other, and each key once in a shard."
                )
            seen.add(key)
            image = _image_of(members, where)
            label = _label_of(file, members, num_classes, where)
            yield image.offset_data, image.size, label


def _named(path: Path, file: BinaryIO) -> Iterator[tuple[str, str, TarInfo]]:
    """Yield (key, extension, member) of what belongs to samples."""
    for member in members_of(path, file):
        matched = NAME.fullmatch(member.name)
        if matched is None or member.isdir():
            continue
        key, extension = matched[1], matched[2].lower()
        if not member.isreg() or member.issparse():
            raise DataError(
                f"{path}: {member.name!r} at byte {member.offset} is no plain file "
                f"(type {member.type!r}). Expected its data: tar --hard-dereference"
            )
        if member.size > MOST_BYTES:
            raise DataError(
                f"{path}: {member.name!r} at byte {member.offset} has {member.size} "
                f"bytes, expected {MOST_BYTES} at most"
            )
        yield key, extension, member


def _image_of(members: dict[str, TarInfo], where: str) -> TarInfo:
    """Return the one image of a sample."""
    images = [extension for extension in members if extension in EXTENSIONS]
    if len(images) != 1:
        found = ", ".join(map(repr, members))
        raise DataError(
            f"{where} has {len(images) or 'no'} images: found {found}, expected one of "
            f"{' '.join(sorted(EXTENSIONS))}"
        )
    return members[images[0]]


def _label_of(
    file: BinaryIO, members: dict[str, TarInfo], num_classes: int | None, where: str
) -> int:
    """Read the label of a sample."""
    label: Any
    member = members.get("cls") or members.get("json")
    if member is None:
        found = ", ".join(map(repr, members))
        raise DataError(
            f"{where} has no label: found {found}, expected 'cls' or 'json'"
        )
    data = os.pread(file.fileno(), member.size, member.offset_data)
    if "cls" in members:
        matched = re.fullmatch(rb"\s*([+-]?[0-9]{1,18})\s*", data)
        label = int(matched[1]) if matched else data[:40]
    else:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} has json that is none: {error}") from error
        if not isinstance(content, dict) or not {"label", "cls"} & set(content):
            raise DataError(f"{where} has json without the key 'label' or 'cls'")
        label = content["label"] if "label" in content else content["cls"]
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{where} has label {label!r}, expected a whole number")
    last = MAX_LABEL if num_classes is None else num_classes - 1
    if not 0 <= label <= last:
        raise DataError(f"{where} has label {label} out of range, expected 0 to {last}")
    return label

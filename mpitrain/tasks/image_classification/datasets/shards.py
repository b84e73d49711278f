"""WebDataset shards: tar files, read at any place once the place is known.

A sample is a run of members whose paths agree up to the first dot of the base name: an
image (``cat.jpg``) and a label (``cat.cls``, or ``cat.json``). One rank reads all
headers; then the length is known, and any rank reads any sample by its offset.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mpitrain.data.samples import PARTS, Array, BadSample
from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets.images import (
    EXTENSIONS,
    Uniform,
    decode,
)
from mpitrain.tasks.image_classification.datasets.index import (
    MAX_BYTES,
    FileIndex,
    ImageReader,
    check_labels,
    name_classes,
)

WINDOW = 8  # shards among which an epoch's order is shuffled at a time
MAX_OPEN = 2 * WINDOW  # tar files that one process holds open

COLUMNS = ("shards", "offsets", "sizes", "labels")
"""By sample: number of its shard, int32 `(N,)`; place and size of its image in the
shard in bytes, and label, int64 `(N,)`."""

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's path: its sample's key, and its extension."""


class ShardReader(ImageReader):
    """Reads the samples of one part, in any order."""

    def set_up(self, index: FileIndex) -> None:
        """Take the places of the samples from the index."""
        self.paths = tuple(
            self.data_dir / n for n in index.facts[f"{self.part}_shards"]
        )
        self.shards, self.offsets, self.sizes = (
            index.arrays[f"{self.part}_{name}"] for name in COLUMNS[:3]
        )
        _open.cache_clear()  # a file may have changed since the last scan

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(3, image_size, image_size)` and its label."""
        shard, offset, size = (
            int(column[index]) for column in (self.shards, self.offsets, self.sizes)
        )
        number = index - int(np.searchsorted(self.shards, shard))
        where = f"{self.paths[shard]}, sample {number}, {size} bytes from {offset}"
        try:
            data = os.pread(_open(self.paths[shard]), size, offset)
        except OSError as error:
            raise BadSample(where, str(error.strerror)) from error
        if len(data) < size:
            reason = f"found {len(data)} bytes, the shard changed since its scan"
            raise BadSample(where, reason)
        return decode(data, self.image_size, uniform, where), int(self.labels[index])


class _Descriptor(int):
    """Closes its file when the cache below drops it."""

    def __del__(self) -> None:
        os.close(self)


@functools.lru_cache(maxsize=MAX_OPEN)
def _open(path: Path) -> _Descriptor:
    return _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


os.register_at_fork(after_in_child=_open.cache_clear)


def scan(data_dir: Path) -> FileIndex:
    """Read the headers and labels of all shards.

    `data_dir` has ``train/*.tar`` and ``val/*.tar``, or tar files with the word train,
    val or test in their names; maybe ``classes.txt``.
    """
    classes_file = data_dir / "classes.txt"
    names: tuple[str, ...] | None = None
    if classes_file.is_file():
        try:  # Windows' editors put a mark before the first name
            text = classes_file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{classes_file}: byte {error.start} is not UTF-8; expected the names "
                "in UTF-8: iconv -f latin1 -t utf-8"
            ) from None
        names = tuple(text.rstrip().splitlines())
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
    # Stable: within a window the shuffled order stays.
    by_window = np.argsort(window[shards[shuffled]], kind="stable")
    return shuffled[by_window].astype(np.int64)


def _find_shards(data_dir: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
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
    if missing := [part for part in ("train", "val") if not found[part]]:
        raise DataError(
            f"{data_dir}: no shards of {missing[0]!r}. Expected {missing[0]}/*.tar or "
            f"*-{missing[0]}-*.tar: --data-dir FOLDER"
        )
    return {part: names for part, names in found.items() if names}


def _samples_of(path: Path) -> Iterator[tuple[int, int, int]]:
    seen = set()
    if not path.is_file():
        raise DataError(f"{path}: not a regular file")
    try:
        with path.open("rb") as file:
            for key, run in groupby(_members(path, file), key=lambda found: found[0]):
                found = [*run]
                members = {extension: member for _, extension, member in found}
                if key in seen or len(members) < len(found):
                    raise DataError(
                        f"{path}: sample {key!r} has a member twice, or members that "
                        "do not follow each other; expected each key once in a file"
                    )
                seen.add(key)
                yield _sample(file, f"{path}: sample {key!r}", members)
    except (tarfile.TarError, ValueError, IndexError, OSError) as error:
        if isinstance(error, DataError):  # of a sample; it is a ValueError
            raise
        raise DataError(
            f"{path}: not a tar file, truncated or broken ({error}), or compressed. "
            "Expected plain tar (gunzip, unxz, unzstd), where each sample can be read "
            "alone"
        ) from error


def _members(path: Path, file: Any) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield (key, extension, member) of what belongs to samples, to the end mark."""
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # else all stay in memory
            if member.size < 0:  # tarfile would go in circles
                raise tarfile.ReadError(f"{member.name!r} has {member.size} bytes")
            matched = NAME.fullmatch(member.name)
            if matched is None or member.isdir():
                continue
            if not member.isreg() or member.issparse() or member.size > MAX_BYTES:
                raise DataError(
                    f"{path}: {member.name!r} at byte {member.offset} has "
                    f"{member.size} bytes and type {member.type!r}; expected a plain "
                    f"file (tar --hard-dereference) of at most {MAX_BYTES} bytes"
                )
            yield matched[1], matched[2].lower(), member
        # tarfile takes a header that is cut off or overwritten for the end.
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) != bytes(512):
            raise tarfile.ReadError(f"no end mark at byte {tar.offset}")


def _sample(
    file: Any, where: str, members: dict[str, tarfile.TarInfo]
) -> tuple[int, int, int]:
    """Return the offset and size of the image of a sample, and its label."""
    images = [member for name, member in members.items() if name in EXTENSIONS]
    label_member = members.get("cls") or members.get("json")
    if len(images) != 1 or label_member is None:
        raise DataError(
            f"{where} has {', '.join(map(repr, members))}; expected one image "
            f"({' '.join(sorted(EXTENSIONS))}) and a label (cls or json)"
        )
    data = os.pread(file.fileno(), label_member.size, label_member.offset_data)
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

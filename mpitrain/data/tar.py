"""The headers of a tar file, down to its very end.

Python's `tarfile` ends without a word at a header that is cut off or overwritten: what
it took for the end is looked at once more here.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from mpitrain.errors import DataError

BLOCK = 512
CHUNK = 1 << 20

COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
"""By the first bytes: what compressed a file, and what undoes it."""


def members_of(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file, of whatever type; ustar, GNU or pax.

    Args:
        path: For errors.
        file: `path`, opened.

    Raises:
        DataError: It is no tar file, is compressed, broken or truncated, or there is
            more after its end.
    """
    size = os.fstat(file.fileno()).st_size

    def read(num_bytes: int) -> bytes:
        if num_bytes > CHUNK:  # long names and pax headers are read whole
            raise tarfile.ReadError(f"a header of {num_bytes} bytes")
        return file.read(num_bytes)

    headers: Any = SimpleNamespace(read=read, seek=file.seek, tell=file.tell)
    _check_start(path, file, size)
    try:
        tar = tarfile.open(fileobj=headers, mode="r:", encoding="utf-8")  # noqa: SIM115
    except (tarfile.TarError, ValueError, IndexError) as error:
        raise DataError(
            f"{path}: not a tar file, or truncated in its first header ({error}); "
            f"{size} bytes"
        ) from error
    while True:
        try:
            member = tar.next()
        except (tarfile.TarError, ValueError, IndexError) as error:
            _check_end(path, file, tar.offset, size)
            raise DataError(f"{path}: broken at byte {tar.offset}, {error}") from error
        if member is None:
            break
        tar.members.clear()  # type: ignore[attr-defined]  # else all stay in memory
        if tar.offset > size:
            raise _truncated(path, size, f"{member.name!r} goes on to {tar.offset}")
        if tar.offset <= member.offset:  # a negative size: tarfile would go in circles
            raise DataError(
                f"{path}: broken at byte {member.offset}, size {member.size}"
            )
        yield member
    _check_end(path, file, tar.offset, size)


def _check_start(path: Path, file: BinaryIO, size: int) -> None:
    """Refuse what does not begin as a tar file does."""
    if size == 0:
        raise DataError(f"{path}: empty, 0 bytes. Expected a tar file: copy it anew.")
    start = os.pread(file.fileno(), 8, 0)
    for magic, (name, command) in COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(
                f"{path}: compressed with {name}, where no sample can be read alone. "
                f"Expected plain tar: {command} FILE"
            )


def _check_end(path: Path, file: BinaryIO, end: int, size: int) -> None:
    """Refuse a tar file that does not end with a block of zeros and padding.

    Args:
        path: For errors.
        file: `path`, opened.
        end: Where no further header was found, in bytes.
        size: Of the file, in bytes.
    """
    block = os.pread(file.fileno(), BLOCK, end)
    if end + _extent(block) > size:
        raise _truncated(path, size, f"no end mark from {end} on")
    if any(block):
        raise DataError(f"{path}: broken at byte {end}, where a header was expected")
    for start in range(end + BLOCK, size, CHUNK):
        if os.pread(file.fileno(), CHUNK, start).strip(b"\0"):
            raise DataError(
                f"{path}: {size - end} bytes from its end at {end} on, not all zero. "
                "Expected one tar file; to join several: tar --concatenate"
            )


def _extent(block: bytes) -> int:
    """Return the least number of bytes that a header, or an end mark, takes up.

    A long name is a header of its own, with the name as its data; a second follows.
    """
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return BLOCK
    blocks_of_data = -(-header.size // BLOCK)
    return BLOCK + blocks_of_data * BLOCK + BLOCK


def _truncated(path: Path, size: int, why: str) -> DataError:
    return DataError(f"{path}: truncated at byte {size}, {why}. Copy it anew.")

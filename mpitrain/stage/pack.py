"""The files to stage as an index and a stream of bytes, and one file that holds them.

The stream is the content of all files, in the order of the index, cut into pieces. A
piece travels with its CRC32 in front. The pack is a file of the stream, so that the
next job reads one large file in place of many small ones.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
import os
import socket
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import DataError
from mpitrain.stage.environment import Root
from mpitrain.watchdog.process import is_gone

MAX_PIECE_BYTES = 512 << 10
MIN_PIECE_BYTES = 60 << 10
NUM_PIECES = 512  # about so many: each node of a chain is behind by a few of them
FOLDER = f"mpitrain-stage-{os.getuid()}"  # of all copies, in the folder of `--to`
PACK_NAME = ".mpitrain-stage.pack"
HEAD = struct.Struct("<II")  # CRC32 of the piece, and 1; 0: there is no content
_PACK_HEAD = struct.Struct("<16s32sQ")  # magic, digest of the index, size of the stream
_MAGIC = b"mpitrain-stage-1"
_DEAD_SECONDS = 3600.0  # a pack in the making that has not changed for so long is dead
NUM_READERS = 16


class Entry(NamedTuple):
    """A folder, a file or a symbolic link."""

    path: str  # in the copy: `<number of the root>/<its name>/...`
    mode: int  # as of lstat(2), with the kind
    size: int = 0  # of a file
    mtime_ns: int = 0  # of a file
    target: str = ""  # of a link


class Index:
    """All that is staged together. Equal on all nodes."""

    def __init__(self, roots: Sequence[Root], entries: Sequence[Entry]) -> None:
        self.roots = tuple(roots)
        self.entries = sorted(entries)
        self.files = [it for it in self.entries if stat.S_ISREG(it.mode) and it.size]
        self._ends = list(itertools.accumulate(it.size for it in self.files))
        self.size = self._ends[-1] if self._ends else 0
        self.num_files = sum(stat.S_ISREG(it.mode) for it in self.entries)
        size = min(self.size // NUM_PIECES, MAX_PIECE_BYTES)
        self.max_piece_bytes = max(size, MIN_PIECE_BYTES)
        self.num_pieces = -(-self.size // self.max_piece_bytes)
        self._text = json.dumps([self.roots, self.entries]).encode()
        self.digest = hashlib.sha256(self._text).digest()

    def encode(self) -> bytes:
        """Return the index as bytes, to be sent."""
        return zlib.compress(self._text, 1)

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """Read an index; a DataError if a name would lie outside of the copy."""
        roots, entries = json.loads(zlib.decompress(data))
        made = cls([Root(*it) for it in roots], [Entry(*it) for it in entries])
        for path, *_ in made.entries:
            if {"", ".", ".."} & set(path.split("/")) or "\0" in path:
                raise DataError(f"{path!r} is outside of the copy")
        return made

    def piece_size(self, number: int) -> int:
        """Return the number of bytes of a piece."""
        return min(self.max_piece_bytes, self.size - number * self.max_piece_bytes)

    def parts(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Return parts: number of the file, offset there, offset in the piece, size."""
        begin = number * self.max_piece_bytes
        end = begin + self.piece_size(number)
        file = bisect.bisect_right(self._ends, begin)
        at = begin
        while at < end:
            until = min(end, self._ends[file])
            start = self._ends[file] - self.files[file].size
            yield file, at - start, at - begin, until - at
            file, at = file + 1, until

    def source(self, entry: Entry) -> str:
        """Return the path that an entry was found at."""
        number, _, rest = entry.path.partition("/")
        return os.path.join(os.path.dirname(self.roots[int(number)].path), rest)  # noqa: PTH118, PTH120


def walk(
    roots: Sequence[Root],
    pack: Path | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> Index:
    """Find all that is below some roots; opens no file.

    Left out: packs and copies, other roots, files that this user may not read, sockets,
    pipes and devices, and the folders ``pkgs`` and ``envs`` of a conda installation.
    """
    left_out = {str(pack)} | {root.path for root in roots}
    for root in roots:
        if os.path.isdir(f"{root.path}/conda-meta"):  # noqa: PTH112
            left_out |= {f"{root.path}/pkgs", f"{root.path}/envs"}

    def scan(found: tuple[str, str]) -> tuple[list[Entry], list[tuple[str, str]]]:
        folder, inner = found
        entries, folders = [], []
        with contextlib.suppress(PermissionError), os.scandir(folder) as listed:
            for item in listed:
                is_ours = item.name == FOLDER or item.path.startswith(f"{pack}.")
                if item.path in left_out or is_ours:
                    continue
                path = f"{inner}/{item.name}"
                entry = _entry(item.path, path, item.stat(follow_symlinks=False))
                if entry is not None:
                    entries.append(entry)
                    if stat.S_ISDIR(entry.mode):
                        folders.append((item.path, path))
        return entries, folders

    entries: list[Entry] = []
    level: list[tuple[str, str]] = []
    for number, root in enumerate(roots):
        inner = f"{number}/{Path(root.path).name}"
        entry = _entry(root.path, inner, os.stat(root.path))  # noqa: PTH116
        if entry is not None:
            entries += [Entry(str(number), stat.S_IFDIR | 0o700), entry]
            level += [(root.path, inner)] if stat.S_ISDIR(entry.mode) else []
    with ThreadPoolExecutor(NUM_READERS) as pool:  # it waits for a file server
        while level:
            below: list[tuple[str, str]] = []
            for found, folders in pool.map(scan, level):
                entries += found
                below += folders
                on_progress()
            level = below
    return Index(roots, entries)


def _entry(source: str, path: str, found: os.stat_result) -> Entry | None:
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        return Entry(path, stat.S_IFDIR | stat.S_IMODE(mode))
    if stat.S_ISLNK(mode):
        target = os.readlink(source)  # noqa: PTH115
        if not os.path.isabs(target):  # noqa: PTH117
            # One that leads out of its root would lead nowhere in the copy.
            where = os.path.normpath(f"{os.path.dirname(path)}/{target}")  # noqa: PTH120
            if where.split("/")[:2] != path.split("/")[:2]:
                target = os.path.normpath(f"{os.path.dirname(source)}/{target}")  # noqa: PTH120
        return Entry(path, stat.S_IFLNK, target=target)
    is_readable = mode & 0o004 or os.access(source, os.R_OK)
    if not stat.S_ISREG(mode) or not is_readable:
        return None
    kept = stat.S_IFREG | mode & 0o777
    return Entry(path, kept, found.st_size, found.st_mtime_ns)


class Source:
    """Reads pieces, of the pack or of the files, on rank zero; threads share it.

    While it reads files it writes the pack. `warnings` tells what went wrong with the
    pack; `error` why the content cannot be sent.
    """

    def __init__(self, index: Index, pack: Path | None) -> None:
        self.index = index
        self.error = ""
        self.warnings: list[str] = []
        self._pack = pack
        self._lock = threading.Lock()
        self._crcs = [0] * index.num_pieces
        self._head = _PACK_HEAD.pack(_MAGIC, index.digest, index.size)
        self._read_from = self._open_pack()
        self.reads_pack = self._read_from is not None
        self._temporary = ""
        self._write_to = None if self.reads_pack else self._make_pack()
        self._writes = self._write_to is not None

    def read(self, number: int) -> bytearray:
        """Return a piece with its head; a head alone if it cannot be read."""
        if self.error:
            return bytearray(HEAD.size)
        piece = bytearray(HEAD.size + self.index.piece_size(number))
        content = memoryview(piece)[HEAD.size :]
        try:
            if not self._read_pack(number, content):
                self._read_files(number, content)
        except OSError as error:
            self.error = f"{error.filename or 'a file'}: {error.strerror}"
            return bytearray(HEAD.size)
        crc = zlib.crc32(content)
        HEAD.pack_into(piece, 0, crc, 1)
        self._write_pack(number, content, crc)
        return piece

    def close(self) -> None:
        """Finish the pack that was written; remove one that is incomplete or wrong."""
        if self._read_from is not None:
            os.close(self._read_from)
        if self._write_to is None:
            return
        if self.error:
            self._give_up("")
        if self._writes:
            try:
                crcs = struct.pack(f"<{len(self._crcs)}I", *self._crcs)
                os.pwrite(self._write_to, crcs, len(self._head) + self.index.size)
                os.pwrite(self._write_to, self._head, 0)
                os.fsync(self._write_to)  # NFS tells of a quota only here
                os.replace(self._temporary, str(self._pack))
            except OSError as error:
                self._give_up(error.strerror or str(error))
        os.close(self._write_to)

    def _read_files(self, number: int, content: memoryview) -> None:
        for file, offset, at, size in self.index.parts(number):
            entry = self.index.files[file]
            path = self.index.source(entry)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                state = (found.st_size, found.st_mtime_ns)
                is_same = state == (entry.size, entry.mtime_ns)
                part = content[at : at + size]
                if not is_same or _read(descriptor, part, offset) != size:
                    raise OSError(0, "it has just been changed", path)
            finally:
                os.close(descriptor)

    # --- the pack ---------------------------------------------------------------------

    def _open_pack(self) -> int | None:
        if self._pack is None or not self.index.size:
            return None
        with contextlib.suppress(OSError):
            descriptor = os.open(self._pack, os.O_RDONLY)
            trailer = bytearray(4 * self.index.num_pieces)
            size = len(self._head) + self.index.size
            if (
                os.pread(descriptor, len(self._head), 0) == self._head
                and os.fstat(descriptor).st_size == size + len(trailer)
                and _read(descriptor, memoryview(trailer), size) == len(trailer)
            ):
                self._crcs = list(struct.unpack(f"<{len(self._crcs)}I", trailer))
                return descriptor
            os.close(descriptor)
        return None

    def _read_pack(self, number: int, content: memoryview) -> bool:
        if self._read_from is None or not self.reads_pack:
            return False
        at = len(self._head) + number * self.index.max_piece_bytes
        with contextlib.suppress(OSError):
            size = _read(self._read_from, content, at)
            if size == len(content) and zlib.crc32(content) == self._crcs[number]:
                return True
        with self._lock:
            if self.reads_pack:
                self.reads_pack = False
                self.warnings.append(f"{self._pack} was damaged and is removed")
                with contextlib.suppress(OSError):
                    os.unlink(str(self._pack))  # noqa: PTH108
        return False

    def _make_pack(self) -> int | None:
        if self._pack is None or not self.index.size:
            return None
        host = socket.gethostname()
        with contextlib.suppress(OSError):
            for path in self._pack.parent.glob(f"{self._pack.name}.*"):
                _, _, writer = path.name[len(self._pack.name) :].partition(f".{host}.")
                is_dead = writer.isdecimal() and is_gone(int(writer))
                if is_dead or time.time() - path.stat().st_mtime > _DEAD_SECONDS:
                    path.unlink()
        self._temporary = f"{self._pack}.{host}.{os.getpid()}"
        try:
            return os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            self._warn(error.strerror or str(error))
            return None

    def _write_pack(self, number: int, content: memoryview, crc: int) -> None:
        if self._write_to is None or not self._writes:
            return
        self._crcs[number] = crc
        at = len(self._head) + number * self.index.max_piece_bytes
        try:
            write_all(self._write_to, content, at)
        except OSError as error:
            with self._lock:
                if self._writes:
                    self._give_up(error.strerror or str(error))

    def _give_up(self, reason: str) -> None:
        """Remove the pack in the making; other threads may still write to it."""
        self._writes = False
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)  # noqa: PTH108
            os.truncate(self._write_to or -1, 0)
        if reason:
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        self.warnings.append(
            f"{self._pack} was not written ({reason}); the next job reads the files "
            "again. --pack PATH names another place, --pack none writes none"
        )


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of `content`; the kernel may write less at once."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)


def _read(descriptor: int, content: memoryview, offset: int) -> int:
    """Read until `content` is full or the file ends; return the number of bytes."""
    done = 0
    while done < len(content):
        num = os.preadv(descriptor, [content[done:]], offset + done)
        if num == 0:
            break
        done += num
    return done

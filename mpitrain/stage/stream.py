"""The files to stage, as a stream of pieces from rank zero through a chain of nodes.

Rank zero alone reads the files. Each node forwards a piece as soon as it has it, so
that the time does not grow with the number of nodes, and no link carries the stream
twice in one direction. All nodes know the index, and so the sizes of all pieces.
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = f"mpitrain-stage-{os.getuid()}"  # of all copies, in the folder of `--to`
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 60 << 10, 512 << 10
NUM_PIECES = 512  # about so many: each node of a chain is behind by a few of them
NUM_READERS = 16
WINDOW = 16  # pieces that are read or received, and written, at once
MAX_SENDS = 2  # they share the link, so that with more of them all arrive later


class Entry(NamedTuple):
    """A folder, a file or a symbolic link."""

    path: str
    mode: int  # as of lstat(2), with the kind
    size: int = 0  # of a file
    mtime_ns: int = 0  # of a file
    target: str = ""  # of a link


class Index:
    """All that is staged together, and how it is cut into pieces. Equal on all nodes.

    A piece is a list of parts: a file, where the part begins in it, and its size.
    """

    def __init__(self, roots: Mapping[str, str], entries: Iterable[Entry]) -> None:
        self.roots = roots  # real paths by those that the environment has
        # Once each, since a root may be below another. A folder comes before its files.
        self.entries = sorted({it.path: it for it in entries}.values())
        self.files = [it for it in self.entries if stat.S_ISREG(it.mode)]
        self.size = sum(it.size for it in self.files)
        size = max(MIN_PIECE_BYTES, min(self.size // NUM_PIECES, MAX_PIECE_BYTES))
        parts = [
            (it, offset, min(size, it.size - offset))
            for it in self.files
            for offset in range(0, it.size or 1, size)  # `or 1`: empty ones are made
        ]
        # Small files go together: a piece for each would cost a message for each.
        ends = itertools.accumulate(it[2] for it in parts)
        groups = itertools.groupby(parts, lambda _: next(ends) // size)  # < 2 * size
        self.pieces = [list(group) for _, group in groups]
        self.sizes = [sum(it[2] for it in piece) for piece in self.pieces]


def walk(roots: Iterable[str], on_progress: Callable[[], object]) -> list[Entry]:
    """Find all that is below some roots, which are no links; opens no file.

    Left out: copies, files that this user may not read, sockets, pipes and devices, and
    the folders ``pkgs`` and ``envs`` of a conda installation.
    """

    def scan(folder: str) -> list[Entry]:
        found: list[Entry] = []
        # Another job may remove a folder, or rename a file x.pyc.123, meanwhile.
        with suppress(PermissionError, FileNotFoundError):
            names = {*os.listdir(folder)} - {FOLDER}  # noqa: PTH208
            if "conda-meta" in names:  # archives, and environments that are not ours
                names -= {"pkgs", "envs"}
            for name in names:
                with suppress(FileNotFoundError):
                    found += _entry(f"{folder}/{name}")
        return found

    entries: list[Entry] = []
    # Once each: a root and a link to it are one folder.
    level = [it for root in dict.fromkeys(roots) for it in _entry(root)]
    # In threads, one per folder and not per file: each waits for a file server.
    with ThreadPoolExecutor(NUM_READERS) as pool:
        while level:
            entries += level
            folders = [it.path for it in level if stat.S_ISDIR(it.mode)]
            level = []
            for inner in pool.map(scan, folders):
                level += inner
                on_progress()
    return entries


def _entry(path: str) -> list[Entry]:
    found = os.lstat(path)
    mode = found.st_mode
    if stat.S_ISDIR(mode):
        return [Entry(path, mode)]
    if stat.S_ISLNK(mode):
        target = os.readlink(path)  # noqa: PTH115
        if ".." in target.split("/"):  # it may lead out of the root
            target = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
        return [Entry(path, stat.S_IFLNK, target=target)]
    # access(2) asks the file server once more: only where others may not read.
    if not stat.S_ISREG(mode) or not (mode & 0o004 or os.access(path, os.R_OK)):
        return []
    return [Entry(path, mode & ~0o7000, found.st_size, found.st_mtime_ns)]


class Source:
    """The files, on rank zero."""

    def __init__(self, index: Index) -> None:
        self.error = ""  # the first one
        self._pieces = index.pieces

    def read(self, number: int, piece: bytearray) -> None:
        """Fill a piece; called by threads. After an error its content does not count.

        The nodes wait for pieces of these sizes, so that the stream has to go on.
        """
        rest = memoryview(piece)
        for entry, offset, size in () if self.error else self._pieces[number]:
            part, rest = rest[:size], rest[size:]
            try:
                with open(entry.path, "rb") as file:  # noqa: PTH123
                    found, _ = os.fstat(file.fileno()), file.seek(offset)
                    state = (found.st_size, found.st_mtime_ns, file.readinto(part))
                if state != (entry.size, entry.mtime_ns, size):
                    raise OSError(0, "it has just been changed")  # noqa: TRY301
            except Exception as error:  # of any kind: the piece has other bytes
                reason = getattr(error, "strerror", "") or error
                self.error = self.error or f"{entry.path}: {reason}"


def send_through(
    chain: MPI.Intracomm,
    sizes: Sequence[int],
    read: Callable[[int, bytearray], None],
    write: Callable[[int, bytearray], None],
    on_progress: Callable[[], object],
) -> None:
    """Send pieces of some sizes from rank zero through all ranks. Collective.

    Threads of rank zero call `read`. A thread of each rank calls `write` with all
    pieces in their order. Neither raises. Waits asleep, and calls `on_progress`
    whenever a piece has moved.
    """
    pieces: deque[bytearray] = deque()
    arriving: deque[Callable[[], bool]] = deque()
    leaving: deque[Callable[[], bool]] = deque()
    writing: deque[Callable[[], bool]] = deque()

    def begin(number: int) -> None:
        pieces.append(bytearray(sizes[number]))
        if chain.rank == 0:
            arriving.append(readers.submit(read, number, pieces[-1]).done)
        else:
            arriving.append(chain.Irecv(pieces[-1], chain.rank - 1).Test)

    # Asleep: a blocking MPI call takes a whole core from readers and writer.
    def wait_for_first(some: deque[Callable[[], bool]]) -> None:
        is_done, pause = some.popleft(), 0.0
        while not is_done():  # each test moves all that MPI receives and sends
            time.sleep(pause)
            pause = min(1.5 * pause + 0.0001, 0.005)
        on_progress()

    with ThreadPoolExecutor(NUM_READERS) as readers, ThreadPoolExecutor(1) as writer:
        for number in range(min(WINDOW, len(sizes))):
            begin(number)
        for number in range(len(sizes)):
            wait_for_first(arriving)
            piece = pieces.popleft()
            # A receive that is posted early keeps the link busy in the waits below.
            if number + WINDOW < len(sizes):
                begin(number + WINDOW)
            writing.append(writer.submit(write, number, piece).done)
            if chain.rank + 1 < chain.size:
                if len(leaving) == MAX_SENDS:
                    wait_for_first(leaving)
                leaving.append(chain.Isend(piece, chain.rank + 1).Test)
            if len(writing) > WINDOW:
                wait_for_first(writing)
        for rest in (leaving, writing):
            while rest:
                wait_for_first(rest)

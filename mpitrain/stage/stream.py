"""The files to stage, as a stream of pieces from rank zero through a chain of nodes.

Each node forwards a piece as soon as it has it, so that the time does not grow with the
number of nodes, and no link carries the stream twice in one direction. The pack is a
file of the stream and a trailer: the next job reads one file in place of many.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import socket
import stat
import struct
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from mpitrain.errors import DataError
from mpitrain.stage.environment import Relocation, Root, pairs_of
from mpitrain.watchdog.process import is_gone

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = f"mpitrain-stage-{os.getuid()}"  # of all copies, in the folder of `--to`
PACK_NAME = ".mpitrain-stage.pack"  # in the environment, unless --pack names another
MAKING = ".partial-"  # then host and process: a pack in the making, beside the pack
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 60 << 10, 512 << 10
NUM_PIECES = 512  # about so many: each node of a chain is behind by a few of them
NUM_READERS = 16
WINDOW = 16  # pieces that are received, wait to be sent, or are written at once
MAX_SENDS = 2  # they share the link, so that with more of them all arrive later
TRAILER = struct.Struct("<32sI")  # of a pack: digest of the index, CRC32
DEAD_SECONDS = 3600.0  # a pack in the making that has not changed for so long is dead


class Entry(NamedTuple):
    """A folder, a file or a symbolic link."""

    path: str
    mode: int  # as of lstat(2), with the kind
    size: int = 0  # of a file
    mtime_ns: int = 0  # of a file
    target: str = ""  # of a link


class Index:
    """All that is staged together, and how it is cut into pieces. Equal on all nodes.

    Raises a DataError if a name would lie outside of the copy.
    """

    def __init__(self, roots: Sequence[Root], entries: Iterable[Entry]) -> None:
        self.roots, self.entries = roots, sorted(entries)
        place = Relocation(pairs_of(roots, "copy"))
        for path, *_ in self.entries:
            if place(path) == path or {"", ".", ".."} & {*path.split("/")[1:]}:
                raise DataError(f"{path!r} is outside of the copy")
        text = repr((roots, self.entries))
        self.digest = hashlib.sha256(text.encode()).digest()
        self.files = [it for it in self.entries if stat.S_ISREG(it.mode)]
        self.size = sum(it.size for it in self.files)
        size = max(MIN_PIECE_BYTES, min(self.size // NUM_PIECES, MAX_PIECE_BYTES))
        parts = [
            (it, offset, min(size, it.size - offset))
            for it in self.files
            for offset in range(0, it.size or 1, size)
        ]
        ends = itertools.accumulate(it[2] for it in parts)
        groups = itertools.groupby(parts, lambda _: next(ends) // size)  # < 2 * size
        self.pieces = [list(group) for _, group in groups]
        self.sizes = [sum(it[2] for it in piece) for piece in self.pieces]


def walk(
    roots: Sequence[Root], pack: Path | None, on_progress: Callable[[], object]
) -> list[Entry]:
    """Find all that is below some roots; opens no file.

    Left out: packs and copies, other roots, files that this user may not read, sockets,
    pipes and devices, and the folders ``pkgs`` and ``envs`` of a conda installation.
    """
    left_out = {root for _, root in roots}
    for root in [*left_out]:
        if Path(root, "conda-meta").is_dir():
            left_out |= {f"{root}/pkgs", f"{root}/envs"}
    own_pack = os.path.realpath(pack or "/none")

    def scan(folder: str) -> list[Entry | None]:
        with suppress(PermissionError):
            return [
                _entry(path)
                for name in os.listdir(folder)  # noqa: PTH208
                if name != FOLDER and not name.startswith(PACK_NAME)
                if (path := f"{folder}/{name}") not in left_out and path != own_pack
                if not path.startswith(f"{own_pack}{MAKING}")
            ]
        return []

    entries: list[Entry] = []
    found = [_entry(root) for _, root in roots]
    with ThreadPoolExecutor(NUM_READERS) as pool:  # it waits for a file server
        while level := [entry for entry in found if entry is not None]:
            entries += level
            folders = [it.path for it in level if stat.S_ISDIR(it.mode)]
            found = []
            for inner in pool.map(scan, folders):
                found += inner
                on_progress()
    return entries


def _entry(path: str) -> Entry | None:
    found = os.lstat(path)
    kind, mode = stat.S_IFMT(found.st_mode), stat.S_IMODE(found.st_mode)
    if kind == stat.S_IFDIR:
        return Entry(path, kind | mode)
    if kind == stat.S_IFLNK:
        target = os.readlink(path)  # noqa: PTH115
        if ".." in target.split("/"):  # it may lead out of the root
            target = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
        return Entry(path, kind, target=target)
    if kind != stat.S_IFREG or not (mode & 0o004 or os.access(path, os.R_OK)):
        return None
    return Entry(path, kind | mode & 0o777, found.st_size, found.st_mtime_ns)


class Source:
    """The stream on rank zero: threads `read` pieces, of the pack or of the files.

    `write` takes the pieces in their order, and writes a new pack.
    """

    def __init__(self, index: Index, pack: Path | None) -> None:
        self.error = self.warning = ""  # why there is no stream, and no pack
        self.crc, self.reads_pack = 0, False  # the CRC32 of those of the pieces
        self._crcs = [0] * len(index.sizes)
        self._index, self._pieces, self._pack = index, index.pieces, str(pack)
        self._new: IO[bytes] | None = None  # the pack in the making
        self._old: IO[bytes] | None = None  # the pack that is read
        if pack is None:
            return
        ours = f"{pack.name}{MAKING}{socket.gethostname()}-"
        with suppress(OSError):
            for path in pack.parent.glob(f"{glob.escape(pack.name)}{MAKING}*"):
                writer = path.name.removeprefix(ours)
                is_dead = writer.isdecimal() and is_gone(int(writer))
                if is_dead or time.time() - path.stat().st_mtime > DEAD_SECONDS:
                    path.unlink()
        with suppress(OSError, struct.error), ExitStack() as stack:
            file = stack.enter_context(pack.open("rb"))
            found, _ = os.fstat(file.fileno()), file.seek(index.size)
            # One byte more: `unpack` refuses a pack that does not end here.
            digest, self._pack_crc = TRAILER.unpack(file.read(TRAILER.size + 1))
            if digest == index.digest:
                # Kept open: another job may put its own in place of it.
                self._old, _ = file, stack.pop_all()
                held = f"/proc/self/fd/{file.fileno()}"
                old = Entry(held, 0, found.st_size, found.st_mtime_ns)
                both = zip(itertools.accumulate(index.sizes), index.sizes, strict=True)
                self._pieces = [[(old, end - size, size)] for end, size in both]
                self.reads_pack = True
                return
        with self._pack_errors():
            self._new = pack.with_name(f"{ours}{os.getpid()}").open("xb")

    def read(self, number: int, piece: bytearray) -> None:
        """Fill a piece; after an error its content does not count."""
        rest = memoryview(piece)
        try:
            for entry, offset, size in () if self.error else self._pieces[number]:
                part, rest = rest[:size], rest[size:]
                with open(entry.path, "rb") as file:  # noqa: PTH123
                    found, _ = os.fstat(file.fileno()), file.seek(offset)
                    state = (found.st_size, found.st_mtime_ns, file.readinto(part))
                if state != (entry.size, entry.mtime_ns, size):
                    raise OSError(0, "it has just been changed", entry.path)  # noqa: TRY301
            self._crcs[number] = zlib.crc32(piece)
        except Exception as error:  # of any kind: it has not been read
            path = self._pack if self.reads_pack else entry.path
            self.error = f"{path}: {getattr(error, 'strerror', '') or error}"

    def write(self, number: int, piece: bytearray) -> None:
        """Write the next piece of the new pack."""
        with self._pack_errors():
            if self._new is not None:
                self._new.write(piece)

    def close(self) -> None:
        """Finish the new pack, unless there was an error; remove a damaged one."""
        self.crc = zlib.crc32(array("I", self._crcs))
        with self._pack_errors():
            if self._old is not None and not self.error and self.crc != self._pack_crc:
                self.error = f"{self._pack} was damaged and is removed"
                found = os.stat(self._pack)  # noqa: PTH116 - another job's?
                if os.path.samestat(os.fstat(self._old.fileno()), found):
                    os.unlink(self._pack)  # noqa: PTH108
            if self._new is not None and not self.error:
                self._new.write(TRAILER.pack(self._index.digest, self.crc))
                self._new.flush()
                os.fsync(self._new.fileno())  # NFS tells of a quota only here
                os.replace(self._new.name, self._pack)
        self._drop()
        if self._old is not None:
            self._old.close()

    def _drop(self) -> None:
        if self._new is not None:
            with suppress(OSError), self._new:
                os.unlink(self._new.name)  # noqa: PTH108
            self._new = None

    @contextmanager
    def _pack_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._drop()
            self.warning = (
                f"{self._pack} was not written ({error.strerror}); the next job reads "
                "the files again. --pack PATH names another place, --pack none writes "
                "none"
            )


def send_through(
    comm: MPI.Intracomm,
    chain: Sequence[int],
    sizes: Sequence[int],
    read: Callable[[int, bytearray], None] | None,
    sinks: Sequence[tuple[Callable[[int, bytearray], None], int]],
    on_progress: Callable[[], object],
) -> None:
    """Send, forward and write pieces of some sizes, by the ranks of a chain of `comm`.

    Every rank of `chain` calls it. The first gives `read`, which threads call. Each of
    `sinks` is called with all pieces, by so many threads. Waits asleep, and calls
    `on_progress` whenever a piece has moved.
    """
    place = chain.index(comm.rank)
    before, after = chain[place - 1], chain[place + 1 :][:1]
    arriving: deque[tuple[Callable[[], bool], bytearray]] = deque()
    ready: deque[bytearray] = deque()  # to be sent
    leaving: list[tuple[MPI.Request, bytearray]] = []
    writing: list[Future[None]] = []
    num_started, num_arrived, pause = 0, 0, 0.0

    def state() -> tuple[int, ...]:
        return num_started, num_arrived, len(ready), len(leaving), len(writing)

    with ExitStack() as stack:
        nums = (NUM_READERS, *(num for _, num in sinks))
        readers, *writers = [stack.enter_context(ThreadPoolExecutor(it)) for it in nums]
        while num_arrived < len(sizes) or ready or leaving or writing:
            old = state()
            while num_started < len(sizes) and max(len(arriving), *old[2:]) < WINDOW:
                piece = bytearray(sizes[num_started])
                if read is not None:
                    is_done = readers.submit(read, num_started, piece).done
                else:
                    is_done = comm.Irecv(piece, before).Test
                arriving.append((is_done, piece))
                num_started += 1
            while arriving and arriving[0][0]():
                piece = arriving.popleft()[1]
                ready += [piece] * len(after)
                for writer, (sink, _) in zip(writers, sinks, strict=True):
                    writing.append(writer.submit(sink, num_arrived, piece))
                num_arrived += 1
            leaving = [it for it in leaving if not it[0].Test()]
            # `result` raises the error of a sink; else it is None, and drops the item.
            writing = [it for it in writing if not it.done() or it.result()]
            while ready and len(leaving) < MAX_SENDS:
                piece = ready.popleft()
                leaving.append((comm.Isend(piece, *after), piece))
            if state() != old:
                on_progress()
                pause = 0.0
            time.sleep(pause)
            pause = min(1.5 * pause + 0.0001, 0.005)

"""The copies of one node: found again, written as a whole or not at all, removed.

A copy is the folder ``<to>/mpitrain-stage-<uid>/<hash>``. Every process that uses it
holds a shared lock of the file ``.lock`` in it, and so does who writes it, exclusively,
under the name ``<hash>.partial-...``. A partial copy without a lock is dead. Copies are
found, renamed and removed under the lock of the folder above.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mpitrain.launch.private_folder import make_private_folder
from mpitrain.mpi.topology import boot_id
from mpitrain.stage.environment import Relocation, pairs_of
from mpitrain.stage.stream import FOLDER, Entry, Index

_held: list[IO[str]] = []  # shared locks of copies, kept until this process ends


def hold(path: str) -> None:
    """Keep others from removing a copy while this process lives."""
    _held.append(_lock(path, fcntl.LOCK_SH))


def _lock(path: str, how: int, seconds: float = 0.0) -> IO[str]:
    # Made again where a cleaner of /tmp, or an interrupted removal, has taken it.
    file, end = Path(path, ".lock").open("a"), time.monotonic() + seconds  # noqa: SIM115
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                raise OSError(0, f"{file.name} is held by another job") from None
        time.sleep(0.05)


class NodeCopy:
    """The copy of an index on this node, for the leader of the node.

    An error is kept in `error`; the first one counts. `path` is empty if there is none.
    """

    def __init__(self, index: Index, to: str, error: str) -> None:
        self.index, self.error, self.had_it = index, error, not index.roots
        self.path, self.notes = "", list[str]()
        self.pairs: list[tuple[str, str]] = []  # old and new paths of the roots
        self._folder, self._made, self._crc = f"{to}/{FOLDER}", "", 0
        # After a crash a file may have its size, but no content: the boot counts.
        state = index.digest + os.fsencode(self._folder + boot_id())
        self._kind = hashlib.sha256(repr(index.roots[:1]).encode()).hexdigest()[:8]
        name = f"{self._kind}-{hashlib.sha256(state).hexdigest()[:16]}"
        self._path = f"{self._folder}/{name}"
        self._move = Relocation(pairs_of(index.roots, self._path))

    def prepare(self) -> bool:
        """Hold a complete copy that is there, or begin one; return whether one began.

        Dead partial copies, and copies of another state of the same roots that nobody
        uses, are removed.
        """
        if self.error or not self.index.roots:
            return False
        with self._errors():
            make_private_folder(Path(self._folder))
            with _lock(self._folder, fcntl.LOCK_EX, 30):
                self.had_it = self._is_complete()
                if self.had_it:
                    self._use()  # first, so that it is not removed
                for path in Path(self._folder).iterdir():
                    if path.name.startswith(self._kind) or ".partial-" in path.name:
                        with suppress(OSError), _lock(str(path), fcntl.LOCK_EX):
                            shutil.rmtree(path)
                if not self.had_it:
                    self._made = tempfile.mkdtemp("", f"{self._path}.partial-")
                    self._partial_lock = _lock(self._made, fcntl.LOCK_EX)
            if self._made:
                self._begin()
        return bool(self._made)

    def _begin(self) -> None:
        found = os.statvfs(self._made)
        if found.f_bavail * found.f_frsize < self.index.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._place = Relocation(pairs_of(self.index.roots, self._made))
        for number, _ in enumerate(self.index.roots):
            Path(self._made, str(number)).mkdir()
        for entry in self.index.entries:
            if stat.S_ISDIR(entry.mode):
                os.mkdir(self._place(entry.path), entry.mode | 0o700)  # noqa: PTH102

    def write(self, number: int, piece: bytearray) -> None:
        """Write the next piece."""
        if self.error:
            return
        self._crc, rest = zlib.crc32(piece, self._crc), memoryview(piece)
        with self._errors():
            for entry, offset, size in self.index.pieces[number]:
                part, rest = rest[:size], rest[size:]
                path = self._place(entry.path)
                with open(path, "ab") as file:  # noqa: PTH123
                    is_whole, name = size == entry.size, path[len(self._made) + 1 :]
                    file.write(self._move.file(name, part) if is_whole else part)
                    file.flush()
                    if offset + size == entry.size:  # .pyc files stay valid
                        os.fchmod(file.fileno(), stat.S_IMODE(entry.mode))
                        os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))

    def finish(self, error: str, crc: int) -> None:
        """Name the copy that has begun; `error` and `crc` are of rank zero's stream."""
        if self._made:
            self.error = error or self.error
            with self._errors():
                if not self.error:
                    self._complete(crc)
            shutil.rmtree(self._made, ignore_errors=True)
            self._partial_lock.close()

    def _complete(self, crc: int) -> None:
        if crc != self._crc:
            raise OSError(0, "received wrong bytes (CRC32)")
        for entry in self.index.entries:
            if stat.S_ISLNK(entry.mode):
                os.symlink(self._move(entry.target), self._place(entry.path))  # noqa: PTH211
        with _lock(self._folder, fcntl.LOCK_EX, 30):
            self._partial_lock.close()
            if not self._is_complete():  # else another job was first
                os.rename(self._made, self._path)  # noqa: PTH104
            self._use()

    def _use(self) -> None:
        hold(self._path)
        self.path, self.pairs = self._path, pairs_of(self.index.roots, self._path)

    def _is_complete(self) -> bool:
        with suppress(OSError):
            return all(map(self._is_there, self.index.entries))
        return False

    def _is_there(self, entry: Entry) -> bool:
        found = os.lstat(self._move(entry.path))
        # A file that was rewritten has another size, but still its time.
        is_same = found.st_size == entry.size or found.st_mtime_ns == entry.mtime_ns
        is_kind = stat.S_IFMT(found.st_mode) == stat.S_IFMT(entry.mode)
        return is_kind and (is_same or not stat.S_ISREG(entry.mode))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{self._folder}: " if error.errno else ""
            self.error = self.error or f"{where}{error.strerror}"

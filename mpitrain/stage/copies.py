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
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mpitrain.files import make_private_folder
from mpitrain.mpi.topology import boot_id
from mpitrain.stage.environment import (
    MAX_TEXT_BYTES,
    NAMES_ITSELF,
    Relocation,
    pairs_of,
)
from mpitrain.stage.stream import FOLDER, Index


def hold(path: str) -> None:
    """Keep others from removing a copy while this process lives."""
    with _lock(path, fcntl.LOCK_SH) as file:
        os.dup(file.fileno())  # never closed: it has the lock, too


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

    `error` is the first error; `pairs` are old and new paths of the roots, if there is
    a copy.
    """

    def __init__(self, index: Index, to: str, error: str, *, rewrites: bool) -> None:
        self.index, self.error, self.had_it = index, error, not index.roots
        self.pairs: list[tuple[str, str]] = []
        self._partial_lock: IO[str] | None = None
        self._folder, self._made = f"{to}/{FOLDER}", ""
        self._crcs = [0] * len(index.sizes)
        # After a crash a file may have its size, but no content: the boot counts.
        state = index.digest + os.fsencode(self._folder + boot_id())
        self._kind = hashlib.sha256(repr(index.roots[:1]).encode()).hexdigest()[:8]
        name = f"{self._kind}-{hashlib.sha256(state).hexdigest()[:16]}"
        self._path = f"{self._folder}/{name}"
        self._move = Relocation(pairs_of(index.roots, self._path))
        # Files whose paths are replaced: in the environment, not in data.
        self._rewritten = {
            it.path
            for it in index.files
            if rewrites and it.size <= MAX_TEXT_BYTES
            if NAMES_ITSELF.fullmatch(self._move(it.path)[len(self._path) + 1 :])
        }

    def prepare(self) -> bool:
        """Hold a complete copy that is there, or begin one; return whether one began.

        Dead partial copies, and copies of another state of the same roots that nobody
        uses, are removed.
        """
        if self.error or not self.index.roots:
            return False
        removed: list[tuple[Path, IO[str]]] = []
        with self._errors():
            make_private_folder(Path(self._folder))
            with _lock(self._folder, fcntl.LOCK_EX, 30):
                self.had_it = self._is_complete()
                if self.had_it:
                    self._use()  # first, so that it is not removed
                for path in Path(self._folder).iterdir():
                    if path.name.startswith(self._kind) or ".partial-" in path.name:
                        with suppress(OSError):
                            lock = _lock(str(path), fcntl.LOCK_EX)
                            name = f"{self._path}.partial-{os.getpid()}-{len(removed)}"
                            removed.append((path.rename(name), lock))
                if not self.had_it:
                    if Path(self._path).exists():
                        lost = "the copy has lost files, and another job uses it"
                        raise OSError(0, lost)
                    self._made = tempfile.mkdtemp("", f"{self._path}.partial-")
                    self._partial_lock = _lock(self._made, fcntl.LOCK_EX)
        # It takes long, and others wait for the lock of the folder.
        for path, lock in removed:
            shutil.rmtree(path, ignore_errors=True)
            lock.close()
        with self._errors():
            if self.error or not self._made:
                return bool(self._made)
            found = os.statvfs(self._made)
            if found.f_bavail * found.f_frsize < self.index.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._place = Relocation(pairs_of(self.index.roots, self._made))
            for number, _ in enumerate(self.index.roots):
                Path(self._made, str(number)).mkdir()
            for entry in self.index.entries:
                if stat.S_ISDIR(entry.mode):
                    os.mkdir(self._place(entry.path), entry.mode | 0o700)  # noqa: PTH102
        # Also after an error below: then this node forwards, and `finish` removes its
        # part.
        return bool(self._made)

    def write(self, number: int, piece: bytearray) -> None:
        """Write a piece; called by threads."""
        self._crcs[number], rest = zlib.crc32(piece), memoryview(piece)
        with self._errors():
            for entry, offset, size in () if self.error else self.index.pieces[number]:
                part = rest[:size]
                rest, path = rest[size:], self._place(entry.path)
                file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    while part:
                        written = os.pwrite(file, part, offset)
                        part, offset = part[written:], offset + written
                finally:
                    os.close(file)

    def finish(self, error: str, crc: int) -> None:
        """Name the copy that has begun; `error` and `crc` are of rank zero's stream."""
        if not self._made:
            return
        is_right = crc == zlib.crc32(array("I", self._crcs))
        wrong = "" if is_right else "received wrong bytes (CRC32)"
        self.error = error or self.error or wrong
        with self._errors():
            if not self.error:
                for entry in self.index.entries:
                    path = self._place(entry.path)
                    if stat.S_ISLNK(entry.mode):
                        os.symlink(self._move(entry.target), path)  # noqa: PTH211
                    elif stat.S_ISREG(entry.mode):
                        if entry.path in self._rewritten:
                            file = Path(path)
                            file.write_bytes(self._move.file(path, file.read_bytes()))
                        os.chmod(path, stat.S_IMODE(entry.mode))  # noqa: PTH101
                        # .pyc files stay valid.
                        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
                with _lock(self._folder, fcntl.LOCK_EX, 30):
                    self._unlock()
                    if not self._is_complete():  # else another job was first
                        os.rename(self._made, self._path)  # noqa: PTH104
                    self._use()
        shutil.rmtree(self._made, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._partial_lock is not None:
            self._partial_lock.close()

    def _use(self) -> None:
        hold(self._path)
        self.pairs = pairs_of(self.index.roots, self._path)

    def _is_complete(self) -> bool:
        with suppress(OSError):
            for entry in self.index.entries:
                found = os.lstat(self._move(entry.path))
                if stat.S_IFMT(found.st_mode) != stat.S_IFMT(entry.mode):
                    return False
                # One whose paths were replaced may have another size.
                is_same = not stat.S_ISREG(entry.mode) or found.st_size == entry.size
                if not is_same and entry.path not in self._rewritten:
                    return False
            return True
        return False

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{self._folder}: " if error.errno else ""
            self.error = self.error or f"{where}{error.strerror}"

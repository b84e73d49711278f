"""The copies of one node: found again, written as a whole or not at all, removed.

A copy is the folder ``<to>/mpitrain-stage-<uid>/<hash>``. Every process that writes or
uses it holds a shared lock of the file ``.lock`` in it. It is written under the name
``<hash>.partial-...``; a partial copy without a lock is dead. Copies are found, renamed
and removed under the lock of the folder above. Where nodes share that folder, the first
one has ``<hash>``, and each other ``<hash>-<its boot>``.
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

from mpitrain.files import make_private_folder
from mpitrain.mpi.topology import boot_id
from mpitrain.stage.environment import Relocation, names_itself
from mpitrain.stage.stream import FOLDER, Entry, Index


def hold(path: str) -> None:
    """Keep others from removing a copy while this process lives."""
    with _lock(path, fcntl.LOCK_SH) as file:
        # A lock of flock(2) lasts until the last copy of its descriptor is closed.
        os.dup(file.fileno())


def _lock(path: str, how: int, seconds: float = 0.0) -> IO[str]:
    # Made again where a cleaner of /tmp, or an interrupted removal, has taken it.
    file, end = Path(path, ".lock").open("a"), time.monotonic() + seconds  # noqa: SIM115
    while True:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)  # a wait in the kernel has no end
            return file
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                raise OSError(0, f"{file.name} is held by another job") from None
        time.sleep(0.05)


class NodeCopy:
    """The copy of an index on this node, for the leader of the node.

    `error` is the first error. `paths` has the copies of the roots, if there is a copy.
    """

    def __init__(self, index: Index, to: str, error: str, *, rewrites: bool) -> None:
        self.index, self.error, self.had_it = index, error, not index.roots
        self.paths: dict[str, str] = {}
        self.crc = 0  # CRC32 of what `write` was given
        self._above, self._rewrites = f"{to}/{FOLDER}", rewrites
        self._made = ""  # the partial copy
        # The same on all nodes: rank zero reads the words of the command for all.
        self._kind = _hash([*index.roots][:1])[:8]
        name = f"{self._kind}-{_hash((index.roots, index.entries, self._above))[:16]}"
        self._plain = f"{self._above}/{name}"
        self._take_name(self._plain)

    def _take_name(self, folder: str) -> None:
        self.folder = folder
        self._paths = {it: folder + real for it, real in self.index.roots.items()}
        self._move = Relocation(self._paths)

    def prepare(self) -> bool:
        """Hold a complete copy that is there, or begin one; return whether one began.

        Dead partial copies, and copies of another state of the same roots that nobody
        uses, are removed.
        """
        if self.error or not self.index.roots:
            return False
        with self._errors():
            make_private_folder(Path(self._above))
            with _lock(self._above, fcntl.LOCK_EX, 60):
                of_boot = f"{self._plain}-{_hash(boot_id())[:8]}"
                for folder in (self._plain, of_boot):
                    if not self.had_it:
                        self._take_name(folder)
                        self.had_it = self._is_complete()
                if self.had_it:
                    self._use()  # first, so that it is not removed
                for path in Path(self._above).iterdir():
                    if path.name.startswith(self._kind) or ".partial-" in path.name:
                        with suppress(OSError), _lock(str(path), fcntl.LOCK_EX):
                            shutil.rmtree(path)
                if not self.had_it:
                    self._take_name(of_boot if self._is_of_others() else self._plain)
                    self._begin()
        # Also after an error: then this node forwards, and `finish` removes its part.
        return bool(self._made)

    def _is_of_others(self) -> bool:
        """Whether another node has the copy of the plain name, or writes it.

        Called after the removals: what is left is held by a process that lives, and a
        boot that is not this one's is another node's.
        """
        pattern = f"{Path(self._plain).name}*"
        for path in Path(self._above).glob(pattern):
            is_plain = path.name.partition(".")[0] == Path(self._plain).name
            with suppress(OSError):
                if is_plain and Path(path, ".boot").read_text() != boot_id():
                    return True
        return False

    def _begin(self) -> None:
        if Path(self.folder).exists():  # it could not be removed
            reason = "the copy has lost files, and another job uses it"
            raise OSError(0, f"{reason}; wait for its end, or give --to another folder")
        self._made = tempfile.mkdtemp("", f"{self.folder}.partial-")
        hold(self._made)  # also under its later name
        Path(self._made, ".boot").write_text(boot_id())
        found = os.statvfs(self._made)
        free = found.f_bavail * found.f_frsize
        if found.f_blocks and free < self.index.size:  # ramfs tells no size
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for entry in self.index.entries:  # a folder comes before what is in it
            path = Path(self._made + entry.path)
            if entry.path in self.index.roots:
                path.parent.mkdir(parents=True, exist_ok=True)
            if stat.S_ISDIR(entry.mode):
                mode = stat.S_IMODE(entry.mode) | 0o700  # to write and remove files
                path.mkdir(mode, exist_ok=True)

    def write(self, number: int, piece: bytearray) -> None:
        """Write the next piece."""
        self.crc, rest = zlib.crc32(piece, self.crc), memoryview(piece)
        if not self._made or self.error:
            return  # rank zero has a copy, or this node forwards alone
        with self._errors():
            for entry, _, size in self.index.pieces[number]:
                with open(self._made + entry.path, "ab") as file:  # noqa: PTH123
                    file.write(rest[:size])
                rest = rest[size:]

    def finish(self, error: str, crc: int) -> None:
        """Name the copy that has begun; `error` and `crc` are of rank zero's stream."""
        if not self._made:
            return
        wrong = "" if crc == self.crc else "received wrong bytes (CRC32)"
        self.error = error or self.error or wrong
        with self._errors():
            if not self.error:
                for entry in self.index.entries:
                    self._finish_entry(entry, self._made + entry.path)
                with _lock(self._above, fcntl.LOCK_EX, 60):
                    if not self._is_complete():  # else another job was first
                        os.rename(self._made, self.folder)  # noqa: PTH104
                    self._use()
        shutil.rmtree(self._made, ignore_errors=True)

    def _finish_entry(self, entry: Entry, path: str) -> None:
        if stat.S_ISLNK(entry.mode):
            os.symlink(self._move(entry.target), path)  # noqa: PTH211
        elif stat.S_ISREG(entry.mode):
            if self._is_rewritten(entry):  # before its mode, which may be read-only
                Path(path).write_bytes(self._move.file(path, Path(path).read_bytes()))
            os.chmod(path, stat.S_IMODE(entry.mode))  # noqa: PTH101
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))  # .pyc files stay valid

    def _is_rewritten(self, entry: Entry) -> bool:
        """Whether the size of a file may be another in the copy."""
        return self._rewrites and names_itself(entry.path, entry.size)

    def _use(self) -> None:
        hold(self.folder)
        self.paths = self._paths

    def _is_complete(self) -> bool:
        with suppress(OSError):
            # After a crash a file may have its size, but no content.
            if Path(self.folder, ".boot").read_text() != boot_id():
                return False
            for entry in self.index.entries:
                found = os.lstat(self.folder + entry.path)
                if stat.S_IFMT(found.st_mode) != stat.S_IFMT(entry.mode):
                    return False
                is_same = not stat.S_ISREG(entry.mode) or found.st_size == entry.size
                if not is_same and not self._is_rewritten(entry):
                    return False
            return True
        return False

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any kind: staging ends no job
            where = f"{self._above}: " if getattr(error, "errno", None) else ""
            reason = getattr(error, "strerror", None) or error
            self.error = self.error or f"{where}{reason}"


def _hash(state: object) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()

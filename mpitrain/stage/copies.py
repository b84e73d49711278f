"""The copies of one node: found again, written as a whole or not at all, removed.

A copy is the folder ``<to>/mpitrain-stage-<uid>/<hash>``. Every process that uses it
holds a shared lock of the file ``.lock`` in it, and so does who writes it, exclusively,
under the name ``<hash>.partial-<host>-<pid>``. A partial copy without a lock is dead.
Changes of names happen under the lock of the folder above.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpitrain.files import make_private_folder
from mpitrain.mpi.topology import boot_id
from mpitrain.stage.environment import (
    MAX_TEXT_BYTES,
    NAMES_ITSELF,
    Relocation,
    rewritten,
)
from mpitrain.stage.pack import FOLDER, HEAD, Entry, Index, write_all

_ABOUT = ".copy.json"  # written last: its roots, the machine's start, other sizes
_FOLDER_LOCK_SECONDS = 30.0

_held: list[int] = []  # descriptors with a shared lock of a copy, never closed


def hold(path: str) -> None:
    """Keep others from removing a copy while this process lives."""
    descriptor = _lock(path, fcntl.LOCK_SH)
    if descriptor is None:
        raise OSError(errno.ENOENT, "the copy was removed", path)
    _held.append(descriptor)


class NodeCopy:
    """The copy of an index on this node, for the leader of the node.

    `write` is called by threads. An error is kept in `error`; the first one counts.
    """

    def __init__(self, index: Index, to: str) -> None:
        self.index = index
        self.error = ""
        self._folder = f"{to}/{FOLDER}"
        name = hashlib.sha256(index.digest + os.fsencode(self._folder)).hexdigest()[:16]
        self.path = f"{self._folder}/{name}"
        self._made = f"{self.path}.partial-{socket.gethostname()}-{os.getpid()}"
        self._lock: int | None = None  # of the partial copy
        self._left = [it.size for it in index.files]  # bytes that are not written yet
        self._left_lock = threading.Lock()
        self._roots = [root.path for root in index.roots]

    def prepare(self) -> bool:
        """Return whether a complete copy is there; else begin one.

        Dead partial copies, and copies of another state of the same roots that nobody
        uses, are removed.
        """
        try:
            make_private_folder(Path(self._folder))
            with _folder_lock(self._folder):
                removed = self._take_away_others()
                is_complete = self._take_existing(removed)
                if not is_complete:
                    os.mkdir(self._made, 0o700)  # noqa: PTH102
                    lock = f"{self._made}/.lock"
                    self._lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path, descriptor in removed:
                _remove(path, descriptor)
            if not is_complete:
                self._begin()
        except OSError as error:
            self._fail(error)
            return False
        return is_complete

    def _begin(self) -> None:
        found = os.statvfs(self._made)
        if found.f_bavail * found.f_frsize < self.index.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for entry in self.index.entries:
            path = f"{self._made}/{entry.path}"
            if stat.S_ISDIR(entry.mode):
                os.mkdir(path, stat.S_IMODE(entry.mode) | 0o700)  # noqa: PTH102
            elif stat.S_ISREG(entry.mode) and not entry.size:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                _finish_file(descriptor, entry)
                os.close(descriptor)

    def write(self, number: int, piece: bytearray) -> None:
        """Write a piece, of which `piece` is the content with its head."""
        if self.error:
            return
        content = memoryview(piece)[HEAD.size :]
        try:
            _check(piece)
            for file, offset, at, size in self.index.parts(number):
                self._write_part(file, offset, content[at : at + size])
        except OSError as error:
            self._fail(error)

    def _write_part(self, file: int, offset: int, part: memoryview) -> None:
        entry = self.index.files[file]
        path = f"{self._made}/{entry.path}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            write_all(descriptor, part, offset)
            with self._left_lock:
                self._left[file] -= len(part)
                is_whole = not self._left[file]
            if is_whole:
                _finish_file(descriptor, entry)
        finally:
            os.close(descriptor)

    def finish(self, move: Relocation, *, rewrites: bool) -> None:
        """Make the links, rewrite the files that name their folder, check, and rename.

        `move` leads from the roots to the copies.
        """
        if not self.error:
            try:
                sizes = self._rewrite(move) if rewrites else {}
                for entry in self.index.entries:
                    if stat.S_ISLNK(entry.mode):
                        path = f"{self._made}/{entry.path}"
                        os.symlink(move(entry.target), path)  # noqa: PTH211
                about = {"roots": self._roots, "boot": boot_id(), "sizes": sizes}
                Path(f"{self._made}/{_ABOUT}").write_text(json.dumps(about))
                self._rename()
            except OSError as error:
                self._fail(error)
        if self._lock is not None:  # it has failed, or another job was first
            _remove(self._made, self._lock)
            self._lock = None

    def _rewrite(self, move: Relocation) -> dict[str, int]:
        """Rewrite the files that name their folder; return their sizes by path."""
        sizes: dict[str, int] = {}
        for entry in self.index.files:
            if entry.size <= MAX_TEXT_BYTES and NAMES_ITSELF.fullmatch(entry.path):
                path = Path(self._made, entry.path)
                content = path.read_bytes()
                if (new := rewritten(entry.path, content, move)) != content:
                    path.chmod(0o600)
                    path.write_bytes(new)
                    with path.open("rb") as file:
                        _finish_file(file.fileno(), entry)
                    sizes[entry.path] = len(new)
        return sizes

    def _rename(self) -> None:
        assert self._lock is not None
        if not self._is_complete(self._made):
            raise OSError(0, "the copy is not complete")
        with _folder_lock(self._folder):
            try:
                os.rename(self._made, self.path)  # noqa: PTH104
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                hold(self.path)  # another job was first
                if not self._is_complete(self.path):
                    raise OSError(0, "another job's copy is not complete") from None
                return
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            _held.append(self._lock)
            self._lock = None

    # --- what is there already --------------------------------------------------------

    def _take_existing(self, removed: list[tuple[str, int]]) -> bool:
        """Hold the copy that is there, if it is complete; else let it be removed."""
        descriptor = _lock(self.path, fcntl.LOCK_SH)
        if descriptor is None:
            return False
        if self._is_complete(self.path):
            _held.append(descriptor)
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            text = "the copy has lost files, and another job uses it"
            raise OSError(0, text) from None
        removed.append((_doomed(self.path), descriptor))
        return False

    def _take_away_others(self) -> list[tuple[str, int]]:
        """Take the names of dead and of old copies away; return what is to be removed.

        With each comes the descriptor that holds its lock.
        """
        removed: list[tuple[str, int]] = []
        for name in os.listdir(self._folder):  # noqa: PTH208
            path = f"{self._folder}/{name}"
            is_of_same = _about(path).get("roots", [])[:1] == self._roots[:1]
            is_old = path != self.path and is_of_same
            if not is_old and ".partial-" not in name:
                continue
            descriptor = _lock(path, fcntl.LOCK_EX)
            if descriptor is not None:
                removed.append((_doomed(path), descriptor))
        return removed

    def _is_complete(self, path: str) -> bool:
        """Whether all is there, in its size, and the machine has not started since."""
        about = _about(path)
        if about.get("boot") != boot_id():
            return False  # after a crash a file may have its size, but no content
        for entry in self.index.entries:
            try:
                found = os.lstat(f"{path}/{entry.path}")
            except OSError:
                return False
            size = about["sizes"].get(entry.path, entry.size)
            if stat.S_IFMT(found.st_mode) != stat.S_IFMT(entry.mode) or (
                stat.S_ISREG(entry.mode) and found.st_size != size
            ):
                return False
        return True

    def _fail(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        where = f"{self._folder}: " if error.errno else ""
        self.error = self.error or where + reason


def _check(piece: bytearray) -> None:
    crc, has_content = HEAD.unpack_from(piece)
    if not has_content:
        raise OSError(0, "rank zero could not read all files")
    if zlib.crc32(memoryview(piece)[HEAD.size :]) != crc:
        raise OSError(0, "received wrong bytes (CRC32)")


def _finish_file(descriptor: int, entry: Entry) -> None:
    os.fchmod(descriptor, stat.S_IMODE(entry.mode))
    os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))  # .pyc files stay valid


def _about(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(Path(path, _ABOUT).read_text()))
    return {}


@contextlib.contextmanager
def _folder_lock(folder: str) -> Iterator[None]:
    descriptor = os.open(f"{folder}/.lock", os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + _FOLDER_LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(0, f"{folder}/.lock is held") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _lock(path: str, how: int) -> int | None:
    try:
        # Made again where a cleaner of /tmp, or an interrupted removal, has taken it.
        descriptor = os.open(f"{path}/.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _doomed(path: str) -> str:
    """Give a copy that is to be removed the name of a partial one."""
    owner = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
    new = f"{path.partition('.partial-')[0]}.partial-{owner}"
    os.rename(path, new)  # noqa: PTH104
    return new


def _remove(path: str, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)

"""Opens the run folder that a training writes into; on rank zero. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from mpitrain.errors import UsageError
from mpitrain.files import read_json, sync, write_json
from mpitrain.launch.job import Job
from mpitrain.mpi.collectives import MPI_PROCESS
from mpitrain.record.run_dir import read_result
from mpitrain.record.supervised import opened_run, tell_supervisor

LOCK = ".lock"
RUN = "run.json"
LOCK_SECONDS = 30.0  # how long a job that was killed, or cancelled, may need to end
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Exists = Literal["resume", "refuse", "new name"]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run folder that this job alone writes into."""

    path: Path  # absolute
    run_id: str  # the run's own, in all of its jobs
    is_new: bool  # whether no job has written into it before
    lock: int | None
    """Descriptor of the lock, which this process holds until it ends or closes it;
    ``None`` on a file system without locks."""


def open_run(runs_dir: Path, name: str | None, *, exists: Exists) -> RunFolder:
    """Make a run folder, or open an existing one, for this job alone.

    Without a name, the date is the name. ``exists``: what to do where it exists. In a
    training that `supervise` has started again it is the run of the start before.
    """
    if Job.current is not None and Job.current.is_replay:
        raise UsageError(
            f"a replay writes nothing, and the script opens {runs_dir / (name or '')} "
            "by itself; expected one whose Trainer has default_callbacks or a "
            "Checkpointer: a loop of your own is not replayed"
        )
    base = name or datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    if (before := opened_run(os.environ, before=True)) is not None:
        run_dir = before.run_dir
        is_same = exists == "new name" or (name or run_dir.name) == run_dir.name
        if is_same and run_dir.parent == runs_dir.resolve():
            # `supervise` has started this training again.
            name = base = run_dir.name
            exists = "resume"
    may_rename = name is None or exists == "new name"
    path = runs_dir / base
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            suffix = f"-{attempt}" if attempt > 1 else ""
            path = (runs_dir / (base + suffix)).absolute()
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
            if not may_rename:  # or two runs started within a second
                break
        if not path.is_dir():
            raise UsageError(
                f"{path} is a file; expected a run folder. Choose another --name"
            )
        if exists == "refuse" and not _is_blank(path):
            raise UsageError(
                f"run folder {path} exists. Expected a new one: choose another --name, "
                "or resume the run: without --resume never, in a script with a "
                "Checkpointer of that folder."
            )
        lock = _lock(path)
        # Asked with the lock: the job that held it may have begun a run meanwhile.
        is_new = _is_blank(path)
        run_id = secrets.token_hex(8) if is_new else read_json(path / RUN).get("id", "")
        if is_new:
            (path / "logs").mkdir(exist_ok=True)
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            write_json(path / RUN, {"id": run_id, "begun": now})
            for it in (path / RUN, path):  # without it nobody may resume the run
                sync(it)
            write_json(path / "result.json", {"status": "running"})
        elif not run_id:
            raise UsageError(
                f"{path} exists, and is not a run that can be resumed: it has no "
                f"{RUN}. Choose another --name, or move that folder away."
            )
    except OSError as error:
        raise UsageError(
            f"cannot make the run folder {path}: {error.strerror}. Choose another "
            "--runs-dir."
        ) from None
    if not MPI_PROCESS.sub_worlds:  # a trial of a sweep: the sweep is what counts
        tell_supervisor(path)
    if Job.current is not None:
        Job.current.run_dirs.add(path.resolve())
        Job.current.locks += [] if lock is None else [lock]
    return RunFolder(path=path, run_id=run_id, is_new=is_new, lock=lock)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Iterable[str]
) -> list[str]:
    """Describe what differs between two configurations, except the ``free`` fields.

    >>> differences({"lr": 0.1, "name": "a"}, {"lr": 0.2, "name": "b"}, ["name"])
    ['lr: 0.1 -> 0.2']
    """
    may_differ = set(free)
    return [
        f"{field}: {value} -> {now[field]}"
        for field, value in before.items()
        if field in now and field not in may_differ and value != now[field]
    ]


def _is_blank(path: Path) -> bool:
    """Whether no job has written more into a folder than its lock and empty logs."""
    return path.is_dir() and all(
        entry.name in (LOCK, "times")  # of a rank whose callbacks began sooner
        or entry.name.startswith(f".{RUN}.")  # not yet renamed
        or (entry.name == "logs" and not any(entry.iterdir()))
        for entry in path.iterdir()
    )


def _lock(path: Path) -> int | None:
    """Take a run's lock; ``None`` where the file system has no locks."""
    # POSIX's kind: the kernel, or the file server, lets it go when its holder has
    # ended, and children do not have it. It also lets it go when the holder closes any
    # descriptor of this file: in the holder's process nobody else may open it.
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    started = time.monotonic()
    has_warned = False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in NO_LOCKS:
                os.close(descriptor)
                return None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        waited = time.monotonic() - started
        # A job that was just ended needs a moment, which is not worth a line.
        if waited > 2.0 and not has_warned:
            has_warned = True
            print(
                f"run {path.name} is in use by {holder}: waiting up to "
                f"{LOCK_SECONDS:.0f} s for its end",
                file=sys.stderr,
                flush=True,
            )
        if waited > LOCK_SECONDS:
            raise UsageError(
                f"run {path.name} is in use: {holder} writes into {path}.\nExpected "
                "one job for a run: wait until it has ended, or choose another "
                "--name, or --new-run"
            )
        time.sleep(0.2)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    who = f"process {os.getpid()} on {socket.gethostname()}, since {now}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, who.encode(), 0)
    return descriptor


def is_held(path: Path) -> bool | None:
    """Return whether a job holds a run's lock; ``None`` if that cannot be known.

    Not for that job's own process, which would let the lock go, see `_lock`.
    """
    try:
        with (path / LOCK).open("rb") as file:
            # Asked for, not tried: a lock taken for a moment would hold up a job that
            # begins. `struct flock`: type, whence, start, length, process.
            asked = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, asked)
    except OSError:
        return None
    kind: int = struct.unpack("hhqqi", found)[0]
    return kind != fcntl.F_UNLCK


def lock_host(path: Path) -> str:
    """Return the host whose process took a run's lock last; empty if nobody knows."""
    try:
        words = (path / LOCK).read_text().split()
    except (OSError, UnicodeDecodeError):
        return ""
    return words[3].rstrip(",") if len(words) > 3 else ""  # "process N on HOST, since"


def is_finished(path: Path) -> dict[str, Any] | None:
    """Return the result of a run that is finished; ``None`` if it is not."""
    result = read_result(path)
    return result if result.get("status") == "finished" else None

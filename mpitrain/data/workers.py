"""The processes beside a rank that read ahead for it: torch's DataLoader's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, process, resource_tracker, util
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from mpitrain.data.samples import Loaded
from mpitrain.errors import DataError

Method = Literal["fork", "forkserver"]

DEAD_WORKER = "DataLoader worker (pid"
"""How DataLoader begins to say that one of its processes was killed."""

NEWS_SECONDS = 1.0
"""How much later than its socket's end the death of a process is known."""

MAX_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""How long a folder's name may be for the sockets that processes make in it; unix(7)
allows 107 bytes for the whole."""


def start_method(num_nodes: int) -> Method:
    """Return how worker processes are started.

    A fork is cheap and shares what the rank has read. But MPI has started: where it
    talks through a fabric, pages that the adapter writes to are registered, and a fork
    may move them (Open MPI's FAQ on fork support; pytorch 13787, horovod 1824). So
    between nodes workers come from a server process that never knew MPI; within a node
    MPI has memory alone. A spawned worker would import all of torch each time.

    >>> start_method(1), start_method(2)
    ('fork', 'forkserver')
    """
    return "fork" if num_nodes == 1 else "forkserver"


def context_of(method: Method) -> BaseContext:
    """Return what starts worker processes.

    The fork server imports torch and our readers once, and its children have them;
    else each would spend seconds on it, in every epoch of a stream.
    """
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["mpitrain.data.sources"])
    return context


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader whose workers end with their rank.

    It draws no random number of this process: a model's would be others, then.

    Args:
        dataset: What it reads.
        options: Those of DataLoader.
    """
    if options.get("num_workers"):
        settle_temporary_folder()
        start_helpers(options.get("multiprocessing_context"))
    with _as_many_as_asked():
        return DataLoader(
            dataset,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),
            **options,
        )


def settle_temporary_folder() -> None:
    """Choose the folder of the sockets by which workers hand over what they read.

    It is this process's, and removed at its end. Python takes `TMPDIR`: where that is
    too long a worker cannot hand over anything, and the rank waits for ever (Python
    3.11; torch's worker says so on the screen, but lives on).
    """
    current: Any = process.current_process()
    settings: dict[str, Any] = current._config  # noqa: SLF001 - the one way to say it
    if settings.get("tempdir") is not None:
        return
    if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
        settings["tempdir"] = folder
    util.get_temp_dir()


def start_helpers(context: BaseContext | None) -> None:
    """Start the processes that Python needs for workers; USR1, USR2, TERM are blocked.

    mpirun and schedulers send those to all processes of a rank. They are meant for the
    rank, which tells where it is, or stops in time, and needs its workers for that.

    Args:
        context: What starts workers; ``None``: a fork.
    """
    signals = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # that has unblocked TERM
        if context is not None and context.get_start_method() == "forkserver":
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _as_many_as_asked() -> Iterator[None]:
    """Keep torch from telling every rank that there are more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def living(loader: DataLoader[Any]) -> Iterator[Loaded]:
    """Yield what a loader reads, and say in words if one of its workers is dead.

    Raises:
        DataError: A worker was killed.
    """
    try:
        with _as_many_as_asked():
            batches = iter(loader)
        yield from batches
    except (RuntimeError, OSError, EOFError) as error:
        said = _death_told_by(error) if loader.num_workers else None
        if said is None:
            raise
        raise DataError(
            f"a process that read samples for this rank is dead: {said}\n"
            "Its machine may have run out of memory: take fewer --num-workers, or ask "
            "for more memory"
        ) from None


def _death_told_by(error: Exception) -> str | None:
    """Return what an error says of the death of a worker, if it does.

    Args:
        error: What came out of DataLoader. An exception of the data set itself, in a
            worker, begins with "Caught".
    """
    if not isinstance(error, RuntimeError):
        if str(error).startswith("Caught "):
            return None
        # The end of a worker's socket is often seen before its death. Of that torch
        # tells by an exception out of its handler of SIGCHLD, wherever Python is then:
        # best here. Of children of the fork server it does not hear.
        try:
            time.sleep(NEWS_SECONDS)
        except RuntimeError as news:
            error = news
        else:
            return repr(error)
    if not str(error).startswith(DEAD_WORKER):
        return None
    cause = error.__cause__  # may know the signal
    return str(cause if isinstance(cause, RuntimeError) else error).strip()


def _end_with_rank(worker: int) -> None:
    """Let this worker end as soon as its rank has ended, whatever it does then.

    Torch's workers look, now and then, whether their parent is there. But for those of
    the fork server that is the server, and it stays until the last of them has ended:
    of a rank that was killed all of them would be left, for ever.

    Args:
        worker: Its number.
    """
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as `start_helpers`
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

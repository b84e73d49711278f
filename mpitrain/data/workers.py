"""Worker processes of torch's DataLoader, made safe under MPI."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from mpitrain.data.randomness import own_random_state
from mpitrain.data.samples import LoadedBatch
from mpitrain.errors import DataError

StartMethod = Literal["fork", "forkserver"]

DEAD_WORKER = "DataLoader worker (pid"  # torch's message about a killed worker
DEATH_SECONDS = 1.0  # from the end of a worker's socket until its death is known

MAX_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum length of a folder's name for the workers' sockets; unix(7) allows 107 bytes
for the whole path."""


def start_method(num_nodes: int) -> StartMethod:
    """Return how worker processes are started.

    A fork is cheap, but on a fabric the pages that the network adapter writes to are
    registered, and a fork may move them (Open MPI's FAQ on fork support; pytorch 13787,
    horovod 1824). So on several nodes workers come from a server process that never
    initialized MPI. A spawned worker would import torch each time.
    """
    return "fork" if num_nodes == 1 else "forkserver"


def worker_context(method: StartMethod) -> BaseContext:
    """Return the context of workers; a fork server imports torch once for all."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["mpitrain.data.map_style"])
    return context


def build_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader whose workers end with their rank."""
    if options.get("num_workers"):
        if len(os.fsencode(tempfile.gettempdir())) > MAX_FOLDER_BYTES:
            tempfile.tempdir = "/tmp"  # else workers could hand over nothing, and hang
        util.get_temp_dir()  # the rank's, which removes it at its end
        _start_helpers(options.get("multiprocessing_context"))
    # A generator of its own: a number from this process's would change the model's.
    options |= {"worker_init_fn": _end_with_rank, "generator": torch.Generator()}
    with _no_worker_warning():
        return DataLoader(dataset, **options)


def _start_helpers(context: BaseContext | None) -> None:
    """Start Python's helper processes with USR1, USR2 and TERM blocked."""
    # mpirun and schedulers send these to all processes of a rank. The rank handles
    # them, and needs its workers for that.
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
def _no_worker_warning() -> Iterator[None]:
    """Keep torch from telling every rank that there are more workers than cores."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def iterate_loader(loader: DataLoader[Any]) -> Iterator[LoadedBatch]:
    """Yield what a loader reads; the end of a killed worker is a `DataError`."""
    with deaths_named(loader.num_workers), _no_worker_warning():
        batches = iter(loader)
    while (batch := next_batch(loader, batches)) is not None:
        yield batch


def next_batch(loader: DataLoader[Any], batches: Iterator[Any]) -> LoadedBatch | None:
    """Return the next batch of an iterator of ``loader``; ``None``: there is none.

    Raises:
        DataError: A worker was killed.
    """
    # Without workers the data set seeds this process, and the model draws in it, too.
    # Here, once for a batch: the state of NumPy is slow to take and set.
    is_seeded = not loader.num_workers and getattr(loader.dataset, "is_seeded", False)
    random_numbers = own_random_state() if is_seeded else contextlib.nullcontext()
    with deaths_named(loader.num_workers), random_numbers:
        return next(batches, None)


@contextlib.contextmanager
def deaths_named(num_workers: int) -> Iterator[None]:
    """Raise a `DataError` where torch tells of a killed worker."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        death = _death_of_worker(error) if num_workers else None
        if death is None:
            raise
        raise DataError(
            f"a worker process of this rank was killed: {death}\n"
            "Its machine may have run out of memory: take fewer --num-workers, or ask "
            "for more memory"
        ) from None


def _death_of_worker(error: Exception) -> str | None:
    """Return what an error from DataLoader says of a killed worker, if it does."""
    if not isinstance(error, RuntimeError):
        if str(error).startswith("Caught "):  # raised by the data set, in a worker
            return None
        # The end of a worker's socket is often seen before its death. Torch reports
        # that by an exception in its SIGCHLD handler, wherever Python is then: best
        # here. It does not hear of children of the fork server.
        try:
            time.sleep(DEATH_SECONDS)
        except RuntimeError as death:
            error = death
        else:
            return repr(error)
    if not str(error).startswith(DEAD_WORKER):
        return None
    cause = error.__cause__  # may know the signal
    return str(cause if isinstance(cause, RuntimeError) else error).strip()


def _end_with_rank(worker: int) -> None:
    """Let this worker end as soon as its rank has ended."""
    # Torch's workers check now and then whether their parent is alive. But the parent
    # of fork server workers is the server, which stays until the last of them has
    # ended: those of a killed rank would stay forever.
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as `_start_helpers`
    rank = multiprocessing.parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)  # `sys.exit` would end this thread alone

    threading.Thread(target=wait, daemon=True).start()

"""A command of all ranks with a folder: rank zero prepares it, all start, and it runs.

start_job       MPI, watchdog, exit guard
prepare         on rank zero: read the flags, open the folder; all get the result
open the log    of each rank, before the long imports
init            torch, devices, process group
run             on all ranks
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.config import TrainConfig
from mpitrain.launch.init import init
from mpitrain.launch.job import start_job
from mpitrain.mpi.collectives import all_or_none, on_rank_zero
from mpitrain.record.result import record_job
from mpitrain.record.run_dir import open_log, start_logging
from mpitrain.tools.train.prepare import PreparedRun, prepare
from mpitrain.watchdog.process import age_seconds

if TYPE_CHECKING:
    from mpitrain.mpi.world import World
    from mpitrain.tools.sweep.config import PreparedSweep

Prepared = TypeVar("Prepared", bound=PreparedRun)


def train_command(read: Callable[[], TrainConfig], start_timeout_seconds: float) -> int:
    """Train a model on all ranks; ``read`` reads the flags."""

    def run(world: World, prepared: PreparedRun, handler: PreemptionHandler) -> int:
        start_seconds = age_seconds()
        from mpitrain.tools.train.run import run_training

        return run_training(world, prepared, handler, start_seconds)

    return _run(lambda: prepare(read()), run, start_timeout_seconds)


def sweep_command(
    words: Sequence[str], flags: Sequence[str], start_timeout_seconds: float
) -> int:
    """Search hyperparameters: ``words`` are its flags, ``flags`` each training's."""

    def prepare_sweep() -> PreparedSweep:
        from mpitrain.tools.sweep import config

        return config.prepare(config.read_sweep(words), flags)

    def run(world: World, prepared: PreparedSweep, handler: PreemptionHandler) -> int:
        from mpitrain.tools.sweep.worker import run_sweep

        return run_sweep(world, prepared, handler)

    return _run(prepare_sweep, run, start_timeout_seconds)


def _run(
    prepare: Callable[[], Prepared],
    run: Callable[[World, Prepared, PreemptionHandler], int],
    start_timeout_seconds: float,
) -> int:
    """Start all ranks, prepare on rank zero, and run; return the exit status."""
    # Garbage collection takes a fifth of the time of the imports.
    gc.disable()
    job = start_job(start_timeout_seconds=start_timeout_seconds, may_spawn=False)
    with job.guard:
        comm = job.comm
        with job.start_step("prepare the run"):
            job.is_preparing = True  # it may import a module of the user's
            prepared = on_rank_zero(comm, prepare, "prepare the run")
            job.is_preparing = False
        config, run_dir, is_zero = prepared.config, prepared.run_dir, comm.rank == 0
        if prepared.done:
            if is_zero:
                print(prepared.done, flush=True)
            return prepared.status
        # Opened before the long imports: the log tells whose process this is.
        place = (comm.rank, comm.size, socket.gethostname())
        with job.start_step("open the log"):
            log = all_or_none(comm, lambda: open_log(run_dir, *place), "open the log")
        log_file = start_logging(log, is_rank_zero=is_zero)
        # Signals during the long imports are not lost. It also logs the time limit.
        handler = PreemptionHandler(
            run_dir if is_zero else None, prepared.limit_seconds, age_seconds()
        )
        if is_zero and prepared.folder.lock is None:
            logging.getLogger("mpitrain").warning(
                "%s is on a file system without locks: nobody would notice a second "
                "job that writes into it",
                run_dir,
            )
        faulthandler.enable(log)  # for crashes in compiled code
        record_job(run_dir, log_file.write)
        # After what `record_job` has added: the error is one of the lines that wait.
        job.guard.on_failure.append(lambda _: log_file.flush())
        with init(**config.launch.as_arguments(), job=job) as world:
            from mpitrain.torch_compat import defer_dynamo

            if not config.compile:
                defer_dynamo()

            # Modules are never garbage: later collections need not look at them.
            gc.freeze()
            gc.enable()
            return run(world, prepared, handler)

"""A sweep on each rank: it trains the trials that the server gives it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.checkpoint.resume import hosts_without
from mpitrain.config import DataConfig
from mpitrain.console import shown
from mpitrain.errors import LaunchError, MpitrainError, Stopped, UsageError
from mpitrain.launch.job import Job
from mpitrain.launch.process_exit import is_consequence
from mpitrain.launch.subworld import sub_world
from mpitrain.mpi.collectives import all_or_none, on_rank_zero, world_comm
from mpitrain.mpi.implementation import has_thread_multiple
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World, list_hosts, rank_label
from mpitrain.record.run_dir import open_log, start_logging
from mpitrain.tasks.image_classification.datasets.named import Data, load_data
from mpitrain.tasks.image_classification.datasets.torchvision_sets import CLASSES
from mpitrain.tools.sweep.config import PreparedSweep
from mpitrain.tools.sweep.messages import POLL_SECONDS, Inbox, Message, TrialResult
from mpitrain.tools.train.prepare import PreparedRun, prepare, read_config
from mpitrain.tools.train.run import run_training
from mpitrain.torch_compat import destroy_process_group
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics
from mpitrain.watchdog.heartbeat import State

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


def run_sweep(world: World, sweep: PreparedSweep, handler: PreemptionHandler) -> int:
    """Run the trials of a sweep; return the exit status: 0, or 75 if it was stopped.

    Collective over all ranks.

    Raises:
        UsageError, LaunchError: The job has too few ranks, no shared folder, or an MPI
            without threads; on every rank.
    """
    size, count = world.world_size, sweep.options.ranks_per_trial
    if not has_thread_multiple():
        raise LaunchError(
            "MPI was started without MPI_THREAD_MULTIPLE, which sweep needs: unset "
            "MPI4PY_RC_THREAD_LEVEL, or load another MPI"
        ).on_all_ranks()
    if count > size:
        raise UsageError(
            f"--ranks-per-trial {count}: found {size} ranks; expected as many at "
            f"least: mpirun -np {count} ..."
        ).on_all_ranks()
    ranks = communicator(world)
    if hosts := hosts_without(sweep.run_dir, sweep.folder.run_id, world, ranks):
        raise UsageError(
            f"{list_hosts(hosts)} cannot see {shown(sweep.run_dir)}; expected a folder "
            "that all nodes share: --sweeps-dir"
        ).on_all_ranks()
    job = Job.current
    assert job is not None
    comm, data = job.comm.Dup(), _shared_data(sweep, world)
    worker = Worker(job, world, sweep, handler, Inbox(comm), data)
    destroy_process_group()
    screen = sys.stdout  # a trial's goes into its log

    def serve() -> None:
        try:
            from mpitrain.tools.sweep.server import Server  # Optuna, on one rank

            server = Server(comm, world, sweep, handler, screen)
            server.end_all(server.run())
        except BaseException as error:
            if isinstance(error, MpitrainError):
                error.on_all_ranks()
            if size > 1:
                job.guard.fail(error)  # ends this process, which may be in a trial
            worker.inbox.server_error = error

    if world.is_rank_zero:
        threading.Thread(target=serve, name="sweep server", daemon=True).start()
    status = worker.run()
    handler.keep_installed = False
    handler.close()
    time.sleep(0.05)  # gloo's threads drop their last tensors, as in `Job.close`
    return status


def _shared_data(sweep: PreparedSweep, world: World) -> Data | None:
    """Load the data set once for all trials, if they have the same and it is in memory.

    Collective over all ranks.
    """
    config, search = sweep.config, sweep.search
    if config.task is not None:
        return None
    varies = search.function or search.names & {it.name for it in fields(DataConfig)}
    if varies or config.data not in {*CLASSES, "synthetic"}:
        return None
    ranks = communicator(world)
    return load_data(config, seed=config.seed, world=world, ranks=ranks)


class Reporter(Callback):
    """Tells the server the metrics of each epoch; with `waits` the server may prune."""

    def __init__(
        self,
        start_id: int,
        world: World,
        inbox: Inbox,
        metrics: Collection[str],
        *,
        waits: bool,
    ) -> None:
        self._start_id, self._world = start_id, world
        self._inbox, self._metrics, self._waits = inbox, metrics, waits
        self.is_pruned = False

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Report a validation within an epoch, as `on_epoch_end`."""
        if not epoch.is_end:
            self.on_epoch_end(trainer, epoch)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Report; raises `StopRequested` on all ranks if the trial is pruned."""
        for name in self._metrics:
            if name not in epoch.values:
                raise UsageError(
                    f"the space names the metric {name!r}; expected one of the "
                    f"validation: {', '.join(epoch.values)}"
                ).on_all_ranks()
        counts_steps = trainer.config.validate_every_steps is not None
        unit, number = ("step", epoch.step) if counts_steps else ("epoch", epoch.epoch)
        if self._world.is_rank_zero:
            data = (unit, number, dict(epoch.values))
            self._inbox.send(Message("epoch", self._start_id, data))
        if self._waits:
            ranks = communicator(self._world)
            should_prune = ranks.on_rank_zero(self._answer, "ask the server")
            is_last = trainer.should_stop or trainer.engine.plan.is_done(trainer.state)
            self.is_pruned = should_prune and not is_last  # after that it is finished
            if self.is_pruned:
                raise StopRequested(f"pruned after {unit} {number}")

    def _answer(self) -> bool:
        while (found := self._inbox.take()) is None:
            self._inbox.raise_if_aborted()
            time.sleep(POLL_SECONDS / 4)
        return bool(found.data)


class Worker:
    """Trains on this rank what the server sends."""

    def __init__(
        self,
        job: Job,
        world: World,
        sweep: PreparedSweep,
        handler: PreemptionHandler,
        inbox: Inbox,
        data: Data | None,
    ) -> None:
        self._job, self._world, self._sweep = job, world, sweep
        self._handler, self.inbox, self._data = handler, inbox, data
        handler.extra_stop_reason, handler.keep_installed = inbox.stop_reason, True

    def run(self) -> int:
        """Train until the server sends the end; return the job's exit status."""
        watchdog, has_told = self._job.watchdog, False
        watchdog.set_state(State.IDLE)
        while True:
            message = self.inbox.take()
            if message is None:
                reason = self._handler.requested()
                if reason and not has_told:  # perhaps a signal that no trial has seen
                    has_told = True
                    self.inbox.send(Message("stop", -1, reason))
                time.sleep(POLL_SECONDS)
                continue
            watchdog.progress("between two trials")
            watchdog.set_state(State.RUNNING)
            if message.kind == "end":
                return int(message.data)
            if message.kind == "start":
                self._train(message.start_id, *message.data)
            watchdog.set_state(State.IDLE)

    def _train(self, start_id: int, ranks: Sequence[int], flags: Sequence[str]) -> None:
        job, inbox, on_end = self._job, self.inbox, self._job.guard.on_end[:]
        inbox.begin(start_id)
        try:
            with (
                job.mpi.cancel_waits_by(inbox.raise_if_aborted),
                sub_world(job, self._world, ranks, start_id) as part,
            ):
                job.watchdog.expect_steps("the start of a trial")
                outcome = self._train_in(part, start_id, flags)
        except (Exception, SystemExit) as error:
            outcome = self._failed(error, ranks)
        reason = self._handler.requested()
        inbox.send(Message("ended", start_id, outcome._replace(stop_reason=reason)))
        job.guard.on_end[:] = on_end  # undo what the training left
        gc.collect()
        if self._world.device != "cpu":
            torch.get_device_module(self._world.device).empty_cache()

    def _failed(self, error: BaseException, ranks: Sequence[int]) -> TrialResult:
        rank, size = self._world.rank, self._world.world_size
        text, mine = f"{type(error).__name__}: {error}", ranks.index(rank)
        if not getattr(error, "is_collective", False):
            text = f"[{rank_label(rank, size, socket.gethostname())}] {text}"
        # Torch may have made another error of a TrialAborted.
        is_other = getattr(error, "reporting_rank", mine) not in (None, mine)
        if self.inbox.is_aborted or is_other or is_consequence(error):
            return TrialResult("aborted", rank, text)
        if isinstance(error, UsageError):
            return TrialResult("failed", rank, str(error), is_usage=True)
        return TrialResult("failed", rank, text)

    def _train_in(
        self, part: World, start_id: int, flags: Sequence[str]
    ) -> TrialResult:
        began, rank = time.monotonic(), self._world.rank
        run = on_rank_zero(
            world_comm(), lambda: prepare(read_config(flags)), "prepare the run"
        )
        search = self._sweep.search
        names, has_pruner = [it for _, it in search.metrics], search.pruner is not None
        reporter = Reporter(start_id, part, self.inbox, names, waits=has_pruner)
        try:
            if run.done and run.status:  # a file stop lies in its folder
                raise Stopped(run.done).on_all_ranks()
            if run.done:  # in a job that ended before Optuna was told
                return TrialResult("finished", rank)
            with self._logs(run, part):
                status = run_training(
                    part,
                    run,
                    self._handler,
                    time.monotonic() - began,
                    callbacks=[reporter],
                    shared_data=self._data,
                )
        finally:
            if part.is_rank_zero and run.folder.lock is not None:
                os.close(run.folder.lock)
            if run.config.compile:
                torch.compiler.reset()
        if reporter.is_pruned:
            return TrialResult("pruned", rank)
        return TrialResult("stopped" if status else "finished", rank)

    @contextlib.contextmanager
    def _logs(self, run: PreparedRun, part: World) -> Iterator[None]:
        rank, size, hostname = part.rank, part.world_size, socket.gethostname()
        log = all_or_none(
            world_comm(),
            lambda: open_log(run.run_dir, rank, size, hostname),
            "open the log",
        )
        before, logger.handlers[:] = logger.handlers[:], []
        log_file = start_logging(log, is_rank_zero=False)
        try:
            with contextlib.redirect_stdout(log):
                yield
        except BaseException:
            log_file.write(traceback.format_exc())
            raise
        finally:
            log_file.flush()
            log_file.close()
            logger.handlers[:] = before

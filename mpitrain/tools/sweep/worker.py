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
from collections.abc import Iterator, Sequence
from dataclasses import fields

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
from mpitrain.tools.sweep.reporter import Reporter
from mpitrain.tools.sweep.script import prepare_trial, run_trial
from mpitrain.tools.train.prepare import PreparedRun, prepare, read_config
from mpitrain.tools.train.run import run_training
from mpitrain.torch_compat import destroy_process_group
from mpitrain.watchdog.heartbeat import State

logger = logging.getLogger("mpitrain")


def run_sweep(world: World, sweep: PreparedSweep, handler: PreemptionHandler) -> int:
    """Run the trials of a sweep; return the exit status: 0, or 75 if it was stopped.

    Collective over all ranks.

    Raises:
        UsageError, LaunchError: The job has too few ranks, no shared folder, or an MPI
            without threads; on every rank.
    """
    size = world.world_size
    if not has_thread_multiple():
        raise LaunchError(
            "MPI was started without MPI_THREAD_MULTIPLE, which sweep needs: unset "
            "MPI4PY_RC_THREAD_LEVEL, or load another MPI"
        ).on_all_ranks()
    for name, count in (
        ("--ranks-per-trial", sweep.options.ranks_per_trial),
        # Else those trials would be recorded as failed, also for a job with more ranks.
        ("`ranks` in the space:", sweep.search.max_ranks),
    ):
        # A chain that has lost a node leaves such trials to its next job.
        if count > size and not sweep.has_trials:
            raise UsageError(
                f"{name} {count}: found {size} ranks; expected as many at least: "
                f"mpirun -np {count} ..."
            ).on_all_ranks()
    ranks = communicator(world)
    if hosts := hosts_without(sweep.run_dir, sweep.folder.run_id, world, ranks):
        raise UsageError(
            f"{list_hosts(hosts)} cannot see {shown(sweep.run_dir)}; expected a folder "
            "that all nodes share: --sweeps-dir"
        ).on_all_ranks()
    job = Job.current
    assert job is not None
    # A communicator of its own: no message of a trial may be taken for the server's.
    comm, data = job.comm.Dup(), _shared_data(sweep, world)
    worker = Worker(job, world, sweep, handler, Inbox(comm), data)
    # Each trial makes another default group (`sub_world`).
    destroy_process_group()
    screen = sys.stdout  # a trial's goes into its log

    def serve() -> None:
        try:
            from mpitrain.tools.sweep.server import Server  # Optuna, on one rank

            server = Server(comm, world, sweep, handler, screen)
            server.end_all(server.run())
        except BaseException as error:
            if isinstance(error, MpitrainError):
                # Printed without the name of a rank: it is none of this rank's trial.
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
    if config.task is not None or search.is_of_script:
        return None
    varies = search.function or search.names & {it.name for it in fields(DataConfig)}
    if varies or config.data not in {*CLASSES, "synthetic"}:
        return None
    ranks = communicator(world)
    return load_data(config, seed=config.seed, world=world, ranks=ranks)


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
            ended = None
            if message.kind == "start":
                ended = self._train(message.start_id, *message.data)
            watchdog.set_state(State.IDLE)
            if ended is not None:  # last: the server may fail then, and set the state
                self.inbox.send(ended)

    def _train(
        self, start_id: int, ranks: Sequence[int], name: str, words: Sequence[str]
    ) -> Message:
        job, inbox, guard = self._job, self.inbox, self._job.guard
        on_end, on_leave = guard.on_end[:], guard.on_leave[:]
        inbox.begin(start_id)
        try:
            with (
                # Outermost: `sub_world` waits for the other ranks of the trial, too.
                job.mpi.cancel_waits_by(inbox.raise_if_aborted),
                sub_world(job, self._world, ranks, start_id) as part,
            ):
                job.watchdog.expect_steps("the start of a trial")
                outcome = self._train_in(part, start_id, name, words)
        except (Exception, SystemExit) as error:
            outcome = self._failed(error, ranks)
        guard.on_end[:], guard.on_leave[:] = on_end, on_leave  # undo what it left
        # Cycles hold the weights of this trial, whose memory the next one needs.
        gc.collect()
        if self._world.device != "cpu":
            torch.get_device_module(self._world.device).empty_cache()
        reason = self._handler.requested()
        return Message("ended", start_id, outcome._replace(stop_reason=reason))

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
        self, part: World, start_id: int, name: str, words: Sequence[str]
    ) -> TrialResult:
        began, rank, sweep = time.monotonic(), self._world.rank, self._sweep
        search, handler = sweep.search, self._handler

        def prepare_here() -> PreparedRun:
            if search.is_of_script:
                return prepare_trial(sweep, name)
            return prepare(read_config(words))

        run = on_rank_zero(world_comm(), prepare_here, "prepare the run")
        names, has_pruner = [it for _, it in search.metrics], search.pruner is not None
        reporter = Reporter(
            start_id, part, self.inbox, names, handler, waits=has_pruner
        )
        try:
            if run.done and run.status:  # a file stop lies in its folder
                raise Stopped(run.done).on_all_ranks()
            if run.done:  # in a job that ended before Optuna was told
                return TrialResult("finished", rank)
            with self._logs(run, part):
                if search.is_of_script:
                    status = run_trial(self._job, part, run, reporter, handler, words)
                else:
                    status = run_training(
                        part,
                        run,
                        handler,
                        time.monotonic() - began,
                        callbacks=[reporter],
                        shared_data=self._data,
                    )
        finally:
            # Else it would be held, and open, until the sweep ends.
            if part.is_rank_zero and run.folder.lock is not None:
                os.close(run.folder.lock)
            if run.config.compile or search.is_of_script:
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

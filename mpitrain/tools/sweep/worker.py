"""A rank of a sweep: trains the trials that the server gives it, one after another."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.data.sources import Data
from mpitrain.errors import Stopped
from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.launch.process_exit import exit_status, is_consequence
from mpitrain.launch.subworld import sub_world
from mpitrain.mpi.collectives import (
    all_or_none,
    cancel_waits_by,
    on_rank_zero,
    world_comm,
)
from mpitrain.mpi.mailbox import Mailbox
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World, rank_label
from mpitrain.record.run_dir import open_log, start_logging
from mpitrain.record.runs import close_run
from mpitrain.tools.sweep.config import ReadConfig
from mpitrain.tools.sweep.messages import (
    POLL_SECONDS,
    Inbox,
    Message,
    Outcome,
)
from mpitrain.tools.train.prepare import PreparedRun, prepare
from mpitrain.tools.train.run import run_training
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics
from mpitrain.watchdog.heartbeat import State

logger = logging.getLogger("mpitrain")


class Reporter(Callback):
    """Tells the server the metrics of each epoch; with `waits` the server may prune."""

    def __init__(self, id: int, world: World, inbox: Inbox, *, waits: bool) -> None:
        self._id, self._inbox, self._waits = id, inbox, waits
        self._is_first, self._ranks = world.is_rank_zero, communicator(world)
        self.is_pruned = False

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Report; raises `StopRequested` on all ranks if the trial is pruned."""
        if self._is_first:
            data = (epoch.epoch, dict(epoch.values))
            self._inbox.send(Message("epoch", self._id, data))
        if self._waits:
            self.is_pruned = self._ranks.on_rank_zero(self._verdict, "ask the server")
            if self.is_pruned and epoch.epoch < trainer.engine.plan.num_epochs:
                raise StopRequested(f"pruned after epoch {epoch.epoch}")

    def _verdict(self) -> bool:
        while (found := self._inbox.take()) is None:
            self._inbox.raise_if_aborted()
            time.sleep(POLL_SECONDS / 4)
        return bool(found.data)


class Worker:
    """Serves trials on this rank.

    Args:
        mailbox: The server's messages.
        handler: The job's.
        waits: Whether the server says after each epoch if the trial is pruned.
        data: The data set of all trials, if they have the same.
        server_error: Returns what has ended the server, if anything did.
    """

    def __init__(
        self,
        guard: ExitGuard,
        world: World,
        mailbox: Mailbox,
        handler: PreemptionHandler,
        read_config: ReadConfig,
        *,
        waits: bool,
        data: Data | None,
        server_error: Callable[[], BaseException | None],
    ) -> None:
        self._guard, self._world = guard, world
        self._handler, self._read_config = handler, read_config
        self._waits, self._data = waits, data
        self._server_error = server_error
        self._inbox = Inbox(mailbox)
        handler.others = self._inbox.stop_reason

    def run(self) -> int:
        """Train until the server sends the end; return the job's exit status."""
        watched = self._guard.watched
        watched.set_state(State.IDLE)
        while True:
            message = self._inbox.take()
            if message is None:
                if (error := self._server_error()) is not None:
                    raise error
                time.sleep(POLL_SECONDS)
                continue
            watched.progress("between two trials")
            watched.set_state(State.RUNNING)
            if message.kind == "end":
                return int(message.data)
            if message.kind == "start":
                self._train(message.id, *message.data)
            watched.set_state(State.IDLE)

    def _train(self, id: int, ranks: Sequence[int], flags: Sequence[str]) -> None:
        """Train one trial; an error in it ends nothing else."""
        guard, on_end = self._guard, self._guard.on_end[:]
        self._inbox.begin(id)
        try:
            with (
                cancel_waits_by(self._inbox.raise_if_aborted),
                sub_world(guard, self._world, ranks, id) as part,
                self._tells_outcome(id) as outcome,
            ):
                guard.watched.expect_steps("the start of a trial")
                outcome["status"] = self._train_in(part, id, flags)
        except (Exception, SystemExit):
            pass  # the server knows it
        guard.on_end[:] = on_end
        torch.use_deterministic_algorithms(False)
        gc.collect()
        if self._world.device != "cpu":
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _tells_outcome(self, id: int) -> Iterator[dict[str, Any]]:
        """Tell the server at once, for the other ranks may wait for one that failed."""
        outcome: dict[str, Any] = {"status": "failed"}
        rank = self._world.rank
        try:
            yield outcome
        except (Exception, SystemExit) as error:
            # Torch may have made another error of a TrialAborted.
            if self._inbox.is_aborted:
                outcome["status"] = "aborted"
                raise
            text, mine = f"{type(error).__name__}: {error}", world_comm().rank
            if not getattr(error, "is_collective", False):
                label = rank_label(rank, self._world.world_size, socket.gethostname())
                text = f"[{label}] {text}"
            is_other = getattr(error, "reporting_rank", mine) not in (None, mine)
            outcome |= {
                "error": text,
                "exit_status": exit_status(error),
                "is_consequence": is_other or is_consequence(error),
            }
            raise
        finally:
            outcome["stop_reason"] = self._handler.requested()
            self._inbox.send(Message("ended", id, Outcome(rank, **outcome)))

    def _train_in(self, part: World, id: int, flags: Sequence[str]) -> str:
        """Train in the sub-world of the trial; return its outcome."""
        comm, began = world_comm(), time.monotonic()
        run = on_rank_zero(
            comm, lambda: prepare(self._read_config(flags)), "prepare the run"
        )
        try:
            if run.done and run.status:  # a file stop lies in its folder
                raise Stopped(run.done).on_all_ranks()
            if run.done:
                return "finished"
            reporter = Reporter(id, part, self._inbox, waits=self._waits)
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
            close_run(run.run_dir)
            if run.config.compile:
                torch._dynamo.reset()  # noqa: SLF001
        if not status:
            return "finished"
        return "pruned" if reporter.is_pruned else "stopped"

    @contextlib.contextmanager
    def _logs(self, run: PreparedRun, part: World) -> Iterator[None]:
        """Let what is logged and printed go into the trial's log alone."""
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

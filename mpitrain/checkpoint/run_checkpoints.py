"""The checkpoints of one run folder, for a training loop of your own."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.format import check_json
from mpitrain.checkpoint.layout import FOLDER, name_of
from mpitrain.checkpoint.manager import CheckpointManager
from mpitrain.checkpoint.memory_folder import MemoryFolder
from mpitrain.checkpoint.memory_restore import find_in_memory
from mpitrain.checkpoint.objects import load_objects, merge, pack_objects, split_objects
from mpitrain.checkpoint.preemption import (
    FIRST_MARGIN_SECONDS,
    REASONS,
    PreemptionHandler,
    forget_stop,
)
from mpitrain.checkpoint.resume import find_checkpoint, hosts_without
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import load_random, random_to_save
from mpitrain.config import seconds_of
from mpitrain.data.samples import kind_of
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.launch.job import Job, require_world
from mpitrain.launch.process_exit import is_failing
from mpitrain.models.model_config import model_config
from mpitrain.mpi.collectives import MPI_PROCESS
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World, list_hosts
from mpitrain.record.result import record_job, update_result
from mpitrain.record.runs import Exists, is_finished, open_run
from mpitrain.record.supervised import (
    Supervision,
    opened_run,
    read_memory_step,
    supervision,
    tell_supervisor,
)
from mpitrain.watchdog.process import age_seconds

logger = logging.getLogger("mpitrain")


class CheckpointError(MpitrainError):
    """A checkpoint could not be written."""


class RunCheckpoints:
    """Opens a run folder, and saves and restores checkpoints in it.

    The base of `Checkpointer`, which has the arguments.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        keep: int | None = 3,
        memory: float = 0.25,
        resume: str = "auto",
        time_limit: str | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.reader: CheckpointReader | None = None
        self.is_disabled = False
        self.data: Mapping[str, Any] | None = None
        self._keep, self._memory = keep, memory
        self._supervision: Supervision | None = None
        self._folder: MemoryFolder | None = None
        self._is_from_memory = False  # what `reader` reads
        self._resume = resume
        self._time_limit = seconds_of(time_limit)
        self._world: World | None = None
        self._ranks: Communicator  # from `open` on
        self._run_id = ""
        self._handler: PreemptionHandler | None = None
        self._manager: CheckpointManager | None = None
        self._save_seconds = self._longest_gap = 0.0
        self._saved_step: int | None = None  # by a custom loop
        self._stop_reason = ""
        self._has_recorder = False  # of a Trainer, which writes the same, and more

    # --- the run folder -----------------------------------------------------------

    def open(
        self,
        world: World,
        *,
        run_id: str | None = None,
        handler: PreemptionHandler | None = None,
    ) -> None:
        """Open the run folder and find the checkpoint to resume from.

        Collective over all ranks. `setup` and `restore` call it, if you do not. With
        ``run_id`` this job has locked the folder already.
        """
        if self._world is not None:
            return
        self._world = world
        self._ranks = ranks = communicator(world)
        if run_id is None:
            path = self.run_dir.absolute()
            exists: Exists = "refuse" if self._resume == "never" else "resume"

            def open_folder() -> str:
                found = open_run(path.parent, path.name, exists=exists)
                forget_stop(path)
                return found.run_id

            run_id = ranks.on_rank_zero(open_folder, "open the run folder")
            record_job(self.run_dir)
        self._run_id = run_id
        # On rank zero: the others may not see the files of `supervise`.
        resume = ranks.on_rank_zero(self._resume_now, "choose what to resume")
        hosts_without_run_dir = hosts_without(self.run_dir, run_id, world, ranks)
        self.reader = find_checkpoint(
            self.run_dir, run_id, resume, world, ranks, hosts_without_run_dir
        )
        self.is_disabled = bool(hosts_without_run_dir)
        if not self.is_disabled:
            self._find_in_memory(world, ranks)
        # Only now: a start that ends before this resumes as it was told, once more.
        if world.is_rank_zero and not MPI_PROCESS.sub_worlds:
            tell_supervisor(self.run_dir, has_resumed=True)
        if hosts_without_run_dir and world.is_rank_zero:
            logger.warning(
                "no checkpoints are written, and a signal, the time limit or a file "
                "stop end nothing in time: %s cannot see %s; name a folder that all "
                "nodes share with --runs-dir",
                *(list_hosts(hosts_without_run_dir), self.run_dir),
            )
        if handler is not None:
            self._handler = handler
            self._start_handler()

    def _resume_now(self) -> str:
        """Return what to resume: not what a start before has resumed already."""
        before, path = opened_run(os.environ, before=True), self.run_dir.resolve()
        if before is None or before.run_dir != path or not before.has_resumed:
            return self._resume
        folders = {path, (path / FOLDER).resolve()}  # which may be a link
        is_within = not folders.isdisjoint(Path(self._resume).resolve().parents)
        return "auto" if is_within else self._resume  # it has come further since

    def _find_in_memory(self, world: World, ranks: Communicator) -> None:
        """Resume from the memory of the nodes, if that is newer than the disk."""
        found = ranks.on_rank_zero(lambda: supervision(os.environ), "ask supervise")
        # A part of the ranks has other checkpoints, such as a trial of a sweep.
        if found is None or MPI_PROCESS.sub_worlds or not self._memory:
            return
        folder, mine = MemoryFolder(world, found.token, self._run_id), ""
        was_there = folder.path.exists()  # else made by `open`
        try:
            folder.open()
        except OSError as error:
            mine = f"{world.hostname}: {error}"
        if reason := next(filter(None, ranks.allgather(mine)), ""):
            if world.is_rank_zero:
                logger.warning("no checkpoints in memory: %s", reason)
            return
        self._supervision, self._folder = found, folder
        newest = find_in_memory(folder, self._run_id, world, ranks)
        on_disk = None if self.reader is None else self.reader.checkpoint
        if newest is not None and (on_disk is None or newest > on_disk):
            self.reader, self._is_from_memory = CheckpointReader(newest), True
        # Not where mpitrain has removed it, or has told why it cannot be used.
        is_lost = newest is None and not folder.has_warned
        is_lost &= not all(ranks.allgather(was_there))
        step = read_memory_step(os.environ, is_there=True) if world.is_rank_zero else 0
        is_newer = step > (0 if on_disk is None else on_disk.step)
        if is_lost and found.num_restarts and is_newer:
            logger.warning(
                "the checkpoint of step %d is no longer in memory (%s): its nodes are "
                "lost, or systemd emptied it when the user's last login ended "
                "(RemoveIPC; see docs/howto/resume.md)",
                *(step, folder.path.parent),
            )

    def _start_handler(self) -> PreemptionHandler:
        assert self._world is not None
        if self._handler is None and Job.current is not None:
            self._handler = Job.current.preemption_handler
        if self._handler is None:
            self._handler = PreemptionHandler(
                self.run_dir if self._world.is_rank_zero else None,
                self._time_limit,
                age_seconds(),
            )
        if self.is_disabled:
            self._handler.uninstall()
        else:
            self._handler.margin = self._margin
        return self._handler

    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit; ``None`` without one; local."""
        return None if self._handler is None else self._handler.seconds_left()

    # --- for a loop of your own -----------------------------------------------------

    def restore(self, **objects: Any) -> dict[str, Any] | None:
        """Load objects by name, and random numbers, if there is a checkpoint.

            checkpointer.restore(model=model, optimizer=optimizer, scheduler=scheduler)

        Collective over all ranks.

        Args:
            **objects: What `save` was called with, by the same names. Modules as they
                are trained: plain, in DDP, or sharded by `fully_shard`; optimizers
                together with the modules of their weights; tensors; and whatever has
                ``load_state_dict``.

        Returns:
            The plain values and the ``state`` that `save` was called with, and its
            ``step``; ``None`` without a checkpoint.
        """
        world = self._open_by_itself()
        if self.reader is None:
            return None
        reader = self.reader
        if reader.metadata["user_state"] is None:
            raise UsageError(
                f"{reader.checkpoint.path} was written by a Trainer"
            ).on_all_ranks()
        stateful, plain = split_objects(objects)
        if plain:
            name, value = plain.popitem()
            raise UsageError(
                f"restore({name}=...) is {kind_of(value)}; expected a module, an "
                "optimizer, or an object with load_state_dict. Plain values are in "
                "what restore() returns"
            ).on_all_ranks()
        load_objects(reader, stateful)
        left = reader.metadata.get("objects", objects).keys() - objects.keys()
        if left and world.is_rank_zero:
            logger.warning(
                "%s has %s, too, which restore() was not asked for: pass it to resume "
                "exactly",
                *(reader.checkpoint.path, ", ".join(sorted(left))),
            )
        step: int = reader.metadata["step"]
        load_random(reader, world, seed=step, step=step)
        self._run_from(step)
        return {**reader.metadata["user_state"], "step": step}

    def save(
        self,
        step: int,
        *,
        state: Mapping[str, Any] | None = None,
        metric: float | None = None,
        **objects: Any,
    ) -> None:
        """Write a checkpoint, and wait until it is on the disk.

            checkpointer.save(step, g=g, d=d, opt_g=opt_g, opt_d=opt_d, loader=loader)

        Collective over all ranks. A step that is saved already is not saved again.

        Args:
            step: Steps that are done; names the checkpoint.
            state: Plain values that `restore` shall return; JSON can carry it.
            metric: What the best checkpoint is chosen by; higher is better. NaN and
                infinity are taken as ``None``.
            **objects: What is saved, by name. Modules as they are trained: plain, in
                DDP, or sharded by `fully_shard`; optimizers of any class together with
                the modules of their weights; tensors; schedulers, averages and whatever
                has ``state_dict`` and ``load_state_dict``, of which rank zero's state
                is saved; and plain values, as in ``state``.

        Raises:
            UsageError: A state is neither tensors nor plain values; or a checkpoint is
                there that was not restored; on every rank.
            CheckpointError: It could not be written; on every rank. The one before it
                is complete.
        """
        world = self._open_by_itself()
        if self.is_disabled:
            return
        # Of numpy or torch, too, which JSON does not know: rank zero alone would fail.
        step, metric = int(step), None if metric is None else float(metric)
        if self._manager is None:
            self._manager = CheckpointManager(
                self.run_dir, world, self._ranks, keep=self._keep
            )
        if self.reader is not None and self._saved_step is None:
            raise UsageError(
                f"save({step}) without restore(): {self.reader.checkpoint.path} is "
                "there, of an earlier training. Expected restore() before the first "
                "save(), or another folder"
            ).on_all_ranks()
        there = self.run_dir / FOLDER / name_of(step)
        self._run_from(step)
        # Rank zero decides for all: a file server may show others a folder late.
        if self._ranks.on_rank_zero(there.is_dir, "look for the checkpoint"):
            return
        stateful, plain = split_objects(objects)
        plain |= state or {}
        check_json(plain, "the state")
        names = ", ".join(
            f"{name} ({type(it).__name__})" for name, it in stateful.items()
        )
        self._ranks.check_equal(
            names, "what is saved", "Expected the same names on every rank"
        )
        tensors, mine = pack_objects(stateful, is_rank_zero=world.is_rank_zero)
        packed = merge(self._ranks.gather(mine))
        metadata = {
            "run": self._run_id,
            "step": step,
            "world_size": world.world_size,
            "extra_state": packed.get("model", {}),
            "model_config": model_config(stateful.get("model"))
            if world.is_rank_zero
            else None,
            "metric": metric if math.isfinite(metric or 0.0) else None,
            "user_state": plain,
            "objects": packed,
            "trainer": None,
        }
        tensors |= random_to_save(world)
        self._manager.save(tensors, metadata, step, 0)
        result = self._manager.finish("writing a checkpoint")
        if result is not None:
            self._save_seconds = max(self._save_seconds, result.write_seconds)
        if result is not None and result.error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written: "
                f"{result.error}. The one before it is complete"
            ).on_all_ranks()

    def should_stop(self) -> str:
        """Return why the loop should save and stop; empty if it should not.

        Collective over all ranks, and equal on them: call it at the same steps, not at
        each of very short ones, since all ranks exchange a number. From the first call
        on SIGUSR2 and SIGTERM do not end the process. Exit with status 75 after it.
        """
        self._open_by_itself()
        handler = self._handler or self._start_handler()
        self._stop_reason = REASONS[max(self._ranks.allgather(handler.requested()))]
        return self._stop_reason

    def _open_by_itself(self) -> World:
        what = "Checkpointer.restore and .save"
        world = self._world or require_world(what)
        if self._world is None:
            self._memory = 0.0  # the loop decides when to save: to the disk
        self.open(world)
        return world

    def _margin(self) -> float:
        """Return how many seconds before its end a training should stop."""
        # One save may be under way and another one wait, before the last one; and what
        # one rank knows the ranks exchange at one step, and know at the next.
        return FIRST_MARGIN_SECONDS + 3 * self._save_seconds + 2 * self._longest_gap

    def close(self) -> None:
        """Record that a custom loop is finished, and let go of the signals; local.

        SIGUSR2 and SIGTERM do again what they did before; SIGUSR2 nothing more after
        one of them. After a reason of `should_stop` the run is stopped, not finished.
        The end of the job calls it.
        """
        if self._handler is not None:
            self._handler.close(has_stopped=bool(self._stop_reason))
        if self._saved_step is None or is_failing():
            return
        stopped = f"stopped at step {self._saved_step}: {self._stop_reason}"
        if self._stop_reason:
            self._record(status="stopped", stopped=stopped)
        elif not is_finished(self.run_dir):  # by a Recorder, which knows more
            self._record(status="finished", steps=self._saved_step)
        self._saved_step = None

    def _run_from(self, step: int) -> None:
        """Record that the loop is running, and its end when the job ends."""
        if self._saved_step is None and Job.current is not None:
            self._record(status="running")
            Job.current.guard.on_leave.append(self.close)
        self._saved_step = step

    def _record(self, **values: Any) -> None:
        is_rank_zero = self._world is not None and self._world.is_rank_zero
        if is_rank_zero and not self._has_recorder:
            update_result(self.run_dir, **values)

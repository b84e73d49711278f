"""The callback that replays: resumes without writing, and watches the step asked for.

It takes the place of the run's own callbacks in every `Trainer` of the process, also in
one that a script makes. Callbacks of the user stay: they may be part of the training.

    setup             weights of the checkpoint; of the run itself also the callbacks'
    on_stage_start    optimizers and random numbers; then as after each step:
    on_step_end       a `StepWatch` on the next step, if it may be the one
    on_step_end       of that step: print what was seen, and end the process

See docs/decisions/0019.
"""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch

from mpitrain.checkpoint.layout import checkpoint_at
from mpitrain.checkpoint.run_checkpoints import RunCheckpoints
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import load_random, load_stage
from mpitrain.checkpoint.training_state import restore_trainer
from mpitrain.console import say, shown
from mpitrain.data.loader import Batch
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.files import replacing
from mpitrain.launch import run_script
from mpitrain.launch.init import init
from mpitrain.launch.job import Job, start_job
from mpitrain.launch.process_exit import exit_now
from mpitrain.launch.run_target import read_on_all_ranks
from mpitrain.mpi.collectives import on_rank_zero
from mpitrain.record.environment import describe
from mpitrain.record.recorder import Recorder
from mpitrain.tools.replay.bisect import StepHashes
from mpitrain.tools.replay.config import ReplayConfig, ReplayRequest, read_request
from mpitrain.tools.replay.lines import Comparison, changed_flags, changes, step_lines
from mpitrain.tools.replay.norms import LayerNorms, layer_lines
from mpitrain.tools.replay.watch import MicroBatchSeen, StepWatch, bad_samples
from mpitrain.tools.train.run import build_trainer
from mpitrain.train.callbacks import Callback
from mpitrain.train.early_stopping import EarlyStopping
from mpitrain.train.metrics import StepMetrics
from mpitrain.train.trainer import Trainer


class ReplayError(MpitrainError):
    """A loss is not the recorded one, or no step is what was looked for."""


class Replay(Callback):
    """Resumes from a checkpoint, computes steps as before, and tells of the last one.

    Ends the process after it: by status 0, or a `ReplayError`.
    """

    runs_last: ClassVar[bool] = True  # as the `Checkpointer`

    def __init__(self, request: ReplayRequest) -> None:
        self._request, self._config = request, request.config
        path = request.checkpoint
        self._reader = None if path is None else CheckpointReader(checkpoint_at(path))
        self._others: Sequence[Callback] = ()
        self._compared = Comparison(request.config.run)
        self._norms: LayerNorms | None = None
        self._hashes: StepHashes | None = None
        self._watch: StepWatch | None = None
        self._weights: Mapping[str, Any] = {}  # before the step
        self._scale = 0.0  # of the loss, before the step
        self.is_used = False

    def replace_callbacks(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return what a trainer has instead of its callbacks: it writes nothing."""
        if self.is_used:
            raise UsageError(
                "the script trains a second time; expected one Trainer.fit, that of "
                f"{self._config.run}"
            ).on_all_ranks()
        # For `diff` two runs have one command line.
        if self._request.training is None and self._config.hashes is None:
            self._refuse_other(callbacks)
        self.is_used = True
        self._others = [
            it
            for it in callbacks
            # It decides when a stage ends. What inherits another of ours may write.
            if isinstance(it, EarlyStopping)
            or not any(kind.__module__.startswith("mpitrain.") for kind in _own(it))
        ]
        return [*self._others, self]

    def _refuse_other(self, callbacks: Sequence[Callback]) -> None:
        """Refuse a script's first trainer, if it is of another run."""
        kinds = RunCheckpoints, Recorder
        found = {it.run_dir for it in callbacks if isinstance(it, kinds)}
        if self._config.run.resolve() not in {it.resolve() for it in found}:
            named = ", ".join(map(str, found)) or "no run folder"
            raise UsageError(
                f"the first Trainer of the script has {named}; expected a Checkpointer "
                f"or default_callbacks of {self._config.run}"
            ).on_all_ranks()

    # --- hooks of the trainer -----------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Load the checkpoint, and let a step that is not finite be looked into."""
        world = trainer.engine.world
        if (self._config.pdb or self._config.hashes) and world.world_size > 1:
            flag = "--pdb" if self._config.pdb else "--hashes"
            raise UsageError(
                f"{flag}: expected one rank, without mpirun"
            ).on_all_ranks()
        if self._reader is not None:
            others = self._others if self._is_of_run(self._reader) else ()
            restore_trainer(self._reader, trainer, others)
        # It would end the job; such a step is not applied either way.
        trainer.engine.config = replace(trainer.config, on_nonfinite="skip")
        trainer.engine.verification = None  # it computes micro-batches of others, too
        total, step = trainer.engine.plan.total_steps, self._config.step
        if total is not None and step is not None and step > total:
            raise UsageError(
                f"--step {step}: the training has {total} steps"
            ).on_all_ranks()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Say where it begins, and what is not as it was."""
        world, reader = trainer.engine.world, self._reader
        if not world.is_rank_zero:
            return
        where = "the start" if reader is None else shown(reader.checkpoint.path)
        ranks = f"{world.world_size} rank{'s' * (world.world_size != 1)}"
        say(f"replay of {shown(self._config.run)} from {where}, on {ranks}")
        run, before = self._config.run, self._request.recorded
        found, is_bitwise = changes(run, describe(world), trainer.config)
        self._compared.is_bitwise = is_bitwise
        flags = changed_flags(before, trainer.config)
        for name, changed in (("not as recorded", found), ("other flags", flags)):
            if changed:
                say(f"{name}: {'; '.join(changed)}")

    def on_stage_start(self, trainer: Trainer) -> None:
        """Load optimizers and random numbers, of the first stage."""
        # Later stages begin as they did in the run.
        reader, self._reader = self._reader, None
        if reader is not None:
            load_stage(reader, trainer.engine, is_own=self._is_of_run(reader))
            step, seed = trainer.state.step, trainer.config.seed
            load_random(reader, trainer.engine.world, seed=seed, step=step)
        # Whether a step was applied is to be known at its end, on a GPU, too.
        trainer.engine.optimizer.may_defer = False
        self._prepare(trainer)

    def on_metrics(self, trainer: Trainer, steps: Sequence[StepMetrics]) -> None:
        """Compare with what is recorded, on rank zero."""
        if trainer.engine.world.is_rank_zero:
            self._compared.add(steps, trainer.micro_batch_losses)

    def on_step_end(self, trainer: Trainer) -> None:
        """Tell of the step, if it is the one; prepare the next."""
        step, config = trainer.state.step, self._config
        if self._watch is not None:
            seen, is_skipped = self._watch.close(), not self._watch.is_applied
            self._watch = None
            # A loss scale that was too large for fp16 shrinks: no step is wrong then.
            has_shrunk = trainer.engine.optimizer.scale.value != self._scale
            is_found = is_skipped and not has_shrunk
            if (is_found and config.until) or (
                step == config.step and not config.until
            ):
                self._end(trainer, seen, is_skipped=is_skipped)
        if self._hashes is not None:
            weights = trainer.engine.strategy.full_state_dict()
            self._hashes.end_step(step, weights)
        self._prepare(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        """Say that the step did not come."""
        what = "all losses and gradients are finite; expected an earlier --from N"
        if not self._config.until:
            what = f"step {self._config.step} did not come"
        raise ReplayError(
            f"the training has ended after step {trainer.state.step}: {what}"
        ).on_all_ranks()

    # --- inside -------------------------------------------------------------------

    def _is_of_run(self, reader: CheckpointReader) -> bool:
        """Whether a checkpoint is of the run itself, not what it began from."""
        return bool(reader.metadata["run"] == self._request.run_id)

    def _prepare(self, trainer: Trainer) -> None:
        """Watch the next step, if it may be the one."""
        config, number = self._config, trainer.state.step + 1
        if self._watch is not None:  # of the stage before, which had no step more
            self._watch.close()
            self._watch = None
        if config.hashes and self._hashes is None:
            self._hashes = StepHashes()
        first = config.step or 0
        if not (number >= first if config.until else number == first):
            return
        self._norms = LayerNorms() if config.layers else None
        observers = [it.observe for it in (self._norms, self._hashes) if it is not None]

        def observe(*of: Any) -> None:
            for it in observers:
                it(*of)

        optimizer = trainer.engine.optimizer
        self._scale = optimizer.scale.value
        # A step that is not finite is not applied, but for the first of several passes.
        is_kept = not config.until or len(optimizer.names) > 1
        if is_kept and (config.save or config.layers):
            self._weights = trainer.engine.strategy.full_state_dict()
        self._watch = StepWatch(
            trainer,
            observe if observers else None,
            lambda number, batch: self._stop_at(trainer, number, batch),
            keeps=lambda *of: config.save is not None and self._is_chosen(*of),
        ).open()

    def _stop_at(self, trainer: Trainer, number: int, batch: Batch) -> None:
        """Start the debugger; ``model``, ``batch`` and ``trainer`` are at hand."""
        is_due = self._config.pdb and self._is_chosen(number, batch.indices.tolist())
        if is_due and (not self._config.until or bad_samples(batch)):
            model = trainer.engine.strategy.model
            step = trainer.state.step + 1
            say(f"step {step}, micro-batch {number}: `model`, `batch`, `trainer`")
            if Job.current is not None:  # a person takes their time
                Job.current.watchdog.hang_timeout_seconds = 0.0
            _Debugger().set_trace()
            del model  # not before: it is for the person

    def _is_chosen(self, number: int, samples: Sequence[int]) -> bool:
        config = self._config
        return config.micro_batch in (None, number) and (
            config.sample is None or config.sample in samples
        )

    def _end(
        self, trainer: Trainer, seen: list[MicroBatchSeen], *, is_skipped: bool
    ) -> None:
        """Tell of the step, and end the process. Collective."""
        trainer.sync_metrics()  # compares it
        engine, config = trainer.engine, self._config
        ranks, world = engine.ranks, engine.world
        weights = self._weights
        # On every rank, for rank zero: with fsdp this is collective.
        if not weights and (config.save or config.layers):
            weights = engine.strategy.full_state_dict()  # the step was not applied
        if self._hashes is not None and config.hashes is not None:
            after = engine.strategy.full_state_dict()
            self._hashes.end(trainer.state.step, after, config.hashes)
        squares = self._norms.squares() if self._norms is not None else {}
        of_ranks = ranks.gather((seen, squares))
        if world.is_rank_zero:
            whole = [it for found, _ in of_ranks for it in found]
            chosen = [it for it in whole if self._is_chosen(it.number, it.samples)]
            step, compared = trainer.state.step, self._compared
            for line in step_lines(
                chosen, step, compared, config, is_skipped=is_skipped
            ):
                say(line)
            if config.layers:
                for line in layer_lines([it for _, it in of_ranks], weights):
                    say(line)
            if config.save is not None:
                _save(config, trainer, weights, chosen)
        # All end with one status.
        error = ranks.on_rank_zero(
            lambda: self._compared.difference, "compare the losses"
        )
        _leave(ReplayError(error).on_all_ranks() if error else None)


class _Debugger(pdb.Pdb):
    """Python's, but who quits it has seen enough: it ends the replay."""

    def do_quit(self, arg: str) -> None:
        """End the process."""
        del arg
        _leave(None)

    do_q = do_exit = do_EOF = do_quit


def _leave(error: MpitrainError | None) -> NoReturn:
    """End this process with all ranks, here: what follows `fit` in a script is not run.

    It might save the model, which is one of the middle of the training.
    """
    job = Job.current
    assert job is not None
    sys.stdout.flush()
    if error is not None:
        job.guard.fail(error)  # returns in a world of one, and says nothing
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        exit_now(error.exit_status)
    job.close()
    exit_now(0)


def _own(callback: Callback) -> Sequence[type]:
    """Return the classes of a callback, but for the base of all."""
    return [it for it in type(callback).__mro__ if it not in (Callback, object)]


def _save(
    config: ReplayConfig,
    trainer: Trainer,
    weights: Mapping[str, Any],
    seen: Sequence[MicroBatchSeen],
) -> None:
    """Write the file of ``--save``; on rank zero."""
    assert config.save is not None
    micro_batches = [
        {
            "rank": it.rank,
            "micro_batch": it.number,
            "samples": it.samples,
            "losses": it.losses,
            "inputs": it.inputs,
            "targets": it.targets,
        }
        for it in seen
    ]
    values = {
        "step": trainer.state.step,
        "epoch": trainer.state.epoch,
        "model": dict(weights),
        "micro_batches": micro_batches,
    }
    with replacing(config.save) as beside:
        torch.save(values, beside)
    say(f"{shown(config.save)}: weights and {len(micro_batches)} micro-batches")


def run_replay(
    read: Callable[[], ReplayConfig], words: Sequence[str], start_timeout_seconds: float
) -> int:
    """Replay on all ranks; return the exit status. Collective.

    Args:
        read: Reads the flags, on rank zero.
        words: What follows ``--``: flags of a training, or ``run script.py ARGS``.
        start_timeout_seconds: Of a stage of the start.
    """
    job = start_job(start_timeout_seconds=start_timeout_seconds)
    with job.guard:
        with job.start_step("read the run"):
            request = on_rank_zero(
                job.comm, lambda: read_request(read(), words), "read the run"
            )
        replay = Replay(request)
        job.replace_callbacks, job.is_replay = replay.replace_callbacks, True
        training = request.training
        if training is None:
            asked = read_on_all_ranks(job.comm, words[1:])
            run_script.run(job, asked, os.environ)
        else:
            with init(**training.launch.as_arguments(), job=job) as world:
                is_new, run = request.checkpoint is None, request.config.run
                trainer, *_ = build_trainer(training, world, run, with_weights=is_new)
                trainer.fit()
        if not replay.is_used:
            raise UsageError(
                f"{request.config.run} was not replayed: no Trainer of the script has "
                "trained"
            ).on_all_ranks()
    return 0

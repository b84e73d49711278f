"""The callbacks of a run: those that the command line has, also for a script."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.config import CheckpointConfig, LogConfig, TrainConfig
from mpitrain.console import say, shown
from mpitrain.errors import UsageError, did_you_mean
from mpitrain.files import replacing, write_atomic, write_json
from mpitrain.launch.job import heartbeat
from mpitrain.models.state_dict_file import write_state_dict
from mpitrain.models.summary import summary_line, summary_table
from mpitrain.record.cost import Costs
from mpitrain.record.environment import describe, node_lines
from mpitrain.record.fingerprints import Fingerprints
from mpitrain.record.health import HealthCheck
from mpitrain.record.loggers.callback import Loggers
from mpitrain.record.profiler import Profiler
from mpitrain.record.rank_times import RankTimes
from mpitrain.record.recorder import Recorder
from mpitrain.settings import facts_of
from mpitrain.train.callbacks import Callback
from mpitrain.train.early_stopping import EarlyStopping
from mpitrain.train.progress import choose_progress
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


def default_callbacks(
    run_dir: str | Path, config: TrainConfig | None = None, **settings: Any
) -> list[Callback]:
    """Return the callbacks of the command line, for a script of your own.

        callbacks = mpitrain.default_callbacks("runs/mine", log=["wandb"], profile=10)
        mpitrain.Trainer(model, train_data, val_data, callbacks=callbacks).fit()

    The run has all that one of the command line has: checkpoints, from which the same
    script resumes, the record, times of ranks, loggers, health warnings, epoch lines
    and ``model.pt``. Add others: ``[*default_callbacks(...), Mine()]``.

    Args:
        run_dir: The run folder, on a file system that all nodes share.
        config: Where the settings below are, if not here; such as the trainer's.
        **settings: Fields of a `TrainConfig` that are about checkpoints, loggers, the
            profiler and the progress, such as ``checkpoint_every_steps``, ``best_by``,
            ``early_stopping``, ``log`` or ``progress``.

    Raises:
        UsageError: There is no such setting.
    """
    for name in settings:
        if name not in SETTINGS:
            raise UsageError(
                f"default_callbacks({name}=...): there is no such setting."
                f"{did_you_mean(name, SETTINGS)} Expected {', '.join(SETTINGS)}"
            )
    if type(log := settings.get("log")) is str:
        settings["log"] = (log,)
    if type(settings.get("time_limit")) in (int, float):
        settings["time_limit"] = str(settings["time_limit"])
    values: dict[str, Any] = {
        k: tuple(v) if type(v) is list else v for k, v in settings.items()
    }
    # With a config, `SETTINGS` have an effect: `Trainer` names none of them as ignored.
    used, run_dir = SETTINGS if config else (), Path(run_dir)
    if not run_dir.name:
        raise UsageError(f"run_dir {str(run_dir)!r}: expected one such as runs/mine")
    try:
        config = replace(config or TrainConfig(), **values)
        checkpointer = make_checkpointer(config, run_dir, time_limit=config.time_limit)
        stopping = early_stopping(config)
    except TypeError as error:
        given = ", ".join(f"{name}={it!r}" for name, it in settings.items())
        raise UsageError(
            f"default_callbacks({given}): a value is of a wrong type: {error}"
        ) from None
    if config.dry_run:  # writes nothing
        return [choose_progress(config.progress, lambda: None)]
    recorder = Recorder(run_dir, seconds_left=checkpointer.seconds_left)
    effective = {name: getattr(config, name) for name in SETTINGS}
    summary = RunSummary(run_dir, settings=effective)
    summary.uses_settings = used
    return [
        *callbacks_of_run(config, recorder, summary, checkpointer.seconds_left),
        *stopping,
        checkpointer,
    ]


SETTINGS = tuple(
    name
    for name in (
        *(it.name for kind in (LogConfig, CheckpointConfig) for it in fields(kind)),
        "progress",
    )
    if name != "new_run"  # the script names the folder
)


def make_checkpointer(
    config: CheckpointConfig, run_dir: Path, *, time_limit: str | None = None
) -> Checkpointer:
    """Make the checkpointer that a configuration asks for."""
    return Checkpointer(
        run_dir,
        every_epochs=config.checkpoint_every_epochs,
        every_steps=config.checkpoint_every_steps,
        every_minutes=config.checkpoint_every_minutes,
        keep=config.keep_checkpoints,
        memory=config.checkpoint_memory,
        best_by=config.best_by,
        resume=config.resume,
        time_limit=time_limit,
    )


def early_stopping(config: CheckpointConfig) -> list[Callback]:
    """Return the callback that a configuration asks for, if it does."""
    patience = config.early_stopping
    return [EarlyStopping(config.best_by, patience=patience)] if patience else []


def callbacks_of_run(
    config: TrainConfig,
    recorder: Recorder,
    summary: RunSummary,
    seconds_left: Callable[[], float | None],
    *,
    run_id: str | None = None,
    start_seconds: float | None = None,
) -> list[Callback]:
    """Return what the command and scripts have, but for the checkpointer."""
    run_dir = recorder.run_dir
    of_log = {it.name: getattr(config, it.name) for it in fields(LogConfig)}
    return [
        recorder,
        summary,
        RankTimes(run_dir, start_seconds),
        *([Loggers(run_dir, run_id=run_id, **of_log)] if config.log else []),
        Costs(run_dir),
        HealthCheck(run_dir),
        choose_progress(config.progress, seconds_left),
        Fingerprints(run_dir, config.fingerprint),
        *([Profiler(run_dir, config.profile)] if config.profile else []),
        ModelFile(run_dir / "model.pt"),
    ]


class ModelFile(Callback):
    """Saves the finished model's plain ``state_dict``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_fit_end(self, trainer: Trainer) -> None:
        """Save it, completely or not at all."""
        heartbeat("writing the weights")
        engine = trainer.engine
        values = engine.full_state()
        if not engine.world.is_rank_zero:
            dict(values)  # it is collective
            return
        with replacing(self._path) as beside:
            # Of any strategy: `torch.save` would write other bytes of the same weights.
            write_state_dict(beside, engine.model.state_dict(), values)


class RunSummary(Callback):
    """Prints what is trained on which ranks, and writes it into the run folder."""

    def __init__(
        self,
        run_dir: Path,
        what: str | None = None,
        more: str = "",
        loaded: str | None = None,
        *,
        has_own_data: bool = True,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """``what`` is trained; ``more`` of it; a line on the ``loaded`` weights.

        ``settings`` stand for those of the trainer's configuration.
        """
        self._run_dir, self._has_own_data = run_dir, has_own_data
        self._settings = settings
        self._what, self._more, self._loaded = what, more, loaded

    def on_fit_start(self, trainer: Trainer) -> None:
        """Print and write."""
        world = trainer.engine.world
        if not world.is_rank_zero:
            return
        config = replace(trainer.config, **self._settings)
        run_dir, table = self._run_dir, summary_table(trainer.engine.model)
        write_json(run_dir / "environment.json", describe(world))
        write_atomic(run_dir / "model.txt", f"{table}\n")
        if self._what is None:  # of a script
            write_atomic(run_dir / "config.yaml", _yaml_of_script(config, run_dir))
        for line in (*node_lines(world.nodes), *self._training_lines(trainer)):
            say(line)
        for setting in config.without_effect(has_own_data=self._has_own_data):
            logger.warning("has no effect here: %s", setting)
        num = trainer.engine.data.train.num_samples
        if num is not None and config.global_batch_size > num:
            logger.warning(
                "--global-batch-size %d is larger than the training set (%d samples): "
                "an epoch is one step",
                *(config.global_batch_size, num),
            )
        idle = world.world_size - config.global_batch_size
        if idle > 0:
            logger.warning(
                "--global-batch-size %d on %d ranks: %d of them have no sample in a "
                "step",
                *(config.global_batch_size, world.world_size, idle),
            )

    def _training_lines(self, trainer: Trainer) -> Sequence[str]:
        config, data, plan = trainer.config, trainer.engine.data, trainer.engine.plan
        train, *val = map(_count, data.num_samples.values())
        if config.dry_run:
            steps = "dry run: one step, one evaluation"
        elif plan.total_steps is None:
            steps = f"{plan.length} of unknown length"
        elif plan.max_steps is not None:
            steps = f"{plan.length}, of epochs of {plan.steps_per_epoch or 'unknown'}"
        else:
            steps = (
                f"{plan.total_steps} steps = {plan.num_epochs} epochs x "
                f"{plan.steps_per_epoch}"
            )
        world = trainer.engine.world
        threads = f"{world.num_threads} thread{'s' * (world.num_threads != 1)}"
        what = self._what or type(trainer.engine.model).__name__
        return [
            f"backend {world.backend}, rendezvous at {world.master_addr}:"
            f"{world.master_port}, {threads} per rank",
            f"{what}: {train} samples to train, "
            f"{' and '.join(val) or 'none'} to validate{self._more}",
            f"{summary_line(trainer.engine.model)}; {trainer.engine.strategy.name}, "
            f"{config.precision}",
            trainer.engine.strategy.batch_line(),
            steps,
            f"run folder {shown(self._run_dir)}",
            *([self._loaded] if self._loaded is not None else []),
        ]


def _yaml_of_script(config: TrainConfig, run_dir: Path) -> str:
    """Return what the script has of the flags; ``--config`` refuses the file."""
    unknown = {
        name
        for name, facts in facts_of(config).items()
        if facts.is_for_command and name not in SETTINGS
    }
    plain = config.as_plain(run_dir.name)
    found = {k: v for k, v in plain.items() if k not in unknown - {"name"}}
    return yaml.safe_dump({"script": sys.argv[0], **found}, sort_keys=False)


def _count(num_samples: int | None) -> str:
    return "unknown number of" if num_samples is None else str(num_samples)

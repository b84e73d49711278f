"""Hooks into the training loop. Imports no torch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from mpitrain.errors import UsageError, did_you_mean
from mpitrain.launch.job import Job
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput

logger = logging.getLogger("mpitrain")


class StopRequested(Exception):
    """Raised by a callback, on every rank at the same step, to stop the training.

    It can be resumed then. Raise it at the end of a step, epoch or validation batch,
    not within a step. To finish a training set ``trainer.should_stop`` instead.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Callback:
    """Base class of callbacks; inherit it, and override the hooks that you need.

    All hooks are called on every rank, at the same point of the training. They may
    communicate, except for those that say "not collective". The order is that of
    ``Trainer(callbacks=[...])``, with those that `runs_last` at the end; `on_fit_end`,
    `on_stop` and `on_exception` are called in the reverse order. ``trainer`` is the
    `mpitrain.Trainer`; read ``trainer.state`` for step and epoch. Annotate it so
    in your hooks: here it is `Any`, since the trainer's module imports this one.
    """

    runs_last: ClassVar[bool] = False
    """Whether it is called after all others: it saves their state."""

    uses_settings: Sequence[str] = ()
    """Fields of the `TrainConfig` that have effect by this callback alone."""

    def setup(self, trainer: Any) -> None:
        """Called first, before a checkpoint is loaded; model and data are ready."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called after all `setup`; not collective: an error here ends all ranks."""

    def on_stage_start(self, trainer: Any) -> None:
        """Called when ``trainer.engine.stage`` has begun: the optimizer is ready."""

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        """Called before the forward pass of each micro-batch, a `Batch`.

        Not collective where the strategy has fixed micro-batches: ranks may have
        unequal numbers of them.
        """

    def on_step_end(self, trainer: Any) -> None:
        """Called after each step, applied or skipped; its time is part of the step."""

    def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
        """Called about every two seconds, when the ranks' metrics were gathered.

        ``steps`` are those since the last call, of one epoch. ``trainer.step_times``
        holds where their time went on this rank.
        """

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        """Called when the speed of some steps is known, about every two seconds."""

    def on_images(self, trainer: Any, name: str, images: Any) -> None:
        """Called by `Trainer.log_images`, on the ranks that call it; not collective."""

    def on_validation_batch_end(self, trainer: Any) -> None:
        """Called after each batch of a validation."""

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Called after each validation, within an epoch or at its end (`is_end`).

        ``trainer.state`` is still at the epoch, whose metrics are those until now.
        """

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Called after the validation; ``trainer.state`` is at the next epoch."""

    def on_checkpoint(self, trainer: Any, checkpoint: Any) -> None:
        """Called with the `WriteResult` of a checkpoint that was written, or not."""

    def on_train_end(self, trainer: Any) -> None:
        """Called after the last epoch, before the test set is evaluated."""

    def on_test_end(self, trainer: Any, evaluation: Any, skipped: int) -> None:
        """Called after the evaluation of the test set.

        ``skipped`` counts the samples that could not be read, over all ranks.
        """

    def on_predict_end(self, trainer: Any, data: Any, num_samples: int) -> None:
        """Called at the end of `Trainer.predict`, with its data set."""

    def on_fit_end(self, trainer: Any) -> None:
        """Called at the end of a finished training."""

    def on_stop(self, trainer: Any, reason: str) -> None:
        """Called at the end of a training that was stopped and can be resumed."""

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Called when the training fails on this rank; not collective."""

    def finish_reason(self) -> str:
        """Return why it has finished the training before its end; empty if not.

        With a reason the run stays finished when it is started again; without one it
        trains on.
        """
        return ""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint has to hold of this callback; JSON can carry it.

        Rank zero's is saved, under the name of the class; all ranks get it back.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned, if that was not empty.

        Called before `on_fit_start`, when the same run is resumed.
        """

    def flush(self) -> None:
        """Write to the disk what `state_dict` refers to; in a thread of rank zero."""


class Hooks(dict[str, list[Callable[..., None]]]):
    """The hooks that callbacks override, by name, in the order of the calls.

    Raises:
        UsageError: A method ``on_...`` is none of them; on every rank.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        known = [name for name in dir(Callback) if name.startswith("on_")]
        super().__init__({name: [] for name in ("setup", *known)})
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(
                    f"found {callback!r} in callbacks=; expected objects of classes "
                    "that inherit from mpitrain.Callback"
                ).on_all_ranks()
            for name in dir(callback):
                if name.startswith("on_") and name not in known:
                    raise UsageError(
                        f"{type(callback).__name__}.{name} is no hook of "
                        f"mpitrain.Callback.{did_you_mean(name, known)} Expected "
                        f"one of {', '.join(known)}"
                    ).on_all_ranks()
            # Only what is overridden: a hook of each step is called thousands of times.
            for name, found in self.items():
                if getattr(type(callback), name) is not getattr(Callback, name):
                    found.append(_checked(callback, name))
        # `Checkpointer` runs last, so here first: in `on_stop` the others hear
        # `on_checkpoint` of its last one before they close their files.
        for name in ("on_fit_end", "on_stop", "on_exception"):
            self[name].reverse()

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        """Call the hooks of an exception; one that fails is logged."""
        for hook in self["on_exception"]:
            try:
                hook(trainer, error)
            except Exception:  # the first error is the one to report
                logger.exception("a callback's on_exception failed")


def _checked(callback: Callback, name: str) -> Callable[..., None]:
    """Return a hook, if it takes what it is called with: some are called late."""
    hook: Callable[..., None] = getattr(callback, name)
    names = [*inspect.signature(getattr(Callback, name)).parameters][1:]
    found = ""
    try:
        # Not of what a decorator wraps: that is not what is called.
        signature = inspect.signature(hook, follow_wrapped=False)
        found = str(signature)
        signature.bind(*names)
    except TypeError:
        raise UsageError(
            f"{type(callback).__name__}.{name}{found}; expected the arguments "
            f"{', '.join(names)}"
        ).on_all_ranks() from None
    except ValueError:  # written in C, without a signature
        pass
    return hook


def in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return a trainer's callbacks in the order of their calls.

    Under ``mpitrain replay`` others take their place, and a sweep adds its own: they
    cannot change the `Trainer` of a user's script before that calls `fit`.
    """
    if Job.current is not None and Job.current.replace_callbacks is not None:
        callbacks = Job.current.replace_callbacks(callbacks)
    return sorted(callbacks, key=lambda callback: callback.runs_last)


def check_state_names(callbacks: Sequence[Callback]) -> None:
    """Refuse two callbacks whose states would have one name in a checkpoint."""
    names = [
        type(callback).__name__
        for callback in callbacks
        if type(callback).state_dict is not Callback.state_dict
    ]
    if len(set(names)) < len(names):
        raise UsageError(
            f"callbacks {', '.join(sorted(names))}: found two with a state and "
            "one name; expected a class of its own for each"
        ).on_all_ranks()

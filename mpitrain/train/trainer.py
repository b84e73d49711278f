"""The training, in the order of time. `Trainer.fit` is the whole of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpitrain.data.pixels import Statistics
from mpitrain.errors import DataError, NonFiniteError, UsageError, agreed
from mpitrain.launch import init
from mpitrain.record.console import Lines
from mpitrain.record.events import Listener, Listeners, Progress
from mpitrain.record.times import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    OTHER,
    UPDATE,
    RankTimes,
)
from mpitrain.train.clock import open_clock
from mpitrain.train.config import TrainConfig
from mpitrain.train.evaluate import Evaluation, Loss, Values, per_sample_sum
from mpitrain.train.feed import Batch, Step
from mpitrain.train.first_batch import (
    WrongLabel,
    check_labels,
    explain_call,
    explain_loss,
)
from mpitrain.train.keeping import Keeper, StopWanted
from mpitrain.train.pace import PACE_SECONDS, Untold
from mpitrain.train.plan import Stage
from mpitrain.train.setup import Setup
from mpitrain.train.steps import Losses, SoFar, Steps
from mpitrain.train.strategy import settle_numerics
from mpitrain.world import World

logger = logging.getLogger("mpitrain")


class Trainer:
    """Trains a model, on one rank or many, with the same result.

    Override `loss`, `metrics` or `step`, or pass the first two.

    Args:
        model: Trained in place. Its first weights are rank zero's, on every rank.
        train_data: A `TensorDataset` of inputs and targets, or any map-style or
            iterable data set of such pairs; equal on all ranks, and shared out here.
        val_data: What the model is judged by after every epoch; likewise.
        config: What is asked. Data set, model, weights, run folder, checkpoints, time
            limit, loggers and traces in it have no effect (`fit` warns); what is done
            to images has.
        world: Where this process stands, as `mpitrain.init` tells it; ``None``: `fit`
            asks itself, and ends the job when it is done.
        loss: Instead of overriding `loss`.
        metrics: Instead of overriding `metrics`.

    Attributes:
        listener: Told of steps and epochs; ``None``: a line per epoch is printed.
        each_step: Told its number when a step is over; they cost their time in each.
        progress: Told of every batch of an evaluation; steps tell it by themselves.
            Where you called `mpitrain.init` with a hang timeout: its `Job.progress`.
        statistics: Mean and deviation to take off images, by channel, from 0 to 1.
        num_classes: Of the data set, which a model must have as many outputs for;
            ``None``: not known.
        all_weights_used: Whether all are known to take part in each loss, in one order.
        keeper: Writes checkpoints and stops in time; ``None``: nobody does.
        times: Writes down where its time goes, from `set_up` on; ``None``: nobody.
        pace_seconds: How many seconds of steps a pace tells of, at least; see `meet`.
        clock: What this rank does at present, and what it has done; from `set_up` on.
        look: Shown the batch of every microstep on this rank, until it returns true.
        so_far: How far the training has come.
    """

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        val_data: Any,
        config: TrainConfig | None = None,
        *,
        world: World | None = None,
        loss: Loss | None = None,
        metrics: Values | None = None,
    ) -> None:
        self.model = model
        self.train_data = train_data
        self.val_data = val_data
        self.config = config or TrainConfig()
        self.world = world
        self._starts_ranks = world is None
        self._state: dict[str, Any] = {}  # kept where the ranks end with `fit`
        self._is_ready = False
        self.listener: Listener | None = None
        self.each_step: list[Callable[[int], object]] = []
        self.progress: Progress = lambda _: None
        self.statistics: Statistics | None = None
        self.num_classes: int | None = None
        self.all_weights_used = False
        self.keeper: Keeper | None = None
        self.times: RankTimes | None = None
        self.pace_seconds = PACE_SECONDS
        self.look: Callable[[Batch], bool] | None = None
        self.so_far = SoFar()
        self._loss, self._metrics = loss, metrics
        self._unseen = {True, False}  # training and validation, by the default loss

    # --- what may be overridden ---------------------------------------------------

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each sample; cross-entropy if not overridden.

        Args:
            outputs: The model's, `(N, num_classes)`.
            targets: Labels int64 `(N,)`.

        Returns:
            `(N,)`; `(N, ...)`, whose rows are averaged; or a scalar, taken for the mean
            of the samples: exact only where each of them weighs the same.
        """
        if self._loss is not None:
            return self._loss(outputs, targets)
        is_training = torch.is_grad_enabled()
        if is_training in self._unseen:
            self._unseen.remove(is_training)
            check_labels(outputs, targets, self.num_classes)
        smoothing = self.config.label_smoothing if is_training else 0.0
        try:
            if outputs.dtype.itemsize == 2:
                outputs = outputs.float()
            return F.cross_entropy(
                outputs, targets, reduction="none", label_smoothing=smoothing
            )
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            explain_loss(outputs, targets)
            raise

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Return what else is told of the validation; accuracy if not overridden.

        Args:
            outputs: The model's.
            targets: Likewise.

        Returns:
            Values by name, each like `loss` returns them.
        """
        if self._metrics is not None:
            return self._metrics(outputs, targets)
        if self._loss is None and type(self).loss is Trainer.loss:
            return {"accuracy": (outputs.argmax(dim=1) == targets).double()}
        return {}

    def step(self, batch: Batch) -> Tensor:
        """Return the loss of each sample of a microstep; gradients flow from it.

        Args:
            batch: Its samples, on this rank's device.
        """
        mix = self.setup.mix_of(*self._at, batch.inputs)
        if mix is None:
            return self.loss(self.forward(batch.inputs), batch.targets)
        outputs = self.forward(mix.apply(batch.inputs))
        own = self.loss(outputs, batch.targets[1:])
        partners = self.loss(outputs, batch.targets[:-1])
        return mix.share * own + (1 - mix.share) * partners

    @property
    def has_plain_step(self) -> bool:
        """Whether a step is ours: one call of the model with the inputs."""
        return type(self).step is Trainer.step

    def forward(self, inputs: Any) -> Any:
        """Call the model in a `step`; `model` itself would not let gradients meet.

        Spread over the ranks, and in the precision asked for. Collective over all
        ranks: each calls it as often.

        Args:
            inputs: What the model takes.
        """
        try:
            return self.setup.replica.forward(inputs)
        except Exception as error:
            explain_call(self.model, inputs, error)
            raise

    # --- the training -------------------------------------------------------------

    def fit(self) -> Evaluation:
        """Train.

        Collective over all ranks.

        Returns:
            How good the model is at the end; equal on all ranks.

        Raises:
            UsageError, DataError, NonFiniteError: On every rank; `keeper`'s `Stopped`.
        """
        if self._starts_ranks:
            job = init(**self.config.launch.as_arguments())
            with job as self.world:
                self.progress = job.progress
                result = self._fit()
                self._state = self.setup.whole_state()
                return result
        return self._fit()

    def _fit(self) -> Evaluation:
        if not self._is_ready:  # a script: the command line sets up by itself
            assert self.world is not None
            ignored = self.config.only_for_command()
            if ignored and self.world.is_rank_zero:
                logger.warning(
                    "Trainer ignores %s of its TrainConfig: only `python -m mpitrain` "
                    "uses them for now",
                    ", ".join(ignored),
                )
            self.set_up()
        keeper, setup = self.keeper, self.setup
        if keeper:
            self.so_far = keeper.restore()
        try:
            for stage in setup.plan.stages_left(self.so_far.epoch):
                setup.begin(stage)
                self._steps.begin_anew()
                if keeper:
                    keeper.begin(stage)
                while self.so_far.epoch < stage.epochs.stop:
                    self.train_epoch(stage)
            self.meet(tell_all=True)
            if keeper:
                self.clock.enter(CHECKPOINT)
                keeper.finish()
        except StopWanted as wanted:
            assert keeper
            self.clock.enter(CHECKPOINT)
            try:
                keeper.stop(wanted.reason)
            finally:
                self.clock.close()
        finally:
            self.clock.follow([])
        self.clock.close()
        setup.close()
        self._is_ready = False
        found = self.so_far
        return Evaluation(values=found.values, num_samples=found.val_samples)

    def set_up(self) -> Setup:
        """Make ready for `fit`, which else does it; `world` must be known.

        Collective over all ranks.
        """
        assert self.world is not None
        settle_numerics(self.config, os.environ)
        self.setup = Setup(self, self.world)
        self.so_far = SoFar()
        self.clock = open_clock(self.world.device)
        if self.times is not None:
            self.times.clock = self.clock
        device, gpu_bytes = self.world.device, self.setup.gpu_bytes
        self._steps = Steps(Untold(self.clock, self.times, device, gpu_bytes))
        self._began = time.perf_counter()
        self._is_ready = True
        own = Lines(self.setup.plan.num_epochs) if self.world.is_rank_zero else None
        self._heard = Listeners(own if self.listener is None else self.listener)
        return self.setup

    def train_epoch(self, stage: Stage) -> None:
        """Train on every sample that is left of an epoch, then evaluate.

        Collective over all ranks.
        """
        so_far, setup, keeper = self.so_far, self.setup, self.keeper
        epoch, updater, clock = so_far.epoch, setup.updater, self.clock
        setup.train_mode()
        clock.follow(setup.replica.sure_weights)
        clock.end(is_step=False, then=DATA)
        self._began = time.perf_counter()
        for step in setup.steps_of(so_far):
            self._at = epoch, step.number
            rate = setup.plan.learning_rate(stage, epoch, step.number)
            updater.set_learning_rate(rate)
            updater.begin_step()
            losses = self.accumulate_gradient(step)
            clock.enter(UPDATE)
            is_applied, norm = updater.update()
            if not is_applied:
                self._judge(losses, norm)
            so_far.num_steps += 1
            so_far.epoch_steps = step.number + 1
            self._steps.add(losses, rate, norm, is_applied=is_applied)
            for tell in self.each_step:
                tell(so_far.num_steps)
            clock.end(is_step=True, then=DATA)
            if keeper:
                keeper.after_step()
            if self._steps.are_due:
                clock.enter(OTHER)
                self.meet()
                clock.enter(DATA)
        clock.enter(OTHER)
        self.meet()
        clock.enter(EVALUATION)
        if not so_far.epoch_steps:
            raise agreed(DataError("none of the samples to train on could be read"))
        result = setup.evaluate(setup.val_feed, self.values, self._progress_or_stop)
        so_far.skipped_samples += setup.count_skipped()
        so_far.values, so_far.val_samples = dict(result.values), result.num_samples
        seconds = time.perf_counter() - self._began
        self._heard.epoch_done(so_far.as_epoch(stage.name, seconds))
        so_far.begin_epoch(epoch + 1)
        goodness = result.goodness(self.config.best_by)
        if keeper:
            keeper.after_epoch(epoch, goodness)
        clock.enter(OTHER)

    def meet(self, *, tell_all: bool = False) -> None:
        """Add up what the ranks' steps came to, since the last call, and tell it.

        Collective over all ranks.

        Args:
            tell_all: Also how fast they were, though it be few seconds of steps.
        """
        self.clock.settle()
        so_far, setup = self.so_far, self.setup
        num_steps, seconds = len(self._steps), time.perf_counter() - self._began
        rows = self._steps.meet(so_far, seconds, is_heard=bool(self._heard))
        so_far.skipped_steps += setup.watch.take_skipped()
        so_far.skipped_samples += setup.count_skipped()
        if so_far.epoch_steps:
            taken = zip_longest(so_far.taken, setup.count_taken(), fillvalue=0)
            so_far.taken = list(map(sum, taken))
        if num_steps:  # what is between two epochs is no time of steps
            self._began += seconds
            so_far.steps_seconds += seconds
            self._heard.rows_done(rows)
        self._steps.untold.tell(self._heard, 0.0 if tell_all else self.pace_seconds)

    def _judge(self, losses: list[Losses], norm: float) -> None:
        """Let a step that was not applied be skipped, or end the training.

        Raises:
            NonFiniteError: On every rank; what the steps before came to is told.
        """
        setup, so_far = self.setup, self.so_far
        scale, step = setup.updater.scale, so_far.num_steps + 1
        try:
            setup.watch.judge(losses, norm, scale, step, so_far.epoch)
        except NonFiniteError:
            self.meet(tell_all=True)
            raise

    def _progress_or_stop(self, phase: str) -> None:
        self.progress(phase)
        if self.keeper:
            self.keeper.after_evaluation_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return the model's plain ``state_dict``, on the CPU; of use on rank zero.

        Collective over all ranks. Whole where weights are sharded; their average where
        one is kept.
        """
        return self._state or self.setup.whole_state()

    def evaluate(self) -> Evaluation:
        """Judge the model, or the average of its weights, on the validation data.

        Collective over all ranks; a `UsageError` where `fit` started and ended them.
        """
        if self._state:
            raise UsageError(
                "fit() has ended its ranks; expected a world= from mpitrain.init()"
            )
        return self.setup.evaluate(self.setup.val_feed, self.values)

    def accumulate_gradient(self, step: Step) -> list[Losses]:
        """Compute the gradient of the mean loss over one step's samples.

        Collective over the default group.

        Every sample weighs the same, whichever rank has it: each rank sums its own
        losses, and the sum is divided by the samples of all ranks. Gradients are
        averaged over ranks, so we multiply by their number (with fp16, in the update).

        Args:
            step: This rank's part of it.

        Returns:
            The loss of each microstep on this rank.
        """
        setup, clock = self.setup, self.clock
        scale = setup.updater.scale.value / step.num_samples
        found: list[Losses] = []
        for number, batch in enumerate(step.microsteps, start=1):
            if self.look is not None and self.look(batch):
                self.look = None
            is_last = number == step.num_microsteps
            if number == 1 and setup.replica.shared_buffers:
                clock.enter(COMMUNICATION)
                setup.replica.share_buffers()
            clock.enter(FORWARD)
            with setup.replica.synchronize_if(last=is_last):
                try:
                    loss = per_sample_sum(self.step(batch), len(batch))
                except WrongLabel as wrong:
                    raise wrong.named(batch.indices) from None
                found.append(Losses(batch.indices, loss.detach()))
                # scale - 0 * loss: no number makes all gradients so, on all ranks.
                gradient = torch.rsub(found[-1].total, scale, alpha=0)
                if setup.world.world_size > 1 and not clock.is_following:
                    clock.enter_when_computed(loss)
                clock.enter(BACKWARD)
                torch.autograd.backward(loss, gradient)
            if not is_last:
                clock.enter(DATA)
        return found

    def values(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Return loss and metrics by name."""
        return {"loss": self.loss(outputs, targets), **self.metrics(outputs, targets)}

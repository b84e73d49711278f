"""The training loop: `Trainer.fit`, `train_epoch`, `train_step` and `validate`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.custom import refuse_loader
from mpitrain.data.loader import Batch, RankStep
from mpitrain.data.samples import BadRow, kind_of
from mpitrain.errors import DataError, NonFiniteError, Stopped, UsageError
from mpitrain.launch.init import init
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.collectives import all_or_none, world_comm
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.task import ImageClassification
from mpitrain.tasks.image_classification.transforms import Statistics
from mpitrain.tasks.task import LossFn, MetricsFn, Model, Task
from mpitrain.train.callbacks import Callback, StopRequested, hooks_of
from mpitrain.train.checks import explain_call, warn_of_scalars
from mpitrain.train.engine import Engine
from mpitrain.train.evaluate import Evaluation, sum_over_samples
from mpitrain.train.metrics import StepMetrics, TrainState
from mpitrain.train.nonfinite import handle_nonfinite
from mpitrain.train.optimizer import NO_GRADIENT
from mpitrain.train.progress import EpochLines
from mpitrain.train.step_metrics import THROUGHPUT_SECONDS, Losses, PendingSteps
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.strategy.build import choose_strategy
from mpitrain.train.timer import StepTimes, Timer, make_timer

logger = logging.getLogger("mpitrain")


class Trainer:
    """Trains a model, on one rank or many, with the same result.

    Override `loss`, `metrics` or `compute_loss`, pass the first two, or pass a `Task`.

    Args:
        model: Trained in place. All ranks start with rank zero's weights.
        train_data: A `TensorDataset` of inputs and targets, or any map-style or
            iterable data set of such pairs; the same on all ranks, sharded here.
        val_data: The data set that is evaluated after every epoch; likewise.
        config: The configuration. The fields that name a data set, a model, a run
            folder, checkpoints or loggers have no effect here, and `fit` warns about
            them: pass objects and callbacks.
        world: What `mpitrain.init` returned; ``None``: `fit` calls it, and ends the job
            when it is done.
        loss: Instead of overriding `loss`.
        metrics: Instead of overriding `metrics`.
        task: What a step computes; ``None``: `ImageClassification` of ``mean_std`` and
            ``num_classes``, which takes pairs of any inputs and labels.
        callbacks: Called in this order; ``None``: print a line per epoch.
        strategy: Instead of that of the configuration; a class, see `Strategy`.
        test_data: A data set that is evaluated when the training has finished.
        mean_std: Mean and standard deviation per channel, in the range 0 to 1, to
            normalize uint8 images `(N, C, H, W)` by; ``None``: inputs are left alone.
        num_classes: Of the data set, to check the number of the model's outputs.
        find_unused_parameters: Whether a weight may take no part in a loss. ``False``
            is faster with DDP, and an error where one does not.

    Attributes:
        state: The `TrainState`: step, epoch, samples, metrics.
        engine: Data, plan, parallelized model and optimizer, from `set_up` on.
        timer: Measures where this rank's time goes, from `set_up` on.
        step_times: Where the time of the last steps went; for `Callback.on_metrics`.
        micro_batch_losses: The sum of losses of each micro-batch of the last steps, if
            the strategy has fixed ones; for `Callback.on_metrics`.
        resumed_from: Name of the checkpoint that was loaded; empty without one.
        best_by: The metric of the best checkpoint; `Checkpointer` sets it.
    """

    engine: Engine
    timer: Timer
    step_times: StepTimes

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        val_data: Any,
        config: TrainConfig | None = None,
        *,
        world: World | None = None,
        loss: LossFn | None = None,
        metrics: MetricsFn | None = None,
        task: Task | None = None,
        callbacks: Sequence[Callback] | None = None,
        strategy: type[Strategy] | None = None,
        test_data: Any = None,
        mean_std: Statistics | None = None,
        num_classes: int | None = None,
        find_unused_parameters: bool = True,
    ) -> None:
        self.model = model
        self.train_data, self.val_data, self.test_data = train_data, val_data, test_data
        self.config = config or TrainConfig()
        self.world = world
        if task is not None and (mean_std or num_classes):
            raise UsageError(
                "mean_std and num_classes are ImageClassification's; expected them as "
                "arguments of the task, or no task"
            )
        self._has_default_task = task is None
        self.task = task or ImageClassification(mean_std, num_classes)
        Task.bind(self.task, self)
        self.find_unused_parameters = find_unused_parameters
        self.callbacks = [EpochLines()] if callbacks is None else list(callbacks)
        self.callbacks.sort(key=lambda callback: callback.runs_last)
        self.state = TrainState()
        self.micro_batch_losses: list[list[float]] = []
        self.throughput_seconds = THROUGHPUT_SECONDS
        self.resumed_from = ""
        self.best_by: str | None = None
        self._owns_job = world is None
        self.uses_whole_config = False  # the command makes callbacks of all its fields
        self._final_state: dict[str, Any] | None = None  # if the job ends with `fit`
        self._is_set_up = self._is_task_step = False
        self._loss, self._metrics, self._strategy = loss, metrics, strategy
        self._warned_of: set[str] = set()  # losses and metrics that are scalars
        self._hooks: dict[str, list[Callable[..., None]]] = {}

    # --- the loop -----------------------------------------------------------------

    def fit(self) -> Evaluation:
        """Train. Collective over all ranks.

        Returns:
            The last validation; equal on all ranks.

        Raises:
            UsageError, DataError, NonFiniteError: On every rank. A UsageError about
                trained weights that changed: on each rank that finds it; do not catch
                it, so that it ends the job.
            Stopped: A callback stopped the training, which can be resumed; on every
                rank.
        """
        with self._job(), self._set_up_once() as engine:
            try:
                for stage in engine.plan.stages_from(self.state.epoch):
                    engine.start_stage(stage)
                    self._pending.reset_interval()
                    self.call("on_stage_start")
                    while self.state.epoch < stage.epochs.stop:
                        self.train_epoch()
                        self.validate()
                self.sync_metrics(flush=True)
                self.call("on_train_end")
                if self.test_data is not None:
                    self.test(self.test_data)
                self.call("on_fit_end")
            except StopRequested as request:
                self.timer.reset()
                self.call("on_stop", request.reason)
                reason = f"stopped at step {self.state.step}: {request.reason}"
                raise Stopped(reason).on_all_ranks() from None
        state = self.state
        return Evaluation(values=state.metrics, num_samples=state.val_samples)

    def train_epoch(self) -> None:
        """Train on the samples that are left of the epoch. Collective."""
        self.engine.train_mode()
        self.timer.end_step(is_step=False)
        self._synced_at = time.perf_counter()
        with self.timer("data"):  # the spans inside take their own time
            for step in self.engine.data.steps(self.state, self.engine.strategy):
                self.train_step(step)
                if self._pending.is_sync_due:
                    self.sync_metrics()
        self.sync_metrics()
        if not self.state.epoch_step:
            error = DataError("none of the samples to train on could be read")
            raise error.on_all_ranks()

    def train_step(self, step: RankStep) -> None:
        """Train on one global batch. Collective.

        Every sample weighs the same, whichever rank has it: each rank sums the losses
        of its samples, and divides by the samples of all ranks. `LossScale` makes up
        for the average over ranks that DDP and FSDP take of gradients.
        """
        engine, state, timer = self.engine, self.state, self.timer
        optimizer, strategy = engine.optimizer, engine.strategy
        lr = engine.plan.learning_rate(engine.stage, state.epoch, step.number)
        scale = engine.begin_step(lr, step.num_samples)
        losses: list[Losses] = []
        if strategy.communicates_before_step:
            with timer("communication"):
                strategy.begin_step(state.epoch, step.number, step.num_samples)
        for batch in step.micro_batches:
            is_last = len(losses) + 1 == step.num_micro_batches
            with strategy.micro_batch(is_last=is_last), engine.norm_statistics(batch):
                batch.epoch, batch.step = state.epoch, step.number
                self.call("on_batch_start", batch)
                with timer("forward"):
                    loss = self._sum_of_losses(batch)
                number = strategy.micro_batch_number
                losses.append(Losses(batch.indices, loss.detach(), number))
                if strategy.reduces_in_backward and engine.world.world_size > 1:
                    timer.mark_gradients(loss)
                # scale - 0 * loss: the scale, or NaN where the loss is not finite. A
                # gradient may be finite where its loss is not. The NaN reaches all
                # ranks by the all-reduce: they skip the step without another one.
                factor = torch.rsub(losses[-1].total, scale, alpha=0)
                with timer("backward"):
                    # Not backward(loss, factor): it imports SymPy (torch 2.14).
                    torch.autograd.backward(loss * factor)
        if strategy.communicates_after_step:
            with timer("communication"):
                strategy.reduce_gradients()
        with timer("update"):
            grad_norm, is_applied = optimizer.step()
        if not is_applied:
            self._handle_nonfinite(losses, grad_norm)
        state.step += 1
        state.epoch_step = step.number + 1
        lrs = [float(group["lr"]) for group in optimizer.optimizer.param_groups]
        self._pending.add(losses, lrs, grad_norm, is_applied=is_applied)
        timer.end_step()
        if self._hooks["on_step_end"]:
            with timer("other"):
                self.call("on_step_end")

    def validate(self) -> None:
        """Evaluate the model at the end of an epoch, and begin the next. Collective."""
        engine, state = self.engine, self.state
        began = time.perf_counter()
        with self.timer("evaluation"):
            found = engine.evaluate(
                engine.data.val_loader,
                self.validation_step,
                lambda: self.call("on_validation_batch_end"),
            )
        state.skipped_samples += engine.data.take_skipped()
        state.metrics, state.val_samples = dict(found.values), found.num_samples
        epoch = state.end_epoch(engine.stage.name, time.perf_counter() - began)
        self.call("on_epoch_end", epoch)

    def sync_metrics(self, *, flush: bool = False) -> None:
        """Gather the metrics of the steps since the last call, and report them.

        Collective over all ranks; callbacks may call it, such as before a checkpoint.

        Args:
            flush: Report the throughput, however few seconds of steps it covers.
        """
        state, engine = self.state, self.engine
        with self.timer("other"):
            steps: list[StepMetrics] = []
            if len(self._pending):
                self.step_times = self.timer.take()
                seconds = time.perf_counter() - self._synced_at
                steps = self._pending.sync(state, seconds, self.step_times.steps)
                self.micro_batch_losses = self._pending.micro_batch_losses
                engine.strategy.rebalance(self._pending.micro_batch_seconds)
            state.skipped_samples += engine.data.take_skipped()
            if state.epoch_step:
                counts = engine.data.take_samples_per_shard()
                pairs = zip_longest(state.samples_per_shard, counts, fillvalue=0)
                state.samples_per_shard = [sum(pair) for pair in pairs]
            if steps:  # the time between two epochs is no time of steps
                self._synced_at += seconds
                state.steps_seconds += seconds
                self.call("on_metrics", steps)
            throughput = self._pending.take_throughput(
                0.0 if flush else self.throughput_seconds
            )
            if throughput is not None:
                self.call("on_throughput", throughput)

    def test(self, data: Any) -> Evaluation:
        """Evaluate the model on a test set, and report it. Collective over all ranks.

        Args:
            data: As `val_data`.
        """
        self._check_ranks()
        engine = self.engine
        with self.timer("evaluation"):
            loader = engine.data.test_loader(data, engine.strategy)
            found = engine.evaluate(loader, self.validation_step)
        self.call("on_test_end", found, self.engine.data.take_skipped())
        return found

    # --- what may be overridden ---------------------------------------------------

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each sample; the task's if not overridden.

        Args:
            outputs: Of the model, for N rows; with `ImageClassification` `(N, C)`.
            targets: Of the data set; with `ImageClassification` labels, int64 `(N,)`,
                or probabilities, `(N, C)`.

        Returns:
            `(N,)`; `(N, ...)`, averaged per sample; or a scalar, the mean over the
            samples: exact only where each sample has the same weight in it.
        """
        if self._loss is not None:
            return self._loss(outputs, targets)
        return type(self.task).loss(self.task, outputs, targets)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Tensor]:
        """Return the other metrics of the validation; the task's if not overridden.

        With a loss that is not the built-in task's there is no accuracy either.

        Args:
            outputs: Of the model, for one or more samples.
            targets: Of the data set.

        Returns:
            Values by name, each as `loss` returns them. Not collective: a rank without
            samples does not call it, nor `loss`.
        """
        if self._metrics is not None:
            return self._metrics(outputs, targets)
        has_other_loss = self._loss is not None or type(self).loss is not Trainer.loss
        if has_other_loss and self._has_default_task:
            return {}
        return type(self.task).metrics(self.task, outputs, targets)

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss of each sample of a micro-batch, for the backward pass.

        Args:
            batch: Inputs and targets, on this rank's device.
        """
        self._is_task_step = True
        return self.task.training_step(self.forward, batch)

    def validation_step(self, model: Model, batch: Batch) -> Mapping[str, Tensor]:
        """Return the metrics of a batch; see `Task.validation_step`."""
        values = self.task.validation_step(model, batch)
        return warn_of_scalars(values, self._warned_of)

    def forward(self, inputs: Any) -> Any:
        """Call the parallelized model in `compute_loss`, in the configured precision.

        Not `model` itself, whose gradients would not be all-reduced. Collective: each
        rank calls it as often; not with fixed micro-batches and ``ddp``, where ranks
        may have unequal numbers of them.
        """
        try:
            return self.engine.strategy.forward(inputs)
        except Exception as error:
            explain_call(self.model, inputs, error)
            raise

    # --- results ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plain ``state_dict`` on the CPU; complete on rank zero only.

        Collective over all ranks. Unsharded; with EMA, of the averages.
        """
        if self._final_state is not None:
            return self._final_state
        return self.engine.full_state_dict()

    def evaluate(self) -> Evaluation:
        """Evaluate the model, or its EMA, on the validation data.

        Collective over all ranks.

        Raises:
            UsageError: `fit` started the job and has ended it.
        """
        self._check_ranks()
        engine = self.engine
        return engine.evaluate(engine.data.val_loader, self.validation_step)

    def _check_ranks(self) -> None:
        if not hasattr(self, "engine") or not hasattr(self.engine.data, "val_loader"):
            raise UsageError("nothing to evaluate yet; expected a call of fit() before")
        if self._final_state is not None:
            raise UsageError(
                "fit() has ended its ranks; expected a world= from mpitrain.init()"
            )

    # --- the parts of `fit` ---------------------------------------------------------

    def set_up(self) -> Engine:
        """Prepare data and model, which `fit` else does; `world` must be known.

        Collective over all ranks.
        """
        assert self.world is not None
        kind = choose_strategy(self.config, self.world, self._strategy)
        strategy = kind(self.config, self.world)
        strategy.configure_torch()
        refuse_loader(self.test_data, "the test data")
        self.engine = Engine(
            self.model,
            self.train_data,
            self.val_data,
            self.config,
            self.world,
            self.task,
            strategy,
            find_unused_parameters=self.find_unused_parameters,
            can_cache_features=type(self).compute_loss is Trainer.compute_loss,
        )
        self._final_state = None
        self.state = TrainState()
        self.timer = make_timer(self.world.device)
        self._pending = PendingSteps(
            self.world.device,
            strategy.micro_batch_size if strategy.micro_batches_are_fixed else None,
        )
        self._synced_at = time.perf_counter()
        self._hooks = hooks_of(self.callbacks)
        self._is_set_up = True
        return self.engine

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self._hooks[hook]:
            callback(self, *args)

    @contextlib.contextmanager
    def _job(self) -> Iterator[None]:
        """Call `mpitrain.init` in a script that has not."""
        if not self._owns_job:
            yield
            return
        with init(**self.config.launch.as_arguments()) as self.world:
            yield
            self._final_state = self.engine.full_state_dict()

    @contextlib.contextmanager
    def _set_up_once(self) -> Iterator[Engine]:
        """Set up and start the callbacks; tell them of an exception; close workers."""
        assert self.world is not None
        ignored = [] if self.uses_whole_config else self.config.only_for_command()
        if ignored and self.world.is_rank_zero:
            logger.warning(
                "Trainer ignores %s of its TrainConfig; pass callbacks such as "
                "mpitrain.Checkpointer, with arguments of their own, instead",
                ", ".join(ignored),
            )
        engine = self.engine if self._is_set_up else self.set_up()
        self._is_set_up = False
        try:
            self.call("setup")
            all_or_none(
                world_comm(), lambda: self.call("on_fit_start"), "start callbacks"
            )
            yield engine
        except Stopped:
            raise
        except BaseException as error:
            for hook in self._hooks["on_exception"]:
                try:
                    hook(self, error)
                except Exception:  # the first error is the one to report
                    logger.exception("a callback's on_exception failed")
            raise
        finally:
            engine.close()

    def _sum_of_losses(self, batch: Batch) -> Tensor:
        try:
            losses = self.compute_loss(batch)
            if not isinstance(losses, Tensor) or not losses.requires_grad:
                raise DataError(f"the loss is {kind_of(losses)}: {NO_GRADIENT}")
            warn_of_scalars({"loss": losses}, self._warned_of)
            if not self._is_task_step:
                self.task.refuse_other_step()
            return sum_over_samples(losses, len(batch), batch.num_rows)
        except BadRow as bad:
            raise bad.named(batch.indices) from None

    def _handle_nonfinite(self, losses: list[Losses], grad_norm: float) -> None:
        heartbeat("a step that is not finite")  # there is no optimizer step to tell it
        try:
            handle_nonfinite(losses, grad_norm, self.state, self.engine)
        except NonFiniteError:
            self.sync_metrics(flush=True)  # report the steps before
            raise
        self.state.skipped_steps += 1

"""The training loop: `Trainer.fit`, `train_epoch`, `train_step` and `validate`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, distributed, nn

from mpitrain.config import TrainConfig
from mpitrain.data.loader import Batch, RankStep
from mpitrain.data.samples import CollateFn
from mpitrain.data.sampling import BatchSampler, Sampler, Sampling
from mpitrain.errors import DataError, Stopped, UsageError
from mpitrain.launch.init import init
from mpitrain.launch.job import current_world
from mpitrain.mpi.collectives import all_or_none, world_comm
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.task import ImageClassification
from mpitrain.tasks.image_classification.transforms import Statistics
from mpitrain.tasks.stages import Stage
from mpitrain.tasks.task import (
    DerivedFn,
    Losses,
    LossFn,
    MetricsFn,
    Model,
    Task,
    Values,
)
from mpitrain.train import checks
from mpitrain.train.callbacks import Callback, Hooks, StopRequested, in_order
from mpitrain.train.engine import Engine
from mpitrain.train.evaluate import Evaluation, validate_once
from mpitrain.train.metric_objects import split_metrics
from mpitrain.train.metrics import TrainState
from mpitrain.train.nonfinite import handle_deferred
from mpitrain.train.predict import Writer
from mpitrain.train.progress import EpochLines
from mpitrain.train.step_metrics import THROUGHPUT_SECONDS, PendingSteps, report_steps
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.strategy.build import choose_strategy
from mpitrain.train.timer import StepTimes, Timer, make_timer
from mpitrain.train.training_pass import merge_passes, train_pass


class Trainer:
    """Trains a model, on one rank or many, with the same result.

    Override `loss`, `metrics` or `compute_loss`, pass the first two, or pass a `Task`.

    Args:
        model: Trained in place. All ranks start with rank zero's weights.
        train_data: A `TensorDataset` of inputs and targets, or any map-style or
            iterable data set; the same on all ranks, sharded here.
        val_data: The data set that is evaluated after every epoch; likewise. A dict of
            several: their metrics are named ``NAME_loss``. ``None``: no validation.
        config: The configuration. The fields that name a data set, a model, a run
            folder, checkpoints or loggers have no effect here, and `fit` warns about
            them: pass objects and callbacks.
        world: What `mpitrain.init` returned; ``None``: that of this process, or else
            `fit` calls `init`, and ends the job when it is done.
        collate_fn: Makes a batch of a list of samples, as `DataLoader`'s; ``None``:
            torch's. A pair is inputs and targets; any other batch is both.
        sampler: Instead of shuffling: a function of seed and epoch that returns the
            numbers of an epoch's samples, over all ranks; or torch's, see `Sampler`.
        batch_sampler: Likewise those of each step; costs: see `BatchSampler`.
        loss: Instead of overriding `loss`; a module is moved to the rank's device.
        metrics: Instead of overriding `metrics`; or metrics by name: functions of
            outputs and targets that return values for a mean, and metric objects, see
            `Task.metric_objects`.
        derived_metrics: Instead of overriding `Task.derived_metrics`.
        optimizer: Returns the optimizer, or several, of the model that it is called
            with; see `Task.configure_optimizers`. ``None``: that of the configuration.
        scheduler: Returns its learning rate scheduler; see `Task.configure_schedulers`.
        stages: What is trained one after another, see `Stage`; ``None``: all weights.
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
        results: What metric objects returned in the last validation of `fit`, by name.
        should_stop: A callback sets it, on all ranks at the same step or validation, to
            finish the training there: the epoch ends, and `fit` returns.
    """

    engine: Engine
    timer: Timer
    step_times: StepTimes
    results: Mapping[str, Any]
    best_by: str | None

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        val_data: Any = None,
        config: TrainConfig | None = None,
        *,
        world: World | None = None,
        collate_fn: CollateFn | None = None,
        sampler: Sampler | None = None,
        batch_sampler: BatchSampler | None = None,
        loss: LossFn | None = None,
        metrics: MetricsFn | Mapping[str, Any] | None = None,
        derived_metrics: DerivedFn | None = None,
        optimizer: Callable[[nn.Module], Any] | None = None,
        scheduler: Callable[[Any, int | None], Any] | None = None,
        stages: Sequence[Stage] | None = None,
        task: Task | None = None,
        callbacks: Sequence[Callback] | None = None,
        strategy: type[Strategy] | None = None,
        test_data: Any = None,
        mean_std: Statistics | None = None,
        num_classes: int | None = None,
        find_unused_parameters: bool = True,
    ) -> None:
        self.model, self.config = model, config or TrainConfig()
        self.train_data, self.val_data, self.test_data = train_data, val_data, test_data
        if world is None and distributed.is_initialized():  # `run` has one before
            world = current_world()
        self.world = world
        self._has_default_task = task is None
        if task is not None and (mean_std or num_classes):
            raise UsageError(
                "mean_std and num_classes are ImageClassification's; expected them as "
                "arguments of the task, or no task"
            )
        self.task = task or ImageClassification(mean_std, num_classes)
        Task.bind(self.task, self, collate_fn)
        checks.check_loss(loss)
        checks.bind_functions(self.task, optimizer=optimizer, scheduler=scheduler)
        self.find_unused_parameters = find_unused_parameters
        self.callbacks = [EpochLines()] if callbacks is None else list(callbacks)
        self.state, self.results = TrainState(), {}
        self.micro_batch_losses: list[list[float]] = []
        self.throughput_seconds = THROUGHPUT_SECONDS
        self.resumed_from, self.best_by = "", None
        self.should_stop = False
        self._owns_job = world is None
        self.uses_whole_config = False  # the command makes callbacks of all its fields
        self._final_state: dict[str, Any] | None = None  # if the job ends with `fit`
        self._is_set_up = self.is_task_step = False
        self._loss, self._strategy, self.stages = loss, strategy, stages
        self._metrics = split_metrics(self.task, metrics, derived_metrics)
        self._sampling = Sampling(sampler, batch_sampler)
        self.batch: Batch | None = None  # while its loss is computed
        self.warned_of: set[Any] = set()  # losses and metrics, and their shapes
        self._hooks = Hooks()

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
                    self.pending.reset_interval()
                    self.call("on_stage_start")
                    while engine.plan.has_epoch(stage, self.state, self.should_stop):
                        self.train_epoch()
                        self.validate()
                    if self.should_stop:
                        break
                self.sync_metrics(flush=True)
                self.call("on_train_end")
                if self.test_data is not None:
                    self.test(self.test_data)
                self.call("on_fit_end")
            except StopRequested as request:
                self.timer.reset()
                self.call("on_stop", request.reason)
                where = f"stopped at step {self.state.step}"
                raise Stopped(f"{where}: {request.reason}").on_all_ranks() from None
        values, num = self.state.metrics, self.state.val_samples
        return Evaluation(values=values, num_samples=num, results=self.results)

    def train_epoch(self) -> None:
        """Train on the samples that are left of the epoch. Collective."""
        engine, state = self.engine, self.state
        self._begin_steps()
        with self.timer("data"):  # the spans inside take their own time
            for step in engine.data.steps(state, engine.strategy):
                if engine.plan.is_validation_due(state):  # of the steps before
                    validate_once(self, is_epoch_end=False)
                    self._begin_steps()
                if self.should_stop:
                    break
                self.train_step(step)
                if self.pending.is_sync_due or engine.plan.is_validation_due(state):
                    self.sync_metrics()
        self.sync_metrics()
        if not state.epoch_step:
            reason = "none of the samples to train on could be read"
            raise DataError(reason).on_all_ranks()

    def train_step(self, step: RankStep) -> None:
        """Train on one global batch. Collective.

        Every sample weighs the same, whichever rank has it: each rank sums the losses
        of its samples, and divides by the samples of all ranks. `LossScale` makes up
        for the average over ranks that DDP and FSDP take of gradients.
        """
        state, optimizer = self.state, self.engine.optimizer
        if len(optimizer.names) > 1:  # a loader yields them once, for all passes
            step.micro_batches = list(step.micro_batches)
        passes = [train_pass(self, name, step) for name in optimizer.names]
        state.step += 1
        state.epoch_step = step.number + 1
        self.pending.add(*merge_passes(passes), lrs=optimizer.end_step())
        self.timer.end_step()
        if self._hooks["on_step_end"]:  # else a step has no span for it
            with self.timer("other"):
                self.call("on_step_end")

    def validate(self) -> None:
        """Evaluate the model at the end of an epoch, and begin the next. Collective."""
        validate_once(self, is_epoch_end=True)
        self.engine.optimizer.end_epoch(self.state.metrics)
        epoch = self.state.epoch_metrics(self.engine.stage.name, is_end=True)
        self.state.begin_next_epoch()
        self.call("on_epoch_end", epoch)

    def _begin_steps(self) -> None:
        self.engine.train_mode()
        self.timer.end_step(is_step=False)
        self.synced_at = time.perf_counter()

    def sync_metrics(self, *, flush: bool = False) -> None:
        """Gather the metrics of the steps since the last call, and report them.

        Collective over all ranks; callbacks may call it, such as before a checkpoint.

        Args:
            flush: Report the throughput, however few seconds of steps it covers.
        """
        with self.timer("other"):
            handle_deferred(self)
            report_steps(self, flush=flush)

    def test(self, data: Any) -> Evaluation:
        """Evaluate the model on a test set, and report it; collective."""
        engine = self._checked_engine()
        with engine.data.test_loader(data, engine.strategy) as loader:
            with self.timer("evaluation"):
                found = engine.evaluate(loader, self.validation_step)
            self.call("on_test_end", found, engine.data.take_skipped())
        return found

    # --- what may be overridden ---------------------------------------------------

    def loss(self, outputs: Any, targets: Any) -> Losses:
        """Return the loss of each sample; the task's if not overridden.

        Args:
            outputs: Of the model, for N rows; with `ImageClassification` `(N, C)`.
            targets: Of the data set; with `ImageClassification` labels, int64 `(N,)`,
                or probabilities, `(N, C)`.

        Returns:
            One value per sample, `(N,)` or `(N, ...)`; values and weights; or several
            losses by name: see `mpitrain.tasks.task.Values` and `Losses`.
        """
        if self._loss is not None:
            return self._loss(outputs, targets)
        return type(self.task).loss(self.task, outputs, targets)

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Values]:
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

    def compute_loss(self, batch: Batch, *optimizer: str) -> Losses:
        """Return the loss of each sample of a micro-batch, for the backward pass.

        Args:
            batch: Inputs and targets, on this rank's device.
            optimizer: If there are several by name: the one whose pass it is.
        """
        self.is_task_step = True
        step = self.task.training_step
        return checks.call_step(step, self.forward, batch, *optimizer)

    def validation_step(self, model: Model, batch: Batch) -> Mapping[str, Values]:
        """Return the metrics of a batch; see `Task.validation_step`."""
        values = checks.check_metrics(self.task.validation_step(model, batch))
        return checks.warn_of_values(values, self.warned_of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the parallelized model in `compute_loss`, in the configured precision.

        A dict is passed by name, if its keys are arguments of the model's ``forward``.
        Not `model` itself, whose gradients would not be all-reduced. Collective: each
        rank calls it as often; not with fixed micro-batches and ``ddp``, where ranks
        may have unequal numbers of them.
        """
        return self.engine.forward(self.engine.strategy.module, *args, **kwargs)

    def all_gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of the whole global batch, in its order, with gradients.

            rows, mine = trainer.all_gather(outputs)
            return contrastive_loss(rows)[mine]  # the losses of this rank's samples

        For a loss that compares samples, in `loss` or `compute_loss`. Collective over
        all ranks in a training step; in an evaluation, whose batches do not depend on
        the number of ranks, it returns the batch itself.

        Args:
            rows: `(N, ...)`, for each row of the batch.

        Returns:
            `(M, ...)`, equal on all ranks, without padding; and which are this rank's.

        Raises:
            UsageError: The step is cut into micro-batches; on every rank.
            DataError: Rows of ranks differ in more than their number; on every rank.
        """
        return self.engine.all_gather(rows, self.batch)

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
            UsageError: `fit` has not begun a stage (a callback may call this from
                `on_stage_start` on), or started the job and has ended it.
        """
        engine = self._checked_engine()
        if not engine.data.val_loaders:
            raise UsageError("found no val_data; expected some to evaluate")
        return engine.validate(self.validation_step)

    def predict(self, data: Any, write: Writer | None = None) -> list[Any] | None:
        """Return each sample's outputs of the model, or its EMA; collective.

        Args:
            data: A data set, as `train_data`; targets are not needed.
            write: Called on each rank with numbers of samples, int64 `(N,)`, and a list
                of their outputs; not collective. Each sample is written once.

        Returns:
            On rank zero, without ``write``: the outputs of each sample, on the CPU, in
            the order of the data set, ``None`` for skipped ones; else ``None``.

        Raises:
            DataError: Outputs have no row for each sample; see `Task.predict_step`.
        """
        engine = self._checked_engine()
        with self.timer("evaluation"):
            found, num_samples = engine.predict(data, write)
        self.call("on_predict_end", data, num_samples)
        return found

    def log_images(self, name: str, images: Any) -> None:
        """Log images by `Loggers`, on rank zero; local.

        A tensor `(N, C, H, W)`, of bytes or from 0 to 1, or an array uint8
        `(N, H, W, C)`, each with 1 or 3 channels; or a figure of matplotlib.
        """
        self.call("on_images", name, images)

    def _checked_engine(self) -> Engine:
        if not hasattr(self, "engine") or not hasattr(self.engine.data, "val_loaders"):
            raise UsageError("nothing to evaluate yet; expected a call of fit() before")
        if self._final_state is not None:
            raise UsageError(
                "fit() has ended its ranks; expected a world= from mpitrain.init()"
            )
        return self.engine

    # --- the parts of `fit` ---------------------------------------------------------

    def set_up(self) -> Engine:
        """Prepare data and model, which `fit` else does; `world` must be known.

        Collective over all ranks.
        """
        assert self.world is not None
        kind = choose_strategy(self.config, self.world, self._strategy)
        strategy = kind(self.config, self.world)
        strategy.configure_torch()
        self.engine = Engine(
            self.model,
            self.train_data,
            self.val_data,
            self.config,
            self.world,
            self.task,
            strategy,
            self._sampling,
            self.stages,
            test_data=self.test_data,
            find_unused_parameters=self.find_unused_parameters,
            can_cache_features=type(self).compute_loss is Trainer.compute_loss,
        )
        self._final_state, self.should_stop, self.state = None, False, TrainState()
        self.timer = make_timer(self.world.device)
        size = strategy.micro_batch_size if strategy.micro_batches_are_fixed else None
        self.pending = PendingSteps(self.world.device, size)
        self.engine.prepare_other_modules(self._loss)
        self.synced_at, self._is_set_up = time.perf_counter(), True
        self.callbacks = in_order(self.callbacks)
        self._hooks = Hooks(self.callbacks)
        return self.engine

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self._hooks[hook]:
            callback(self, *args)

    @contextlib.contextmanager
    def _job(self) -> Iterator[None]:
        """Call `mpitrain.init` in a script that has not."""
        if not self._owns_job or self.uses_whole_config:
            yield
            return
        with init(**self.config.launch.as_arguments()) as self.world:
            yield
            # `init` ends the other ranks, which a sharded model needs.
            self._final_state = self.engine.full_state_dict()

    @contextlib.contextmanager
    def _set_up_once(self) -> Iterator[Engine]:
        """Set up and start the callbacks; tell them of an exception; close workers."""
        assert self.world is not None
        if self.world.is_rank_zero:
            checks.warn_of_ignored(self)
        engine = self.engine if self._is_set_up else self.set_up()
        self._is_set_up = False
        try:
            self.call("setup")
            all_or_none(
                world_comm(), lambda: self.call("on_fit_start"), "start callbacks"
            )
            yield engine
        except Stopped:  # `fit` has called on_stop
            raise
        except BaseException as error:
            self._hooks.on_exception(self, error)
            raise
        finally:
            engine.close()

"""What a training works with: data, model, strategy and optimizer of a stage."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpitrain.config import TrainConfig
from mpitrain.data.custom import check_data_set, warn_if_collate_draws
from mpitrain.data.loader import Batch, BatchLoader
from mpitrain.data.randomness import own_random_state, rank_seed
from mpitrain.data.samples import kind_of
from mpitrain.data.sampling import Sampling
from mpitrain.errors import DataError, UsageError
from mpitrain.models.model_config import model_config
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.stages import Stage, place_stages
from mpitrain.tasks.task import Model, Task, TrainedPart
from mpitrain.train.checks import (
    MAX_NAMED,
    check_same_config,
    explain_call,
    explain_no_grad,
    refuse_buffers,
    warn_of_converted,
    warn_of_eval_mode,
    warn_of_float64,
)
from mpitrain.train.data import TrainData
from mpitrain.train.evaluate import (
    Evaluation,
    ValidationStep,
    evaluate,
    join_evaluations,
    refuse_loss_names,
)
from mpitrain.train.gather import gather_rows
from mpitrain.train.means import form_of
from mpitrain.train.meta_device import WeightMaker, is_on_meta
from mpitrain.train.metric_objects import MetricObjects
from mpitrain.train.metrics import TrainState
from mpitrain.train.model import (
    BatchNorm,
    check_same_model,
    copy_to_cpu,
    initialize_lazy,
    keep_statistics,
    place_tensor,
    prepare_model,
    spread_inputs,
    unwrap_model,
)
from mpitrain.train.optimizer import OptimizerWrapper
from mpitrain.train.other_modules import OtherModules
from mpitrain.train.plan import Plan
from mpitrain.train.precision import autocast
from mpitrain.train.predict import Writer, predict
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.trained_weights import TrainedWeights
from mpitrain.train.verification import Verification

logger = logging.getLogger("mpitrain")


class Engine:
    """What a training works with, ready on this rank; the arguments are `Trainer`'s.

    Collective over the default group, and so are its methods unless they say otherwise.
    With ``can_cache_features`` a step calls the model with the inputs and does nothing
    else, so that a frozen part need run once only.

    Attributes:
        data: Data sets and loaders.
        model: The whole model.
        plan: Stages, epochs and steps.
        stage: The present stage, from `start_stage` on.
        strategy: How it is spread over the ranks.
        optimizer: Those of the stage.
        part: What the stage trains of the model.
        verification: Compares the ranks, if it is asked for.
    """

    stage: Stage
    _loss_forms: dict[str, str]  # see `check_losses`
    part: TrainedPart
    optimizer: OptimizerWrapper
    trained_weights: TrainedWeights
    _is_closed = False
    _has_checked_buffers = True  # of this stage, once it has begun

    def __init__(
        self,
        model: nn.Module,
        train_data: Any,
        val_data: Any,
        config: TrainConfig,
        world: World,
        task: Task,
        strategy: Strategy,
        sampling: Sampling,
        stages: Sequence[Stage] | None = None,
        *,
        test_data: Any = None,
        find_unused_parameters: bool = True,
        can_cache_features: bool = True,
    ) -> None:
        self.world, self.config, self.task = world, config, task
        self.ranks = communicator(world)
        self._find_unused = config.find_unused_parameters == "always" or (
            config.find_unused_parameters == "auto" and find_unused_parameters
        )
        self._can_cache_features = (
            can_cache_features and not strategy.micro_batches_are_fixed
        )
        check_same_config(config, self.ranks)
        check_data_set(test_data, "the test data")
        names = "one"
        if isinstance(val_data, Mapping):
            names = ", ".join(map(str, itertools.islice(val_data, MAX_NAMED)))
        given = {
            "stages=": repr(stages),
            "val_data=": "none" if val_data is None else names,
            "test_data=": "none" if test_data is None else "some",
            "sampler= and batch_sampler=": sampling.name if sampling else "neither",
        }
        for name, it in given.items():  # else ranks would wait for each other
            self.ranks.check_equal(it, name, "Expected the same on every rank")
        # `strategy` is another one in a stage that trains a head alone.
        self.strategy = self._whole_strategy = strategy
        self.verification = None
        if config.verify_every:
            self.verification = Verification(config, world, self.ranks, strategy)
        is_exact = strategy.micro_batches_are_fixed
        self._metrics = MetricObjects(task, world.device, self.ranks, is_exact=is_exact)
        self.data = TrainData(
            train_data, val_data, config, world, self.ranks, task, sampling, strategy
        )
        samples = self.data.train
        if not is_exact:
            warn_if_collate_draws(samples, world)
        model = unwrap_model(model, world)
        # Before the ranks' weights are compared: a lazy one has no shape.
        if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
            example = self.data.loader(samples).example()
            initialize_lazy(model.to(world.device), example.inputs)
        check_same_model(model, self.ranks, strategy.report_dependence)
        if world.is_rank_zero:
            warn_of_float64(model, config)
            warn_of_converted(model, config)
        self.model = prepare_model(model, world, config)
        self._begins_sharded = False
        if is_on_meta(self.model):
            self._begins_sharded = strategy.is_sharded
            to_ranks = functools.partial(place_tensor, world=world, config=config)
            maker = WeightMaker(self.model, world.device, config.seed, to_ranks)
            strategy.make_weights(self.model, maker)
        named = self.model.named_parameters()
        self._trainable = {name: weight.requires_grad for name, weight in named}
        # Such as batch norm that the user has frozen; a whole model in eval() is not.
        modules = self.model.modules() if self.model.training else ()
        self._in_eval_mode = [module for module in modules if not module.training]
        self._has_named_modes = False
        self._num_predictions = 0
        strategy.check_model(self.model)
        for part in (samples, *self.data.val_sets.values()):
            strategy.check_samples(part)
        has_batch_norm = any(isinstance(m, BatchNorm) for m in self.model.modules())
        self.data.min_rows = 2 if has_batch_norm else 1
        num = samples.num_samples
        size = (num if sampling.has_batches else None) or config.global_batch_size
        max_rows = strategy.max_rows(min(size, num or size))
        # A doubled sample has variance 0: only where there are no others is it counted.
        self._doubles_rows = has_batch_norm and max_rows > 1
        self.plan = Plan(
            num_samples=num,
            config=config,
            stages=place_stages(stages, config),
            num_steps=self.data.num_steps,
        )
        for stage in self.plan.stages:
            if stage.trainable is not None:
                stage.weights(self.model)  # an error now, not hours later
        # Of dropout. Last: ranks draw unlike numbers from here on.
        torch.manual_seed(rank_seed(config.seed, world.rank))

    def prepare_other_modules(self, loss: Any) -> None:
        """Move a loss that is a module, and modules of the task; collective."""
        self._other_modules = OtherModules(
            loss,
            self.task,
            self.model,
            self.strategy,
            self.config,
            self.world,
            self.ranks,
        )

    def check_buffers(self) -> None:
        """Refuse buffers that no rank broadcasts or saves; collective.

        After a step; it does nothing but in the first one of a stage.
        """
        if self._has_checked_buffers:
            return
        self._has_checked_buffers = True
        self._other_modules.check_buffers()
        is_exact = self.strategy.micro_batches_are_fixed or self.world.world_size > 1
        refuse_buffers(
            self.strategy.changed_buffers(),
            "buffers of the model that are saved were set, removed or resized since "
            "the stage began",
            "expected tensors of their final shape from the beginning: call the model "
            "once with a batch before it is trained; or persistent=False for a cache",
            self.ranks,
            warning=None
            if is_exact
            else "a new model cannot load them from a checkpoint",
        )

    # --- a stage ------------------------------------------------------------------

    def start_stage(self, stage: Stage) -> None:
        """Choose the weights that are trained, parallelize them, make an optimizer."""
        config, model, data = self.config, self.model, self.data
        is_sharded = self._begins_sharded
        if hasattr(self, "trained_weights"):
            is_sharded = self.strategy.is_sharded
            self.strategy.reshard()  # FSDP has other weights after a forward pass
            self.trained_weights.check()
        self.stage, self._loss_forms = stage, {}
        self._has_checked_buffers = False
        # What the stage before froze, too: each begins with what the user has frozen.
        self._restore_trainable()
        self._frozen = stage.freeze(model)
        size = self._whole_strategy.max_evaluation_batch_size
        loaders = data.loader(data.train), data.loader(data.val)
        # Features take the place of one set of validation data.
        has_features = self._can_cache_features and len(data.val_sets) == 1
        with autocast(config, self.world.device):
            self.part = part = self.task.start_stage(
                stage,
                model,
                loaders,
                self.ranks,
                size if has_features and not is_sharded else None,
            )
        if not any(weight.requires_grad for weight in part.model.parameters()):
            raise UsageError(
                "the model has no weight that requires a gradient; expected at least "
                "one to train"
            ).on_all_ranks()
        if self.world.is_rank_zero and not self._has_named_modes:
            self._has_named_modes = warn_of_eval_mode(model, self._in_eval_mode)
        data.set_stage(part.samples)
        whole = self._whole_strategy
        is_whole = part.head is None or is_sharded
        self.strategy = whole if is_whole else whole.for_head()
        self.strategy.wrap(
            part.model, find_unused_parameters=self._find_unused and part.model is model
        )
        self.optimizer = OptimizerWrapper(
            self.strategy,
            config,
            self.task,
            self.ranks,
            stage,
            self.plan.steps_of(stage),
        )
        if self.optimizer.is_monitored and not data.val_sets:
            raise UsageError(
                "ReduceLROnPlateau follows a metric of the validation, found no "
                "val_data; expected some, or another scheduler"
            ).on_all_ranks()
        # After `wrap`: FSDP has put shards in the place of the weights.
        self.trained_weights = TrainedWeights(
            model, self.optimizer, self.strategy.reshard
        )

    def train_mode(self) -> None:
        """Put the parts that are trained into training mode; local."""
        if self.part.head is not None:
            self.model.eval()
            self.part.head.train()
            return
        self.model.train()
        for module in self._in_eval_mode:  # not its parts, which may be in training
            module.training = False
        for module in self._frozen:
            module.eval()

    def begin_pass(
        self, name: str, state: TrainState, step: int, num_samples: int
    ) -> float:
        """Begin the pass of an optimizer; return the factor of the sum of losses."""
        self.trained_weights.check()
        self._num_samples = num_samples
        rate_of = functools.partial(self.plan.learning_rate, self.stage, state, step)
        self.optimizer.begin_pass(name, rate_of, state.epoch, step)
        return self.optimizer.scale.value / num_samples

    def check_losses(self, named: Mapping[str, Any]) -> None:
        """Let all ranks and steps have the same losses; collective the first time.

        Ranks that differ would wait for each other: weights are all-reduced.
        """
        form = form_of(named)
        what, expected = "what the training step returned", "Expected the same losses"
        name = self.strategy.pass_name
        if name not in self._loss_forms:
            self.ranks.check_equal(form, what, expected)
            refuse_loss_names(named)
            self._loss_forms[name] = form
        # By this rank alone, which ends the job: to compare in each step would cost.
        elif form != self._loss_forms[name]:
            raise UsageError(
                f"{what} changed: {self._loss_forms[name]} before, now {form}. "
                f"{expected}"
            )

    def norm_statistics(self, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Return a context for the passes of a micro-batch."""
        if not self._doubles_rows or len(batch) > 1:
            return contextlib.nullcontext()
        return keep_statistics(self.strategy.model)

    def forward(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module in the configured precision; a dict by name if it takes none.

        Collective, if the strategy communicates in the forward pass.
        """
        args, kwargs = spread_inputs(self.part.model, args, kwargs)
        strategy = self.strategy
        try:
            if module is strategy.module:  # the call that a strategy may override
                return strategy.forward(*args, **kwargs)
            return strategy.call(module, *args, **kwargs)
        except Exception as error:
            explain_call(self.part.model, args, kwargs, error)
            raise

    def all_gather(self, rows: Tensor, batch: Batch | None) -> tuple[Tensor, slice]:
        """Return what `Trainer.all_gather` does; ``batch``: of a training step."""
        if batch is None:
            return rows, slice(0, len(rows))
        self.strategy.check_all_gather(self._num_samples)
        num = len(batch)
        if not rows.ndim or len(rows) not in (num, batch.num_rows):
            raise DataError(
                f"all_gather got {kind_of(rows)} in a batch of {batch.num_rows} rows; "
                f"expected one row for each, ({batch.num_rows}, ...)"
            )
        return gather_rows(rows[:num], self.ranks, self.world.rank)

    # --- evaluation and results ---------------------------------------------------

    def evaluate(
        self,
        loader: BatchLoader,
        validation_step: ValidationStep,
        on_batch_end: Callable[[], object] = lambda: None,
    ) -> Evaluation:
        """Evaluate the model, or its EMA, on every sample of a data set."""

        def step(model: Model, batch: Batch) -> Mapping[str, Any]:
            # A rank without samples has a row of padding, for the model's collectives.
            nothing = contextlib.nullcontext()
            with nothing if len(batch) else self._metrics.without_samples():
                return validation_step(model, batch)

        with self._evaluation(loader) as model:
            self._metrics.reset()
            found = evaluate(
                model,
                loader,
                self.data.evaluation_shard(loader, self.strategy),
                self.ranks,
                step,
                self.world.device,
                on_batch_end,
                self._begin_evaluation_batch,
            )
            return self._metrics.add_to(found)

    def validate(
        self,
        validation_step: ValidationStep,
        on_batch_end: Callable[[], object] = lambda: None,
    ) -> Evaluation:
        """Evaluate the model on the validation data; on each set of them, if named."""
        try:
            found = {
                name: self.evaluate(loader, validation_step, on_batch_end)
                for name, loader in self.data.val_loaders.items()
            }
        finally:
            if self._is_closed:  # `fit` has ended: workers that began now would stay
                self.data.close()
        return join_evaluations(found)

    def predict(self, data: Any, write: Writer | None) -> tuple[list[Any] | None, int]:
        """Return what `Trainer.predict` does, and the number of samples."""
        num_before = self._num_predictions
        self._num_predictions += 1
        does = "none" if write is None else "some"
        self.ranks.check_equal(does, "write=", "Expected the same on every rank")
        loads = self.data.test_loader(
            data, self.strategy, "the data to predict", reads_whole=True
        )
        with loads as loader, self._evaluation(loader) as model:
            return predict(
                functools.partial(self.task.predict_step, model),
                loader,
                self.data.evaluation_shard(loader, self.strategy),
                self.ranks,
                write,
                # Another one each time: a user may average outputs that are drawn.
                lambda it: self.strategy.seed_evaluation_batch(it, num_before),
            )

    @contextlib.contextmanager
    def _evaluation(self, loader: BatchLoader) -> Iterator[Model]:
        """Return the model in evaluation mode, with its EMA's weights."""
        # A callback may evaluate within an epoch, and the training continues, also with
        # the random numbers that it would have had.
        was_training = any(module.training for module in self.model.modules())
        self.model.eval()
        # A stage that caches features validates on them; other data are whole samples.
        is_on_part = loader in self.data.val_loaders.values()
        is_on_part |= self.part.samples is None
        module = self.strategy.module if is_on_part else self.model
        with self.optimizer.ema_weights(), own_random_state(self.world.device):
            # Within the context: averages of buffers are each rank's own, too.
            self.strategy.broadcast_buffers()
            try:
                yield functools.partial(self.forward, module)
            except BaseException as error:
                loader.skipped.clear()  # a resumed job evaluates all of it again
                explain_no_grad(error)
                raise
            finally:
                self.strategy.reshard()  # callbacks find the weights of the optimizer
                if was_training:
                    self.train_mode()

    def _begin_evaluation_batch(self, number: int) -> None:
        self.strategy.seed_evaluation_batch(number)
        self._metrics.begin_batch(number)

    @functools.cached_property
    def model_config(self) -> dict[str, Any] | None:
        """See `mpitrain.models.model_config`; local."""
        return model_config(self.model)

    def full_state_dict(self) -> dict[str, Any]:
        """Return what `Trainer.state_dict` does."""
        return dict(self.full_state())

    def full_state(self) -> Iterator[tuple[str, Any]]:
        """Give what `Trainer.state_dict` returns, value by value; collective."""
        with self.optimizer.ema_weights():
            # A head that is trained is a part of the model, which is not sharded then.
            if self.part.model is self.model:
                yield from self.strategy.full_state()
            else:
                yield from copy_to_cpu(self.model.state_dict()).items()

    def close(self) -> None:
        """End the worker processes, and make trainable what was; local."""
        self.data.close()
        self._is_closed = True
        self._restore_trainable()

    def _restore_trainable(self) -> None:
        for name, weight in self.model.named_parameters():
            weight.requires_grad_(self._trainable.get(name, weight.requires_grad))

"""What a task is: what the samples of a training are, and what a step computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples
from mpitrain.data.loader import Batch, BatchLoader
from mpitrain.data.samples import CollateFn, kind_of, to_dtype
from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.stages import Stage

Model = Callable[..., Any]
"""Calls the parallelized model with any arguments, in the configured precision. A dict
alone is passed by name, if its keys are arguments of ``forward``. Collective: every
rank calls it as often."""

Values = Tensor | tuple[Tensor, Tensor]
"""Of a batch of N rows: `(N,)`; `(N, ...)`, averaged per sample; a scalar, the mean
over the samples; or values and constant weights, both `(N, ...)`. The mean
is over all samples of a step or a data set, or by all their weights, on whatever ranks
and in whatever micro-batches these are."""

Losses = Values | Mapping[str, Values]
"""A loss; or several by name: ``loss`` is minimized, and the others are recorded."""

LossFn = Callable[[Any, Any], Losses]
"""Maps a model's outputs and targets to losses."""

MetricsFn = Callable[[Any, Any], Mapping[str, Values]]
"""Maps a model's outputs and targets to values by name."""


DerivedFn = Callable[[Mapping[str, float]], Mapping[str, float]]
"""Maps the metrics of an evaluation, by name, to others that follow from them."""


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """What a stage trains of the model, and on what."""

    model: nn.Module
    """The whole model, or a part of it that is called by itself."""
    prefix: str = ""
    """Before the part's names in those of the whole model; ends with a dot."""
    head: nn.Module | None = None
    """What is in training mode, alone, with the rest frozen; ``None``: all."""
    samples: tuple[Samples, Samples] | None = None
    """What is trained on and validated by in place of the data sets."""


class Task:
    """What a training is of. One for each `Trainer`; not shared.

    A task of your own inherits this class, overrides `training_step` and
    `validation_step`, or `loss` and `metrics`, and is passed as ``Trainer(task=...)``.
    ``batch`` is a `Batch`: inputs and targets on this rank's device. An override of
    `set_up` or ``__init__`` calls that of this class first.

    Attributes:
        config: The configuration, from `set_up` on.
        world: This rank's place, from `set_up` on.
        dtype: Of floating-point inputs and targets, from `set_up` on.
        metric_objects: Metrics with a state over the whole data set, by name:
            torchmetrics', or objects with ``update``, ``compute``, ``reset`` and
            ``merge_state(other)``. They are reset before and after an evaluation.
        inputs: What the model is given, and its outputs mean: plain values for
            ``inputs.json`` and checkpoints.
    """

    prepends_partner = False
    """Whether each micro-batch has one sample more in front: the one before its first
    in the step, on whatever rank."""

    uses_settings: Sequence[str] = ()
    """Fields of the `TrainConfig` that are for some tasks alone, such as ``mixup``, and
    that this one reads; of others that are set, a warning says that they do nothing."""

    collate_fn: CollateFn | None = None
    """`DataLoader`'s: makes a batch of a list of samples; ``None``: torch's."""

    _has_trainer = False

    config: TrainConfig
    world: World
    dtype: torch.dtype

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.metric_objects: dict[str, Any] = {}
        self.metric_errors: dict[str, str] = {}  # of updates on this rank

    def bind(self, trainer: Any, collate_fn: CollateFn | None) -> None:
        """Let a trainer's `loss` and `metrics` stand in for those of the task; once.

        They are looked up at each call, so that a script may override or assign them,
        and without a reference to the trainer, which would keep a model in memory.
        """
        if not isinstance(self, Task) or self._has_trainer:
            raise UsageError(
                f"task={self!r}; expected an object of a class of mpitrain.Task that "
                "no other Trainer has"
            )
        found: Callable[[], Any] = weakref.ref(trainer)
        self._has_trainer = True
        if collate_fn is not None:
            self.collate_fn = collate_fn
        vars(self).update(
            loss=lambda *args: found().loss(*args),
            metrics=lambda *args: found().metrics(*args),
            all_gather=lambda rows: found().all_gather(rows),
        )

    def set_up(
        self, config: TrainConfig, world: World, train: Samples, val: Samples
    ) -> None:
        """Look at the data; raise a `UsageError` for what does not fit, on all ranks.

        Collective.
        """
        del train, val
        self.config, self.world = config, world
        self.dtype = torch.float64 if config.precision == "fp64" else torch.float32

    def transform(
        self, inputs: Any, indices: Indices, epoch: int, *, is_training: bool
    ) -> Any:
        """Return what the model gets of a batch's inputs; local, on the device.

        Args:
            inputs: `(N, ...)` as read; tensors, or dicts, lists and tuples of them.
            indices: Numbers of the samples, int64 `(N,)`. What is random depends on
                them and on the epoch alone.
            epoch: From 1; 0 in an evaluation.
            is_training: Whether for a training step.
        """
        del indices, epoch, is_training
        return to_dtype(inputs, self.dtype)

    # --- steps --------------------------------------------------------------------

    def training_step(self, model: Model, batch: Batch) -> Losses:
        """Return the loss of each sample of a micro-batch; other forms see `Values`.

        Not collective, except for the calls of the model.
        """
        outputs, targets = model(batch.inputs), batch.targets
        found = self.loss(outputs, targets)
        refuse_pairs(found, outputs, targets)
        return found

    def validation_step(self, model: Model, batch: Batch) -> Mapping[str, Values]:
        """Return the metrics of a batch by name, ``loss`` too if there is one.

        A batch without samples has padding alone, for the collectives of the model:
        its values do not count.
        """
        outputs = model(batch.inputs)  # before the return: the other ranks wait in it
        if not len(batch):
            return {}
        loss = self.loss(outputs, batch.targets)  # first: it checks the targets
        losses = loss if isinstance(loss, Mapping) else {"loss": loss}
        found = self.metrics(outputs, batch.targets)
        refuse_pairs({**losses, **found}, outputs, batch.targets)
        self.update_metrics(outputs, batch.targets)
        if twice := losses.keys() & found.keys():
            raise UsageError(
                f"a metric is named {twice.pop()!r}, as a loss; expected another"
            )
        return {**losses, **found}

    def predict_step(self, model: Model, batch: Batch) -> Any:
        """Return the outputs of a batch for `Trainer.predict`: the model's.

        Tensors of a row for each row of the batch, lists of an element for each, or
        tuples and dicts of them.
        """
        inputs = batch.inputs
        # Samples of one tensor, as those of a `TensorDataset`: `default_collate` makes
        # a list of it. A list of a custom `collate_fn` is what the model takes.
        is_list = isinstance(inputs, tuple | list) and self.collate_fn is None
        is_one = is_list and len(inputs) == 1
        return model(inputs[0] if is_one else inputs)

    def loss(self, outputs: Any, targets: Any) -> Losses:
        """Return the loss of each sample; see `training_step`."""
        raise UsageError(
            f"{type(self).__name__} has neither loss() nor training_step(); expected "
            "one of them"
        ).on_all_ranks()

    def metrics(self, outputs: Any, targets: Any) -> Mapping[str, Values]:
        """Return the metrics of a validation besides the loss, by name."""
        del outputs, targets
        return {}

    def all_gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of the whole global batch; see `Trainer.all_gather`."""
        raise UsageError("all_gather needs a Trainer; expected Trainer(task=...)")

    def update_metrics(self, outputs: Any, targets: Any) -> None:
        """Update `metric_objects` by a batch, which has no padding."""
        for name, metric in self.metric_objects.items():
            try:
                metric.update(outputs, targets)
            except Exception as error:  # raised on all ranks after the evaluation
                self.metric_errors.setdefault(
                    name,
                    f"update() by outputs, {kind_of(outputs)}, and targets, "
                    f"{kind_of(targets)}: {type(error).__name__}: {error}. For other "
                    "arguments override update_metrics(outputs, targets) of a Task",
                )

    def derived_metrics(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics that follow from others, such as the root of a mean.

        Args:
            values: Of the whole evaluation, by name. Called on rank zero.
        """
        del values
        return {}

    def refuse_other_step(self) -> None:
        """Refuse a `Trainer.compute_loss` that does not call `training_step`."""

    # --- optimizers ---------------------------------------------------------------

    def configure_optimizers(self, model: nn.Module) -> Any:
        """Return the optimizer of the weights of a stage; ``None``: the configured one.

        Those of a list step together. Of a dict by name each has a backward pass of its
        own: ``training_step(model, batch, name)``, with the others' weights frozen.

        Args:
            model: What is trained; with fsdp its weights are sharded (DTensors).
        """
        del model

    def configure_schedulers(self, optimizers: Any, total_steps: int | None) -> Any:
        """Return schedulers in the form of the optimizers; ``None``: as configured.

        An `LRScheduler` steps after each step. Lightning's dict of it has ``interval``,
        ``"step"`` or ``"epoch"``, and for `ReduceLROnPlateau` ``monitor``, a metric.

        Args:
            optimizers: What `configure_optimizers` returned, or the configured one.
            total_steps: Of the stage; ``None``: unknown.
        """
        del optimizers, total_steps

    # --- stages -------------------------------------------------------------------

    def start_stage(
        self,
        stage: Stage,
        model: nn.Module,
        loaders: tuple[BatchLoader, BatchLoader],
        ranks: Communicator,
        batch_size: int | None,
    ) -> TrainedPart:
        """Return what a stage trains; freeze the rest. Collective.

        Args:
            stage: With a name; weights that it does not train are frozen already.
            model: The whole model, on this rank's device.
            loaders: Of training and validation data, without anything random.
            ranks: For collectives over numbers and memory of the node.
            batch_size: Of a pass over the data before the stage; ``None``: there must
                be none.
        """
        del stage, loaders, ranks, batch_size
        return TrainedPart(model=model)


def refuse_pairs(found: Losses, outputs: Any, targets: Any) -> None:
    """Refuse losses or metrics of each output with each target: `(N, 1)` and `(N,)`.

    Broadcasting makes them `(N, N)`, which depends on the rows that a rank has.
    """
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    num = len(targets) if targets.ndim else 0
    if num < 2 or {outputs.shape, targets.shape} != {(num,), (num, 1)}:
        return
    for name, it in (found if isinstance(found, Mapping) else {"loss": found}).items():
        values = it[0] if isinstance(it, tuple | list) and it else it
        if getattr(values, "shape", None) == (num, num):
            raise DataError(
                f"the {name} pairs each output with each target: outputs, "
                f"{kind_of(outputs)}, and targets, {kind_of(targets)}, were broadcast "
                f"to {tuple(values.shape)}. Expected one shape: [:, 0] of the longer "
                "one; or, if all pairs of a batch are meant, a mean of each row"
            )

"""What a strategy is: how a model and the steps of a training are spread over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data import sharding
from mpitrain.data.custom import Samples
from mpitrain.data.randomness import seed_all, step_seed
from mpitrain.data.samples import to_dtype
from mpitrain.data.sharding import MicroBatchAssignment
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.torch_compat import (
    broadcast_coalesced,
    foreach_norm,
    is_persistent_buffer,
)
from mpitrain.train.model import copy_to_cpu
from mpitrain.train.precision import autocast, configure_torch, is_16_bit

logger = logging.getLogger("mpitrain")

BUCKET_BYTES = 250 << 20  # buffers are broadcast together up to this size, as in DDP

MAX_EVALUATION_BATCH_SIZE = 256  # samples of a rank's forward pass; changes no result

FUSED = ("sgd", "adam", "adamw", "adagrad")
"""Have a fused kernel, on the CPU, too."""


class Strategy:
    """How a training is spread over the ranks. This one leaves it in one process.

    A strategy of your own inherits this class, overrides what differs, and is passed as
    ``Trainer(strategy=MyStrategy)``. The trainer makes one for each `fit`, and calls
    `wrap` for each stage. A step is::

        begin_step(...)                                   # if it is overridden
        for each micro-batch of this rank:
            with micro_batch(is_last=...):
                loss = forward(inputs) ...                # and loss.backward()
        reduce_gradients()                                # if it is overridden
        grad_norm(...)                                    # then the optimizer steps

    After it every rank has in ``weight.grad`` the sum of the gradients over all ranks,
    or their mean (`averages_gradients`), or its shard of them.

    Attributes:
        config: The configuration; equal on all ranks.
        world: This rank's place.
        model: What `wrap` was given: the weights that are trained.
        module: What `forward` calls: the model, or a wrapper of it.
        assignment: Which rank takes which micro-batches of a step, cut from the step
            alone; ``None``: each rank cuts its own shard of the step.
        pass_name: Of the optimizer whose pass it is; empty if it has none.
        micro_batch_number: Of the present micro-batch in the step: with fixed
            micro-batches `micro_batch` sets it, for the recorded losses.
        communicates_before_step: Whether `begin_step` is called, its time counted as
            communication; if it is overridden.
        communicates_after_step: Likewise `reduce_gradients`.
        micro_batch_counts: Micro-batches of a step on each rank, once they differ.
    """

    name = "single"
    averages_gradients = False
    """Whether gradients are averaged over the ranks, not summed."""
    reduces_in_backward = False
    """Whether the end of a backward pass waits for the other ranks."""
    micro_batches_are_fixed = False
    """Whether micro-batches are the same on any number of ranks."""
    is_sharded = False
    """Whether each rank has a part of the weights only."""
    numbers_of_ranks: Sequence[range] = ()
    """The micro-batches of a step by rank, where each has the same bits on any rank:
    then there is a context ``recompute(number)``, in which any rank computes any of
    them again, for `Verification`, and which leaves nothing."""

    model: nn.Module
    module: nn.Module
    assignment: MicroBatchAssignment | None = None
    micro_batch_number = 0
    pass_name = ""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        kind = type(self)
        self.communicates_before_step = kind.begin_step is not Strategy.begin_step
        self.communicates_after_step = (
            kind.reduce_gradients is not Strategy.reduce_gradients
        )
        self.micro_batch_counts: list[int] = []
        self._is_16_bit = is_16_bit(config)

    # --- before the model is wrapped ----------------------------------------------

    def configure_torch(self) -> None:
        """Set what belongs to the whole process, before the device is used; local."""
        configure_torch(
            tf32=self.config.tf32, is_deterministic=self.config.deterministic
        )

    def check_samples(self, samples: Samples) -> None:
        """Refuse data that the strategy cannot take; on all ranks."""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the strategy cannot take; on all ranks."""

    def report_dependence(self, found: str, expected: str) -> None:
        """Warn of what lets results depend on the number of ranks, or refuse it."""
        if self.micro_batches_are_fixed:
            raise UsageError(f"--bitwise: {found}; expected: {expected}")
        if self.world.is_rank_zero:
            logger.warning(
                "%s, so results depend on the number of ranks; %s", found, expected
            )

    def make_weights(self, model: nn.Module, make: Callable[[nn.Module], None]) -> None:
        """Make the weights of a model on the device meta; collective.

        ``make(part)`` makes what is missing in a part of it, and the rest stays there.
        """
        make(model)

    def check_all_gather(self, num_samples: int) -> None:
        """Refuse to gather the rows of a step that is not in one pass; on all ranks.

        On one rank: the result is not to depend on their number.
        """
        size = self.micro_batch_size
        if size is not None and size < num_samples:
            raise UsageError(
                f"all_gather needs the whole global batch in one pass, found "
                f"micro_batch_size {size} of {num_samples}; expected none, and more "
                "ranks or "
                "--activation-checkpointing to save memory"
            ).on_all_ranks()

    def for_head(self) -> Strategy:
        """Return the strategy that trains a head alone: it needs no sharding."""
        return self

    @property
    def micro_batch_size(self) -> int | None:
        """Samples of a micro-batch; ``None``: all of the rank's."""
        return self.config.micro_batch_size

    def max_rows(self, num_samples: int) -> int:
        """Return the samples of the largest micro-batch of a step of so many."""
        of_rank = sharding.max_shard_size(num_samples, self.world.world_size)
        return min(of_rank, self.micro_batch_size or of_rank)

    @property
    def max_evaluation_batch_size(self) -> int:
        """Samples of a rank's forward pass: no more than in training."""
        most = MAX_EVALUATION_BATCH_SIZE
        return min(self.micro_batch_size or most, most)

    def evaluation_batch_size(self, num_samples: int | None) -> int:
        """Return the samples of a batch of an evaluation, on any number of ranks."""
        most = self.max_evaluation_batch_size
        if num_samples is None:
            return most
        size = self.config.global_batch_size
        return sharding.evaluation_batch_size(num_samples, size, most)

    def batch_line(self) -> str:
        """Return a line with the factors of the global batch size."""
        size, world_size = self.config.global_batch_size, self.world.world_size
        largest = sharding.max_shard_size(size, world_size)
        smallest = size // world_size
        micro = min(self.micro_batch_size or largest, largest)
        micro_batches = -(-largest // micro)
        ranks = f"{world_size} rank{'s' * (world_size != 1)}"
        if size == world_size * micro * micro_batches:
            product = f"{ranks} x {micro} x {micro_batches}"
            return f"{size} per step = {product} (ranks x samples x micro-batches)"
        sizes = str(largest) if smallest == largest else f"{smallest} or {largest}"
        plural = "es" * (micro_batches != 1)
        return (
            f"{size} per step = {ranks} x {sizes}, in {micro_batches} "
            f"micro-batch{plural} of at most {micro}"
        )

    # --- a stage ------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Take the model of a stage, which is on this rank's device; collective.

        Without ``find_unused_parameters`` every weight takes part in every loss.
        """
        del find_unused_parameters
        self.model = self.module = model
        # Once: a walk through all modules takes time, and each step asks for buffers.
        self._buffers = _find_buffers(model)
        weights = self.named_weights().values()
        self._are_alike = len({(it.dtype, it.device) for it in weights}) == 1
        if self.config.compile:
            model.compile()  # in place: `torch.compile` would change the weights' names

    def parameter_groups(
        self, weights: list[nn.Parameter], optimizer: str
    ) -> list[dict[str, Any]]:
        """Return groups for torch's optimizer of a name, fused where that is safe."""
        if optimizer not in FUSED:
            return [{"params": weights}]
        is_fused = all(map(can_be_fused, weights))
        return [{"params": weights, "fused": is_fused or None}]

    def check_optimizer(self, kind: str, *, is_by_number: bool) -> None:
        """Refuse an optimizer of the user, on all ranks.

        Args:
            kind: Its class.
            is_by_number: Whether it updates each number of a weight alone.
        """

    def rebalance(self, seconds: Sequence[float]) -> None:
        """Let slow ranks take fewer micro-batches from the next step on, if possible.

        Args:
            seconds: Of a micro-batch on each rank; equal on all ranks.
        """

    # --- a step -------------------------------------------------------------------

    def begin_step(self, epoch: int, step: int, num_samples: int) -> None:
        """Begin a step, numbered from 0 in its epoch; collective.

        ``num_samples`` are those of the step over all ranks.
        """

    def begin_pass(self, name: str) -> None:
        """Begin the pass of an optimizer, if there are several; collective.

        Only the weights of that optimizer require gradients.
        """
        self.pass_name = name

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Return a context for both passes of this rank's next micro-batch."""
        del is_last
        yield

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model of the stage in the configured precision."""
        return self.call(self.module, *args, **kwargs)

    def call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call `module`, or one that contains it, in the configured precision.

        With 16-bit precision the outputs are float32 again: losses are computed in it.
        """
        if not self._is_16_bit:
            return module(*args, **kwargs)
        with autocast(self.config, self.world.device):
            outputs = module(*args, **kwargs)
        return to_dtype(outputs, torch.float32)

    def reduce_gradients(self) -> None:
        """Reduce the gradients of a step's micro-batches over the ranks; collective."""

    def sum_of_weights(self, weights: Sequence[Tensor]) -> float | Tensor:
        """Add up the weights of a step over this rank's micro-batches and all ranks.

        Collective; called for losses that have weights.

        Args:
            weights: Of each micro-batch, float64 `()`.
        """
        total = torch.stack(list(weights)).sum()
        if self.world.world_size > 1:
            dist.all_reduce(total)
        return number_of(total)

    def grad_norm(self, gradients: list[Any]) -> float | Tensor:
        """Return the norm of all gradients, before they are clipped; on all ranks.

        A tensor, `()`, on the device: the host does not wait for it in the step, if
        each optimizer is fused (`OptimizerWrapper.end_pass`).
        """
        if not self._are_alike:
            return number_of(nn.utils.get_total_norm(gradients))
        # As `get_total_norm` without grouping by device and type: 9.5 against 27 us for
        # 6 tensors, and a fifth less, 431 against 544 us, for 161.
        return norm_of(foreach_norm(gradients))

    # --- the model's state --------------------------------------------------------

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that require gradients, by name.

        FSDP has others after a forward pass, until it shards them again.
        """
        named = self.model.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are saved, by name.

        Looked up anew: a module may assign a new tensor. Not those of another shape
        than at first, nor those with ``persistent=False``, such as a cache: each rank
        has its own.
        """
        found = {}
        for name, (module, attribute, shape) in self._buffers.items():
            buffer = getattr(module, attribute)
            if buffer is not None and buffer.shape == shape:
                found[name] = buffer
        return found

    def changed_buffers(self) -> list[str]:
        """Return the saved buffers that `named_buffers` leaves out, by name; local.

        Their shape is another than at first, or they were ``None``, or are now.
        """
        before = {name: shape for name, (_, _, shape) in self._buffers.items()}
        now = {name: it[2] for name, it in _find_buffers(self.model).items()}
        return sorted({name for name, _ in before.items() ^ now.items()})

    def float_buffers(self) -> dict[str, Tensor]:
        """Return buffers that change in training, such as batch norm's statistics."""
        named = self.named_buffers().items()
        return {name: buffer for name, buffer in named if buffer.is_floating_point()}

    def broadcast_buffers(self) -> None:
        """Broadcast rank zero's buffers; not left to DDP, so that it is timed.

        Collective over the default group.
        """
        buffers = list(self.named_buffers().values())
        if buffers and self.world.world_size > 1:
            broadcast_coalesced(dist.group.WORLD, buffers, BUCKET_BYTES, 0)

    def seed_evaluation_batch(self, number: int, num_before: int = 0) -> None:
        """Seed what a batch of an evaluation draws: the same on any number of ranks.

        Batches of an evaluation do not depend on it; training's epochs begin with 1.
        Of predictions each has other numbers: ``num_before`` counts those before it.
        """
        purpose = f"{number}" + f" {num_before}" * (num_before > 0)
        seed = step_seed(self.config.seed, 0, 0, purpose)
        seed_all(seed, self.world.device)

    def reshard(self) -> None:
        """Shard weights again that a pass has gathered: they have changed; local."""

    def full_state(self) -> Iterator[tuple[str, Any]]:
        """Give a plain ``state_dict`` on the CPU, value by value; collective.

        Sharded ones are given on rank zero alone, each gathered when it is asked for.
        """
        yield from copy_to_cpu(self.model.state_dict()).items()

    def full_state_dict(self) -> dict[str, Any]:
        """Return a plain ``state_dict`` on the CPU; complete on rank zero only.

        Collective if `is_sharded`.
        """
        return dict(self.full_state())


def _find_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Size]]:
    """Return module, attribute and shape of each buffer that is saved, by name."""
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if is_persistent_buffer(module, attribute):
            found[name] = (module, attribute, buffer.shape)
    return found


def can_be_fused(weight: Tensor) -> bool:
    """Whether it is real, and without gaps: a fused kernel of CPUs overlooks them."""
    # On meta: strides without memory.
    strides = torch.empty_like(weight, device="meta").stride()
    return weight.is_floating_point() and weight.stride() == strides


def norm_of(norms: Sequence[Tensor]) -> float | Tensor:
    """Return the norm of several tensors from the norm of each; see `number_of`."""
    if norms[0].device.type == "cpu":
        return math.hypot(*map(float, norms))
    return number_of(torch.linalg.vector_norm(torch.stack(list(norms))))


def number_of(value: Tensor) -> float | Tensor:
    """Return the number; of a GPU the tensor itself, for which the host would wait."""
    return float(value) if value.device.type == "cpu" else value

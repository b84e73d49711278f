"""Training with ``--bitwise``: the same bits on any number of ranks.

A step is cut into micro-batches that do not depend on the ranks. Each one's forward and
backward pass runs alone, with its own random numbers, and their gradients are added in
one order. So every number that is computed is the same, whichever rank computes it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.train.loader import RankStep
from mpitrain.train.parallel import ParallelModel, previous_settings
from mpitrain.train.step_metrics import all_gather_flat

logger = logging.getLogger("mpitrain")

Gradients: TypeAlias = list[Tensor | None]  # of the weights; None: not in the loss

PARTLY_USED = (
    "--bitwise with --strategy fsdp: a weight takes part in some micro-batches only, "
    "or more than once in one; expected once in each, or never, or --strategy ddp"
)

ALIGNMENT = 64  # numbers: kernels of GPUs add aligned memory in another order

Node = tuple[int, int]
"""Level and position in the tree of sums: the sum of ``2**level`` numbers from
``position * 2**level`` on."""


class PairwiseSum:
    """Adds values by number in one order, whatever order they come in.

    Numbers 0 and 1 are added, and 2 and 3, and then both sums, and so on: a binary
    tree. `nodes` are the sums that wait for their neighbour.

    >>> tree = PairwiseSum()
    >>> for number in (2, 0, 1):
    ...     tree.add((0, number), [torch.tensor(float(number))])
    >>> sorted(tree.nodes), tree.total()
    ([(0, 2), (1, 0)], [tensor(3.)])
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, Gradients] = {}

    def add(self, node: Node, value: Gradients) -> None:
        """Take a value, which may be changed in place."""
        level, position = node
        while (found := self.nodes.pop((level, position ^ 1), None)) is not None:
            value = _add(value, found) if position & 1 == 0 else _add(found, value)
            level, position = level + 1, position // 2
        self.nodes[level, position] = value

    def total(self) -> Gradients:
        """Return the sum of all, and begin anew."""
        *others, total = [self.nodes[node] for node in sorted(self.nodes, key=_first)]
        self.nodes = {}
        for value in reversed(others):
            total = _add(value, total)
        return total


def nodes_of(numbers: range) -> list[Node]:
    """Return the nodes of a `PairwiseSum` of consecutive numbers, in their order.

    >>> nodes_of(range(3, 9))
    [(0, 3), (2, 1), (0, 8)]
    """
    found, start = [], numbers.start
    while start < numbers.stop:
        level = (numbers.stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        found.append((level, start >> level))
        start += 1 << level
    return found


def _first(node: Node) -> int:
    return node[1] << node[0]


@torch.no_grad()
def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add in place, to the left one."""
    for place, (mine, other) in enumerate(zip(left, right, strict=True)):
        if mine is None:
            left[place] = other
        elif other is not None:
            _local(mine).add_(_local(other))
    return left


def _local(tensor: Any) -> Tensor:
    """Return a rank's shard of a DTensor, or the tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class BitwiseModel(ParallelModel):
    """A `ParallelModel` whose gradients have the same bits on any number of ranks.

    With ``ddp`` each rank adds up the gradients of its micro-batches; at the end of a
    step every rank adds a part of those of all ranks, and all-gathers the parts. With
    ``fsdp`` each micro-batch is reduce-scattered. Buffers, such as the statistics of
    batch norm, become those of the first micro-batch.
    """

    def __init__(
        self, model: nn.Module, world: World, config: TrainConfig, strategy: str
    ) -> None:
        is_sharded = strategy == "fsdp"
        super().__init__(model, world, config, "fsdp" if is_sharded else "single")
        self.strategy = strategy
        self.is_last = False  # whether the micro-batch is this rank's last of the step
        self.num_micro_batches = 0  # of the step, over all ranks
        self._micro_batch_size = config.bitwise_micro_batch_size
        self._seed = config.seed
        self._world_size = world.world_size
        self._numbers: list[range] = []  # of each rank's micro-batches of the step
        self._place = 0  # of the micro-batch among this rank's
        self._key = (0, 0)  # epoch and step
        self._sum = PairwiseSum()
        # Those that a user freezes later have no gradient.
        self._trained = list(self.named_weights().values())
        self._flat = FlatGradients(self._trained)
        self._memory: dict[str, Tensor] = {}
        self.syncs_buffers = bool(self._buffers)
        self._before: dict[str, Tensor] = {}
        self._after_first: dict[str, Tensor] = {}
        self._used: list[bool] = []  # with `fsdp`: whether a weight has a gradient
        self._is_agreed = False  # whether `_used` is the same on all ranks
        self._scatters: list[_PairwiseReduceScatter] = []
        if is_sharded and world.world_size > 1:
            self._set_reduce_scatter()

    def _set_reduce_scatter(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                scatter: Any = _PairwiseReduceScatter(self)
                module.set_custom_reduce_scatter(scatter)
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                self._scatters.append(scatter)

    def start_step(self, epoch: int, step: RankStep) -> None:
        """Begin a step. Collective: broadcasts rank zero's buffers."""
        assert step.assignment is not None
        super().start_step(epoch, step)
        self._key = (epoch, step.number)
        self.num_micro_batches = -(-step.num_samples // self._micro_batch_size)
        self._numbers = step.assignment.all_ranks(self.num_micro_batches)
        self._place = 0
        self._sum = PairwiseSum()
        self._before = self._after_first = self._copy_buffers()

    @property
    def numbers_of_ranks(self) -> list[int]:
        """The number of each rank's present micro-batch; with ``fsdp``."""
        first = self._place * self._world_size
        return list(range(first, min(first + self._world_size, self.num_micro_batches)))

    @contextmanager
    def sync_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Return a context for the passes of the next micro-batch."""
        self.is_last = is_last
        mine = self._numbers[self._world.rank]
        # A rank without any has a batch without samples.
        self.number = number = mine[self._place] if mine else self.num_micro_batches
        if self._place:
            self._restore(self._before)
        seed_micro_batch(self._seed, *self._key, number, self._world.device)
        yield
        if not self._place:
            self._after_first = self._copy_buffers()
        gradients = [weight.grad for weight in self._trained]
        if self._scatters:
            self._check_used(gradients)
        elif number < self.num_micro_batches:
            if any(it is not None and it.layout != torch.strided for it in gradients):
                raise UsageError(
                    "--bitwise adds dense gradients, found a sparse one; expected "
                    "layers such as nn.Embedding without sparse=True"
                )
            self._sum.add((0, number), gradients)
        if not self._scatters or not is_last:
            for weight in self._trained:
                weight.grad = None
        self._place += 1

    def reduce_gradients(self) -> None:
        """Let every weight have the sum over all micro-batches. Collective."""
        self._restore(self._after_first)
        if self._scatters:
            self._agree_on_used()
            for scatter in self._scatters:
                scatter.end_step()
            return
        if self._world_size == 1:
            found = self._sum.total()
        else:
            found = self._sum_over_ranks()
        for weight, gradient in zip(self._trained, found, strict=True):
            weight.grad = gradient

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: it.clone() for name, it in self.named_buffers().items()}

    @torch.no_grad()
    def _restore(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.named_buffers().items():
            if name in values:
                buffer.copy_(values[name])

    def _check_used(self, gradients: Gradients) -> None:
        """Check that the same weights have gradients as in the first micro-batch.

        FSDP sends the others none, so that sums of unlike weights would be added.
        """
        used = [gradient is not None for gradient in gradients]
        self._used = self._used or used
        if used != self._used:
            raise UsageError(PARTLY_USED)

    def _agree_on_used(self) -> None:
        if not self._is_agreed:
            nums = torch.tensor(self._used, dtype=torch.int64).to(self._world.device)
            dist.all_reduce(nums)
            if any(num not in (0, self._world_size) for num in nums.tolist()):
                raise UsageError(PARTLY_USED).on_all_ranks()
            self._is_agreed = True

    @torch.no_grad()
    def _sum_over_ranks(self) -> Gradients:
        """Send each rank its part of all sums, add, and gather the parts."""
        rank, size = self._world.rank, self._world_size
        nodes_of_ranks = [nodes_of(numbers) for numbers in self._numbers]
        part = -(-self._flat.length // (2 * size)) * 2  # whole complex numbers
        mine = nodes_of_ranks[rank]
        counts = [part * len(nodes) for nodes in nodes_of_ranks]
        sent = self._kept("sent", size * counts[rank]).view(len(mine), size, part)
        for row, node in zip(sent, mine, strict=True):
            self._flat.pack(self._sum.nodes.pop(node), row.view(-1))
        received = self._kept("received", sum(counts))
        dist.all_to_all_single(
            received,
            sent.transpose(0, 1).reshape(-1),
            output_split_sizes=counts,
            input_split_sizes=[counts[rank]] * size,
        )
        tree, whole = PairwiseSum(), self._kept("whole", size * part)
        all_nodes = itertools.chain.from_iterable(nodes_of_ranks)
        for node, row in zip(all_nodes, torch.split(received, part), strict=True):
            tree.add(node, [row])
        (total,) = tree.total()
        assert total is not None
        all_gather_flat(whole, total)
        return self._flat.unpack(whole.to(self._world.device))

    def _kept(self, name: str, length: int) -> Tensor:
        """Return flat memory, of the last step if it is as long: new one is slow."""
        found = self._memory.get(name)
        if found is None or len(found) != length:
            # gloo has no all-to-all for GPUs.
            device = "cpu" if self._world.backend == "gloo" else self._world.device
            found = torch.zeros(length, dtype=self._flat.dtype, device=device)
            self._memory[name] = found
        return found


class FlatGradients:
    """Writes gradients of weights into flat memory, and reads them from it.

    Each begins at a multiple of `ALIGNMENT`. The end has a flag for each weight,
    whether it has a gradient.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        # What autograd gives a gradient: the weight's strides where it has no gaps.
        self._strides = [torch.empty_like(it, device="meta").stride() for it in weights]
        sizes = [it.numel() * (1 + it.is_complex()) for it in weights]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        *self._starts, self._end = itertools.accumulate(padded, initial=0)
        self._sizes = sizes
        self.length = self._end + len(weights)
        self.dtype = weights[0].dtype.to_real()

    def pack(self, gradients: Gradients, flat: Tensor) -> None:
        """Write gradients."""
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        flags = [float(gradient is not None) for gradient in gradients]
        flat[self._end : self.length] = torch.tensor(flags)

    def unpack(self, flat: Tensor) -> Gradients:
        """Return gradients, as views."""
        flags = flat[self._end : self.length].tolist()
        views = zip(self._views(flat), flags, strict=True)
        return [view if is_used else None for view, is_used in views]

    def _views(self, flat: Tensor) -> Iterable[Tensor]:
        for weight, start, size, strides in zip(
            self._weights, self._starts, self._sizes, self._strides, strict=True
        ):
            part = flat[start : start + size]
            if weight.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            yield part.as_strided(weight.shape, strides)


class _PairwiseReduceScatter:
    """Adds up what FSDP reduce-scatters, for one of its modules.

    A ``ReduceScatter`` of FSDP2, for `set_custom_reduce_scatter`; checked with 2.11 and
    2.14.
    """

    def __init__(self, model: BitwiseModel) -> None:
        self._model = model
        self._sum = PairwiseSum()
        self._num = 0  # micro-batches of the step that came

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Take the gradients of a micro-batch of each rank; after the last, sum."""
        del op, async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        rows = received.view(group.size(), -1)
        for number, row in zip(self._model.numbers_of_ranks, rows, strict=False):
            self._sum.add((0, number), [row])
            self._num += 1
        if self._model.is_last:
            (total,) = self._sum.total()
            assert total is not None
            output_tensor.copy_(total)

    def end_step(self) -> None:
        """Check that all micro-batches came, or none."""
        num, self._num, self._sum = self._num, 0, PairwiseSum()
        if num not in (0, self._model.num_micro_batches):
            raise UsageError(PARTLY_USED).on_all_ranks()


def seed_micro_batch(
    seed: int, epoch: int, step: int, number: int, device: str = "cpu"
) -> None:
    """Seed torch, NumPy and `random`, as for dropout."""
    key = f"{seed} {epoch} {step} {number}".encode()
    value = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())
    random.seed(value)
    np.random.seed(value)
    torch.default_generator.manual_seed(value)  # `torch.manual_seed` takes 0.1 ms
    if device != "cpu":
        torch.get_device_module(device).manual_seed(value)


def configure_bitwise(world: World, *, is_on: bool) -> None:
    """Set what the bits of a micro-batch depend on, for the whole process.

    On CPUs one thread for each rank: of oneDNN's convolutions, and of torch's layer
    norm, the last bits depend on the number of threads. A training without undoes it.
    """
    if not is_on and "num_threads" in previous_settings:
        torch.set_num_threads(previous_settings.pop("num_threads"))
    if not is_on or world.device != "cpu":
        return
    if world.is_rank_zero and world.num_threads > 1:
        logger.warning(
            "--bitwise computes with one thread per rank, found %d cores for each; "
            "start a rank on each core",
            world.num_threads,
        )
    if (before := torch.get_num_threads()) > 1:
        previous_settings["num_threads"] = before
    torch.set_num_threads(1)


def check_bitwise(
    samples: Samples, model: nn.Module, config: TrainConfig, world: World
) -> None:
    """Check that each rank has a micro-batch, and that none depends on the ranks."""
    size = config.bitwise_micro_batch_size
    num = -(-config.global_batch_size // size)
    error = ""
    if num < world.world_size and size > 1:  # a step may have too few samples
        error = (
            f"--bitwise cuts a step of {config.global_batch_size} samples into {num} "
            f"micro-batches of {size}, found {world.world_size} ranks; expected at "
            f"most {num} ranks, or in a new run --micro-batch-size "
            f"{max(1, config.global_batch_size // world.world_size)}"
        )
    elif samples.num_samples is None or samples.may_skip:
        error = (
            "--bitwise needs the samples of a step beforehand; it does not work with "
            "iterable data or --on-bad-sample skip"
        )
    elif any(isinstance(it, nn.SyncBatchNorm) for it in model.modules()):
        error = (
            "--bitwise does not go with nn.SyncBatchNorm, whose statistics are of "
            "all ranks; expected nn.BatchNorm2d, whose are of a micro-batch"
        )
    if error:
        raise UsageError(error).on_all_ranks()

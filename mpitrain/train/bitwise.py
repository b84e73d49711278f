"""Training with ``--bitwise``: the same bits on any number of ranks.

A step is cut into micro-batches that do not depend on the ranks. Each one's forward and
backward pass runs alone, with its own random numbers, and their gradients are added in
one order. So every number that is computed is the same, whichever rank computes it.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.sharding import Numbering
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.train.loader import RankStep
from mpitrain.train.parallel import ParallelModel
from mpitrain.train.step_metrics import all_gather_flat

logger = logging.getLogger("mpitrain")

Gradients: TypeAlias = list[Tensor | None]  # of the weights; None: not in the loss

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
        self,
        model: nn.Module,
        world: World,
        config: TrainConfig,
        strategy: str,
        numbering: Numbering,
    ) -> None:
        is_sharded = strategy == "fsdp"
        super().__init__(model, world, config, "fsdp" if is_sharded else "single")
        self.numbering = numbering
        self.buffers = list(model.buffers())
        self.numbers = range(0)  # of this rank's micro-batches of the step
        self._micro_batch_size = config.bitwise_micro_batch_size
        self._seed = config.seed
        self._world_size = world.world_size
        self._sum = PairwiseSum()
        self._num = self._place = 0
        self._key = (0, 0)  # epoch and step
        self._before: list[Tensor] = []
        self._after_first: list[Tensor] = []
        self._scatters = is_sharded and world.world_size > 1
        if self._scatters:
            self._set_reduce_scatter()

    def _set_reduce_scatter(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise UsageError(
                f"--bitwise with --strategy fsdp: torch {torch.__version__} cannot "
                "replace FSDP's reduce-scatter; expected torch 2.14, or --strategy ddp"
            ).on_all_ranks()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                scatter: Any = _PairwiseReduceScatter(self)
                module.set_custom_reduce_scatter(scatter)
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def start_step(self, epoch: int, step: RankStep) -> None:
        """Begin a step. Collective: broadcasts rank zero's buffers."""
        super().start_step(epoch, step)
        self._key = (epoch, step.number)
        self._num = -(-step.num_samples // self._micro_batch_size)
        self.numbers = self.numbering.of_rank(self._world.rank, self._num)
        self._place = 0
        self._sum = PairwiseSum()
        self._before = [buffer.clone() for buffer in self.buffers]
        self._after_first = self._before

    @property
    def ranks_numbers(self) -> list[int]:
        """The number of each rank's present micro-batch; with ``fsdp``."""
        first = self._place * self._world_size
        return list(range(first, min(first + self._world_size, self._num)))

    @property
    def is_last(self) -> bool:
        """Whether the present micro-batch is the last of the step."""
        return self._place + 1 == len(self.numbers)

    @contextmanager
    def sync_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Return a context for the passes of the next micro-batch."""
        del is_last
        number = self.numbers[self._place] if self.numbers else self._num
        self.number = number
        if self._place:
            self._restore(self._before)
        seed_micro_batch(self._seed, *self._key, number, self._world.device)
        yield
        if not self._place:
            self._after_first = [buffer.clone() for buffer in self.buffers]
        if self._scatters:
            if not self.is_last:
                for weight in self.weights:
                    weight.grad = None
        elif number < self._num:
            self._sum.add((0, number), [weight.grad for weight in self.weights])
            for weight in self.weights:
                weight.grad = None
        self._place += 1

    def reduce_gradients(self) -> None:
        """Let every weight have the sum over all micro-batches. Collective."""
        self._restore(self._after_first)
        if self._scatters:
            return
        if self._world_size == 1:
            found = self._sum.total()
        else:
            found = self._sum_over_ranks()
        for weight, gradient in zip(self.weights, found, strict=True):
            weight.grad = gradient

    @torch.no_grad()
    def _restore(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def _sum_over_ranks(self) -> Gradients:
        weights = self.weights
        of_ranks = [nodes_of(part) for part in self.numbering.all_ranks(self._num)]
        counts, mine = [len(nodes) for nodes in of_ranks], of_ranks[self._world.rank]
        sizes = [weight.numel() * (1 + weight.is_complex()) for weight in weights]
        length = sum(sizes) + len(weights)  # a flag each, whether there is a gradient
        chunk = -(-length // self._world_size)
        dtype = weights[0].dtype.to_real()
        # gloo has no all-to-all for GPUs.
        device = "cpu" if self._world.backend == "gloo" else self._world.device
        sent = torch.zeros(
            (len(mine), self._world_size * chunk), dtype=dtype, device=device
        )
        for row, node in zip(sent, mine, strict=True):
            gradients = self._sum.nodes.pop(node)
            *parts, flags = torch.split(row[:length], [*sizes, len(weights)])
            for part, gradient in zip(parts, gradients, strict=True):
                if gradient is not None:
                    part.view_as(_real(gradient)).copy_(_real(gradient))
            flags.copy_(torch.tensor([float(it is not None) for it in gradients]))
        of_owners = sent.view(len(mine), self._world_size, chunk).transpose(0, 1)
        received = sent.new_empty((sum(counts), chunk))
        dist.all_to_all_single(
            received,
            of_owners.reshape(-1, chunk),
            output_split_sizes=counts,
            input_split_sizes=[len(mine)] * self._world_size,
        )
        nodes = [node for nodes in of_ranks for node in nodes]
        for node, row in zip(nodes, received, strict=True):
            self._sum.add(node, [row])
        (total,) = self._sum.total()
        whole = sent.new_empty(self._world_size * chunk)
        assert total is not None
        all_gather_flat(whole, total)
        whole = whole.to(self._world.device)
        *found, flags = torch.split(whole[:length], [*sizes, len(weights)])
        return [
            _like(weight, flat) if is_used else None
            for weight, flat, is_used in zip(
                weights, found, flags.tolist(), strict=True
            )
        ]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(weight: Tensor, flat: Tensor) -> Tensor:
    if weight.is_complex():
        return torch.view_as_complex(flat.view(*weight.shape, 2))
    return flat.view(weight.shape)


class _PairwiseReduceScatter:
    """Adds up what FSDP reduce-scatters, for one of its modules.

    A ``ReduceScatter`` of FSDP2, for `set_custom_reduce_scatter`; checked with 2.14.
    """

    def __init__(self, model: BitwiseModel) -> None:
        self._model = model
        self._sum = PairwiseSum()

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
        for number, row in zip(self._model.ranks_numbers, rows, strict=False):
            self._sum.add((0, number), [row])
        if self._model.is_last:
            (total,) = self._sum.total()
            assert total is not None
            output_tensor.copy_(total)


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


def configure_bitwise(world: World) -> None:
    """Set what the bits of a micro-batch depend on, for the whole process.

    On CPUs one thread for each rank: of oneDNN's convolutions, and of torch's layer
    norm, the last bits depend on the number of threads.
    """
    if world.device != "cpu":
        return
    if world.is_rank_zero and world.num_threads > 1:
        logger.warning(
            "--bitwise computes with one thread per rank, found %d cores for each; "
            "start a rank on each core",
            world.num_threads,
        )
    torch.set_num_threads(1)


def check_micro_batches(config: TrainConfig, world: World) -> None:
    """Check that each rank has a micro-batch; a step may have too few samples."""
    size = config.bitwise_micro_batch_size
    num = -(-config.global_batch_size // size)
    if num < world.world_size and size > 1:
        raise UsageError(
            f"--bitwise cuts a step of {config.global_batch_size} samples into {num} "
            f"micro-batches of {size}, found {world.world_size} ranks; expected as "
            "many micro-batches at least: --micro-batch-size "
            f"{max(1, config.global_batch_size // world.world_size)}"
        ).on_all_ranks()

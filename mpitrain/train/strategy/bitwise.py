"""Training with ``--bitwise``: the same bits on any number of ranks.

A step is cut into micro-batches that do not depend on the ranks. Each one's forward and
backward pass runs alone, with its own random numbers, and their gradients are added in
one order. So every number that is computed is the same, whichever rank computes it.

A step of DDP: rank zero broadcasts its buffers; each rank adds up the gradients of its
micro-batches, as far as they are neighbours in the tree (`PairwiseSum`); by an
all-to-all each gets its part of all sums, adds these, and all-gathers the parts. With
FSDP ranks take micro-batches in turn, and each one's backward pass has an all-to-all in
place of the reduce-scatter. docs/decisions/0013 says why.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples
from mpitrain.data.randomness import seed_all, step_seed
from mpitrain.data.sharding import MicroBatchAssignment
from mpitrain.errors import UsageError
from mpitrain.exact_sum import sum_exactly
from mpitrain.mpi.world import World
from mpitrain.torch_compat import all_gather_flat, foreach_norm, is_compiled
from mpitrain.train.precision import configure_torch
from mpitrain.train.step_metrics import sum_over_ranks
from mpitrain.train.strategy.balance import Balance
from mpitrain.train.strategy.base import Strategy, can_be_fused, norm_of, number_of
from mpitrain.train.strategy.fsdp import FSDPStrategy
from mpitrain.train.strategy.pairwise import (
    FlatGradients,
    Gradients,
    PairwiseSum,
    nodes_of,
)

logger = logging.getLogger("mpitrain")

PARTLY_USED = (
    "--bitwise with --strategy fsdp: a weight takes part in some micro-batches only, "
    "or more than once in one; expected once in each, or never, or --strategy ddp"
)

VECTOR_SIZE = 64  # numbers: a multiple of any processor's vectors


class BitwiseDDPStrategy(Strategy):
    """A copy of the model on every rank; the sum of gradients has the same bits.

    Each rank adds up the gradients of its micro-batches; at the end of a step every
    rank adds a part of those of all ranks, and all-gathers the parts. Buffers, such as
    the statistics of batch norm, become those of the first micro-batch.
    """

    name = "ddp"
    # Not superfluous: they come before FSDP's in `BitwiseFSDPStrategy`.
    averages_gradients = False
    reduces_in_backward = False
    micro_batches_are_fixed = True
    is_interleaved = False  # whether each rank takes one micro-batch in turn

    assignment: MicroBatchAssignment

    def __init__(self, config: TrainConfig, world: World) -> None:
        super().__init__(config, world)
        self._max_micro_batches = -(-config.global_batch_size // self.micro_batch_size)
        self._balance: Balance | None = None
        self._memory: dict[str, Tensor] = {}

    # --- before the model is wrapped ----------------------------------------------

    def configure_torch(self) -> None:
        """Let torch be deterministic, with one thread for each rank on CPUs."""
        # Of convolutions (oneDNN) and of layer norm the last bits depend on it.
        world, is_on_cpu = self.world, self.world.device == "cpu"
        if is_on_cpu and world.is_rank_zero and world.num_threads > 1:
            logger.warning(
                "--bitwise computes with one thread per rank, found %d cores for each; "
                "start a rank on each core",
                world.num_threads,
            )
        configure_torch(
            tf32=self.config.tf32,
            is_deterministic=self.config.deterministic or not is_on_cpu,
            num_threads=1 if is_on_cpu else None,
        )

    def check_samples(self, samples: Samples) -> None:
        """Refuse too many ranks, and data whose steps are not known beforehand."""
        size, num = self.micro_batch_size, self._max_micro_batches
        world_size = self.world.world_size
        if num < world_size and size > 1:  # a step may have too few samples
            global_batch_size = self.config.global_batch_size
            raise UsageError(
                f"--bitwise cuts a step of {global_batch_size} samples into {num} "
                f"micro-batches of {size}, found {world_size} ranks; expected at "
                f"most {num} ranks, or in a new run --micro-batch-size "
                f"{max(1, global_batch_size // world_size)}"
            ).on_all_ranks()
        if samples.num_samples is None or samples.may_skip:
            raise UsageError(
                "--bitwise needs the samples of a step beforehand; it does not work "
                "with iterable data or --on-bad-sample skip"
            ).on_all_ranks()

    def check_model(self, model: nn.Module) -> None:
        """Refuse what mixes the samples of several ranks, or compiles."""
        if any(isinstance(it, nn.SyncBatchNorm) for it in model.modules()):
            raise UsageError(
                "--bitwise does not go with nn.SyncBatchNorm, whose statistics are of "
                "all ranks; expected nn.BatchNorm2d, whose are of a micro-batch"
            ).on_all_ranks()
        if is_compiled(model):
            raise UsageError(
                "--bitwise does not go with torch.compile; expected a plain model"
            ).on_all_ranks()
        super().check_model(model)

    def check_all_gather(self, num_samples: int) -> None:
        """Refuse it: each micro-batch is computed alone."""
        raise UsageError(
            "all_gather does not go with --bitwise, whose micro-batches are each "
            "computed alone; expected no --bitwise"
        ).on_all_ranks()

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch, on any number of ranks."""
        return self.config.bitwise_micro_batch_size

    def max_rows(self, num_samples: int) -> int:
        """Return the samples of the largest micro-batch of a step of so many."""
        return min(num_samples, self.micro_batch_size)

    def evaluation_batch_size(self, num_samples: int | None) -> int:
        """Return that of a micro-batch: kernels differ with the number of rows."""
        del num_samples
        return self.micro_batch_size

    def batch_line(self) -> str:
        """Return a line with the factors of the global batch size."""
        ranks = f"{self.world.world_size} rank{'s' * (self.world.world_size != 1)}"
        return (
            f"{self.config.global_batch_size} per step = {self._max_micro_batches} "
            f"micro-batches of {self.micro_batch_size}, on {ranks}"
        )

    # --- a stage ------------------------------------------------------------------

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Take the model of a stage as it is."""
        super().wrap(model, find_unused_parameters=find_unused_parameters)
        self.assignment = MicroBatchAssignment(
            world_size=self.world.world_size, is_interleaved=self.is_interleaved
        )
        can_balance = self.world.world_size > 1 and not self.is_interleaved
        is_balanced = can_balance and self.config.balance == "auto"
        self._balance = Balance() if is_balanced else None
        # Those that a user freezes later have no gradient. In this order on all ranks.
        self._trained = list(self.named_weights().values())
        self._flat = FlatGradients(self._trained)
        self._memory.clear()

    def parameter_groups(
        self, weights: list[nn.Parameter], optimizer: str
    ) -> list[dict[str, Any]]:
        """Return groups of weights of which SGD is fused, and of others."""
        if optimizer != "sgd":
            return [{"params": weights}]
        # On CPUs a fused kernel rounds as the others do, but behind the last whole
        # vector (torch 2.14; tests/mpi/test_bitwise.py): a shard would differ there.
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for weight in weights:
            is_whole = weight.is_cpu and weight.numel() % VECTOR_SIZE == 0
            groups[is_whole and can_be_fused(weight)].append(weight)
        return [
            {"params": group, "fused": is_fused or None}
            for is_fused, group in groups.items()
            if group
        ]

    def rebalance(self, seconds: Sequence[float]) -> None:
        """Let slow ranks take fewer micro-batches from the next step on."""
        if self._balance is None:
            return
        num = self._max_micro_batches
        found = self._balance.assignment(self.assignment, num, list(seconds))
        if found is not self.assignment:
            self.assignment = found
            self.micro_batch_counts = [len(part) for part in found.all_ranks(num)]
            logger.info("micro-batches of each rank: %s", self.micro_batch_counts)

    # --- a step -------------------------------------------------------------------

    def begin_step(self, epoch: int, step: int, num_samples: int) -> None:
        """Begin a step. Collective: broadcasts rank zero's buffers."""
        self.broadcast_buffers()
        self._key = (epoch, step)
        self.num_micro_batches = -(-num_samples // self.micro_batch_size)
        self.numbers_of_ranks = self.assignment.all_ranks(self.num_micro_batches)
        self._place = 0  # of the micro-batch among this rank's
        self._sum = PairwiseSum()
        # Each micro-batch begins with these buffers, and those after the first stay. It
        # is rank zero's, which sends them to all before the next step.
        self._before = self._after_first = self._copy_buffers()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Return a context for the passes of the next micro-batch."""
        self.is_last = is_last
        mine = self.numbers_of_ranks[self.world.rank]
        # A rank without any has a batch without samples.
        number = mine[self._place] if mine else self.num_micro_batches
        if self._place:
            self._restore(self._before)
        self._begin_micro_batch(number)
        yield
        if not self._place:
            self._after_first = self._copy_buffers()
        self._add_gradients(number)
        self._place += 1

    def _begin_micro_batch(self, number: int) -> None:
        self.micro_batch_number = number
        seed, part = self.config.seed, self.pass_name
        seed_micro_batch(seed, *self._key, number, self.world.device, part)

    def _add_gradients(self, number: int) -> None:
        """Take the gradients of a micro-batch out of the weights."""
        gradients = [weight.grad for weight in self._trained]
        if any(it is not None and it.layout != torch.strided for it in gradients):
            raise UsageError(
                "--bitwise adds dense gradients, found a sparse one; expected "
                "layers such as nn.Embedding without sparse=True"
            )
        if number < self.num_micro_batches:
            self._sum.add((0, number), gradients)
        # Else the next backward pass would add to them, in the order of this rank.
        for weight in self._trained:
            weight.grad = None

    def reduce_gradients(self) -> None:
        """Let every weight have the sum over all micro-batches. Collective."""
        self._restore(self._after_first)
        is_alone = self.world.world_size == 1
        found = self._sum.total() if is_alone else self._sum_over_ranks()
        for weight, gradient in zip(self._trained, found, strict=True):
            weight.grad = gradient

    @contextmanager
    def recompute(self, number: int) -> Iterator[None]:
        """Return a context to compute any micro-batch again; it leaves nothing; local.

        After those of this rank, before `reduce_gradients`.
        """
        buffers, kept = self._copy_buffers(), self.micro_batch_number
        self._restore(self._before)
        self._begin_micro_batch(number)
        yield
        for weight in self._trained:
            weight.grad = None
        self._restore(buffers)
        self.micro_batch_number = kept

    def sum_of_weights(self, weights: Sequence[Tensor]) -> float:
        """Add up the weights of all micro-batches, rounded once. Collective."""
        num, mine = self.num_micro_batches, self.numbers_of_ranks[self.world.rank]
        whole = torch.zeros(num, dtype=torch.float64, device=self.world.device)
        for number, weight in zip(mine, weights, strict=False):
            if number < num:  # else of padding
                whole[number] = weight
        return sum_exactly(sum_over_ranks(whole).tolist())

    def _copy_buffers(self) -> dict[str, Tensor]:
        return {name: it.clone() for name, it in self.named_buffers().items()}

    @torch.no_grad()
    def _restore(self, values: Mapping[str, Tensor]) -> None:
        for name, buffer in self.named_buffers().items():
            if name in values:
                buffer.copy_(values[name])

    @torch.no_grad()
    def _sum_over_ranks(self) -> Gradients:
        """Send each rank its part of all sums, add, and gather the parts."""
        rank, size = self.world.rank, self.world.world_size
        # What each rank has is known by numbers alone: nothing is exchanged before.
        nodes_of_ranks = [nodes_of(numbers) for numbers in self.numbers_of_ranks]
        part = -(-self._flat.length // (2 * size)) * 2  # whole complex numbers
        mine = nodes_of_ranks[rank]
        counts = [part * len(nodes) for nodes in nodes_of_ranks]
        sent = self._kept("sent", size * counts[rank]).view(len(mine), size, part)
        for row, node in zip(sent, mine, strict=True):
            self._flat.pack(self._sum.nodes.pop(node), row.view(-1))
        received = self._kept("received", sum(counts))
        # Sent by receiver, and for each by node; received by sender, and so by node.
        dist.all_to_all_single(
            received,
            sent.transpose(0, 1).reshape(-1),
            output_split_sizes=counts,
            input_split_sizes=[counts[rank]] * size,
        )
        tree, whole = PairwiseSum(), self._kept("whole", size * part)
        all_nodes = itertools.chain.from_iterable(nodes_of_ranks)
        # The sums are written over what was received: this is not read again.
        for node, row in zip(all_nodes, torch.split(received, part), strict=True):
            tree.add(node, [row])
        (total,) = tree.total()
        assert total is not None
        all_gather_flat(whole, total)
        # Gradients are views of kept memory, until the next step drops them.
        return self._flat.unpack(whole.to(self.world.device))

    def _kept(self, name: str, length: int) -> Tensor:
        """Return flat memory, of the last step if it is as long: new one is slow."""
        found = self._memory.get(name)
        if found is None or len(found) != length:
            # gloo has no all-to-all for GPUs.
            device = "cpu" if self.world.backend == "gloo" else self.world.device
            found = torch.zeros(length, dtype=self._flat.dtype, device=device)
            self._memory[name] = found
        return found


class BitwiseSingleStrategy(BitwiseDDPStrategy):
    """The same in one process."""

    name = "single"


class BitwiseFSDPStrategy(BitwiseDDPStrategy, FSDPStrategy):
    """Reduce-scatters each micro-batch of the sharded model, and adds up the shards."""

    name = "fsdp"
    is_interleaved = True

    def for_head(self) -> Strategy:
        """Return a strategy without shards: a head is small."""
        return BitwiseDDPStrategy(self.config, self.world)

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Shard the model, and replace the reduce-scatter of each of its blocks."""
        from torch.distributed.fsdp import FSDPModule

        super().wrap(model, find_unused_parameters=find_unused_parameters)
        # By pass: whether a weight has a gradient, and if that is agreed on.
        self._used: dict[str, list[bool]] = {}
        self._is_agreed: set[str] = set()
        self._scatters: list[_PairwiseReduceScatter] = []
        if self.world.world_size == 1:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                scatter: Any = _PairwiseReduceScatter(self)
                module.set_custom_reduce_scatter(scatter)
                # A sum that FSDP neither divides before nor after: that would round.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                self._scatters.append(scatter)

    def parameter_groups(
        self, weights: list[nn.Parameter], optimizer: str
    ) -> list[dict[str, Any]]:
        """Return one group: fused kernels do not take shards."""
        return FSDPStrategy.parameter_groups(self, weights, optimizer)

    def check_optimizer(self, kind: str, *, is_by_number: bool) -> None:
        """Refuse one whose last bits may depend on the shards."""
        if not is_by_number:
            raise UsageError(
                f"optimizer= made {kind}: its last bits may depend on the shards, which"
                " --bitwise with --strategy fsdp does not allow; expected one of those "
                "of --optimizer, not fused, or ddp"
            ).on_all_ranks()

    @property
    def present_numbers(self) -> range:
        """The number of each rank's present micro-batch."""
        # Called within a backward pass: `micro_batch` counts `_place` up after it.
        first = self._place * self.world.world_size
        return range(first, min(first + self.world.world_size, self.num_micro_batches))

    def _add_gradients(self, number: int) -> None:
        """Take the gradients; FSDP has sent them to the ranks with the shards."""
        if not self._scatters:
            super()._add_gradients(number)
            return
        # FSDP sends no gradient of the others, so that sums of unlike weights would
        # be added.
        used = [weight.grad is not None for weight in self._trained]
        if used != self._used.setdefault(self.pass_name, used):
            raise UsageError(PARTLY_USED)
        # Before the last one nothing was written to what FSDP puts there.
        if not self.is_last:
            for weight in self._trained:
                weight.grad = None

    def reduce_gradients(self) -> None:
        """Check that every rank has its shard of the sum. Collective."""
        if not self._scatters:
            super().reduce_gradients()
            return
        self._restore(self._after_first)
        self._agree_on_used()
        for scatter in self._scatters:
            scatter.end_step()

    def grad_norm(self, gradients: list[Any]) -> float | Tensor:
        """Return the norm of the whole gradients; collective."""
        # Norms of shards would be added in another order on other numbers of ranks.
        if not self._are_alike:
            whole = [it.full_tensor() for it in gradients]
            return number_of(nn.utils.get_total_norm(whole))
        # One after another: together they take the memory of DDP.
        return norm_of([foreach_norm([it.full_tensor()])[0] for it in gradients])

    def _agree_on_used(self) -> None:
        # Once for each pass: `_add_gradients` compares each rank with its own first.
        if self.pass_name not in self._is_agreed:
            used = self._used[self.pass_name]
            nums = torch.tensor(used, dtype=torch.int64).to(self.world.device)
            dist.all_reduce(nums)
            if any(num not in (0, self.world.world_size) for num in nums.tolist()):
                raise UsageError(PARTLY_USED).on_all_ranks()
            self._is_agreed.add(self.pass_name)


class _PairwiseReduceScatter:
    """Adds up what FSDP reduce-scatters, for one of its modules.

    A ``ReduceScatter`` of FSDP2, for `set_custom_reduce_scatter`; checked with 2.11 and
    2.14.
    """

    def __init__(self, strategy: BitwiseFSDPStrategy) -> None:
        self._strategy = strategy
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
        # Rows by rank, and so by number; of padding, at the end of a step, none counts.
        for number, row in zip(self._strategy.present_numbers, rows, strict=False):
            self._sum.add((0, number), [row])
            self._num += 1
        if self._strategy.is_last:
            (total,) = self._sum.total()
            assert total is not None
            output_tensor.copy_(total)

    def end_step(self) -> None:
        """Check that all micro-batches came, or none."""
        num, self._num, self._sum = self._num, 0, PairwiseSum()
        if num not in (0, self._strategy.num_micro_batches):
            raise UsageError(PARTLY_USED).on_all_ranks()


def seed_micro_batch(
    seed: int, epoch: int, step: int, number: int, device: str = "cpu", part: str = ""
) -> None:
    """Seed torch, NumPy and `random`, as for dropout."""
    seed_all(step_seed(seed, epoch, step, f"{number}{part}"), device)

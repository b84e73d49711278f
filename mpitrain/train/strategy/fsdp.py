"""Weights, gradients and optimizer state sharded over the ranks: torch's FSDP2."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import StrategyConfig
from mpitrain.data.samples import to_dtype
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.torch_compat import reshard
from mpitrain.train.model import BatchNorm, copy_to_cpu, find_blocks
from mpitrain.train.precision import DTYPES
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.strategy.ddp import DDPStrategy

# What torch says of a freed weight, by a part of it.
FREED = "storage of size 0", "not allocated yet"


class FSDPStrategy(Strategy):
    """Shards the model in place; a pass gathers the weights of one block at a time."""

    name = "fsdp"
    averages_gradients = True
    reduces_in_backward = True
    is_sharded = True

    def for_head(self) -> Strategy:
        """Return DDP: a head is small, and its model calls it unsharded."""
        return DDPStrategy(self.config, self.world)

    def make_weights(self, model: nn.Module, make: Callable[[nn.Module], None]) -> None:
        """Make and shard one block after the other: no rank has the whole model."""
        fully_shard_model(model, self.world, self.config, make)

    def check_model(self, model: nn.Module) -> None:
        """Refuse layers of sparse gradients, which torch does not reduce-scatter."""
        for name, module in model.named_modules():
            if getattr(module, "sparse", None) is True:  # Embedding, EmbeddingBag
                raise UsageError(
                    f"{name or 'the model'} has sparse=True, and --strategy fsdp "
                    "shards dense gradients alone; expected a layer without it, or "
                    "--strategy ddp"
                ).on_all_ranks()

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Shard the model by `fully_shard`, if no stage before has."""
        # Imported here and below: it takes a second, which the others do not need.
        from torch.distributed.fsdp import FSDPModule

        if not self.world.is_rank_zero:  # torch 2.14 warns of a view, such as logits
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        # Made on meta, it is sharded by `make_weights`; and once for all stages.
        if not isinstance(model, FSDPModule):
            fully_shard_model(model, self.world, self.config)
        super().wrap(model, find_unused_parameters=find_unused_parameters)

    def parameter_groups(
        self, weights: list[nn.Parameter], optimizer: str
    ) -> list[dict[str, Any]]:
        """Return one group, not fused."""
        del optimizer
        # torch 2.15: "aten._fused_sgd_.default does not have a sharding strategy".
        return [{"params": weights}]

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Return a context: gradients are reduced in the last micro-batch only."""
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        try:
            yield
        except RuntimeError as error:
            if any(reason in str(error) for reason in FREED):
                error.add_note(
                    "With --strategy fsdp whole weights are freed after the forward "
                    "pass; expected --strategy ddp, or derivatives within forward"
                )
            raise

    def call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, which casts by itself."""
        outputs = module(*args, **kwargs)
        return to_dtype(outputs, torch.float32) if self._is_16_bit else outputs

    def reduce_gradients(self) -> None:
        """Check that the ranks have reduced the gradients of the same weights.

        Collective. FSDP2 sends a weight without a gradient on this rank none. If the
        others' messages are as long, as with heads of one shape that take turns, it
        adds up gradients of unlike weights, and says nothing (torch 2.15).
        """
        if self.world.world_size == 1:
            return
        named = self.named_weights()
        used = [weight.grad is not None for weight in named.values()]
        digest = hashlib.blake2b(bytes(used), digest_size=4).digest()
        number = int.from_bytes(digest)
        # The maximum of n and of -n: whether all are equal, by one small all-reduce.
        bounds = torch.tensor([number, -number], device=self.world.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        largest, least = bounds.tolist()
        if largest == -least:
            return
        of_ranks: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(of_ranks, used)
        pairs = zip(named, zip(*of_ranks, strict=True), strict=True)
        name, found = next((it, had) for it, had in pairs if len({*had}) > 1)
        raise UsageError(
            f"--strategy fsdp: in this step {name} has a gradient on rank "
            f"{found.index(True)} and none on rank {found.index(False)}, where torch "
            "adds up gradients of unlike weights; expected a weight to take part on "
            "all ranks or on none, or --strategy ddp"
        ).on_all_ranks()

    def grad_norm(self, gradients: list[Any]) -> float | Tensor:
        """Return the norm over all shards; collective."""
        norm: Any = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor())

    def reshard(self) -> None:
        """Free the weights that a pass has gathered: they have changed; local."""
        reshard([self.model])

    def full_state(self) -> Iterator[tuple[str, Any]]:
        """Give the ``state_dict`` on rank zero's CPU, weight by weight; collective.

        Rank zero has as many of them as its caller keeps; no other rank, and no GPU,
        has more than one.
        """
        # All ranks ask for each weight, which is a collective; rank zero alone copies.
        for name, value in self.model.state_dict().items():
            if hasattr(value, "full_tensor"):  # with cpu_offload it is on the CPU
                value = value.to(value.device_mesh.device_type).full_tensor()
            if self.world.is_rank_zero:
                yield from copy_to_cpu({name: value}).items()


def fully_shard_model(
    model: nn.Module,
    world: World,
    config: StrategyConfig,
    make: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """Shard the model in place, block by block; collective.

    ``make`` is called with each part before it is sharded.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    dtype = DTYPES[config.precision]
    options: dict[str, Any] = {"mesh": _mesh(world, config)}
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if dtype.itemsize == 2:
        # Batch norm stays in fp32, as under autocast: torch's wants its statistics so.
        for module in model.modules():
            if isinstance(module, BatchNorm):
                make(module)
                fully_shard(module, **options)
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32
        )
    num_owners = _count_owners(model)
    # Blocks first, then the model: it takes what is in no group yet.
    for block in find_blocks(model):
        # Not where it shares a weight with others: a weight has one group, here the
        # model's.
        if _count_owners(block).items() <= num_owners.items():
            make(block)
            fully_shard(block, **options)
    make(model)
    fully_shard(model, **options)


def _count_owners(module: nn.Module) -> Counter[int]:
    """Return how many names each weight has, by its id."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(id(weight) for _, weight in named)


def _mesh(world: World, config: StrategyConfig) -> Any:
    """Shard over all ranks, or within each node and replicate across nodes."""
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(world.device).type
    if not config.hybrid_sharding or world.num_nodes == 1:
        return init_device_mesh(kind, (world.world_size,), mesh_dim_names=("shard",))
    # A mesh is a table of ranks in their order: a row has to be a node.
    sizes = {len(node.ranks) for node in world.nodes}
    in_order = [rank for node in world.nodes for rank in node.ranks]
    if len(sizes) > 1 or in_order != list(range(world.world_size)):
        raise UsageError(
            "--hybrid-sharding wants as many ranks on every node, and those of a node "
            "one after another; expected the launcher to fill one node after another"
        )
    shape = (world.num_nodes, sizes.pop())
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

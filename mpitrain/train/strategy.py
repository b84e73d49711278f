"""How a model is spread over the ranks: DDP, FSDP, DP or not at all."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mpitrain.errors import LaunchError, UsageError, agreed
from mpitrain.launch.ending import is_consequence
from mpitrain.launch.shared import Ranks
from mpitrain.train.config import StrategyConfig
from mpitrain.world import World

logger = logging.getLogger("mpitrain")

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"  # before torch 2.15
)

BROADCAST_BYTES = 250 << 20
"""Of buffers that travel together, as DDP has it."""

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def chosen_strategy(config: StrategyConfig, world: World) -> str:
    """Return ``ddp``, ``fsdp``, ``dp`` or ``single``.

    Raises:
        UsageError: What was asked for cannot be done by these ranks, or on this device.
    """
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ddp" if world.world_size > 1 else "single"
    why_not = _why_not(strategy, config, world)
    if why_not:
        raise agreed(UsageError(why_not))
    return strategy


def _why_not(strategy: str, config: StrategyConfig, world: World) -> str:
    """Say why these ranks cannot do what was asked for; empty if they can."""
    if strategy in ("dp", "single") and world.world_size > 1:
        return (
            f"--strategy {strategy} is for one process, found {world.world_size} "
            "ranks; start one (without mpirun), or take ddp"
        )
    on_cpu = world.device == "cpu"
    if strategy == "dp" and on_cpu:
        return (
            "--strategy dp spreads a batch over the GPUs of one process, found none; "
            "expected GPUs, or ddp, which is faster there, too"
        )
    if config.sync_batchnorm and on_cpu:
        return (
            "--sync-batchnorm: torch has it for GPUs alone (SyncBatchNorm expects "
            "input tensor to be on GPU), found device cpu; leave it out, or use a norm "
            "that does not mix samples, such as group norm"
        )
    if strategy == "dp" and (config.compile or config.activation_checkpointing):
        return (
            "--strategy dp copies the model in each step, which --compile and "
            "--activation-checkpointing do not survive; expected ddp"
        )
    if config.cpu_offload and on_cpu:
        return "--cpu-offload: weights are in host memory already"
    return ""


def prove_reductions(
    strategy: str, config: StrategyConfig, world: World, ranks: Ranks
) -> None:
    """Call each collective that a strategy relies on once, on a tensor of known result.

    Collective over the default group. Gloo of torch 2.8 gives the sum where FSDP asks
    ``reduce_scatter_tensor`` for the average.

    Args:
        strategy: ``ddp`` or ``fsdp``; others call none.
        config: What was asked for.
        world: Where this process stands.
        ranks: All of them.

    Raises:
        LaunchError: One gave something else; on every rank or on none.
    """
    rank, size = world.rank, world.world_size
    if size == 1:
        return
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    whole = torch.arange(1, size + 1, dtype=dtype, device=world.device)
    mean = (size + 1) / 2

    def broadcast() -> Tensor:
        values = whole[rank].clone()
        dist.broadcast(values, src=0)
        return values

    def all_reduce(op: Any) -> Tensor:
        values = whole[rank].clone()
        dist.all_reduce(values, op=op)
        return values

    def all_gather() -> Tensor:
        values = torch.empty_like(whole)
        all_gather_single()(values, whole[rank : rank + 1])
        return values

    def reduce_scatter(op: Any) -> Tensor:
        values = torch.empty_like(whole[:1])
        reduce_scatter_single()(values, whole + rank, op=op)
        return values

    total, average = dist.ReduceOp.SUM, dist.ReduceOp.AVG
    proofs: dict[str, tuple[Callable[[], Tensor], Any]] = {
        "broadcast": (broadcast, 1.0),
        "all_reduce (sum)": (lambda: all_reduce(total), mean * size),
    }
    if strategy == "fsdp":
        proofs["all_gather_into_tensor"] = (all_gather, whole)
        proofs["reduce_scatter_tensor (sum)"] = (
            lambda: reduce_scatter(total),
            (mean + rank) * size,
        )
        if dtype == torch.float32:  # in float64 FSDP divides the sum itself
            proofs["reduce_scatter_tensor (avg)"] = (
                lambda: reduce_scatter(average),
                mean + rank,
            )
            proofs["all_reduce (avg)"] = (lambda: all_reduce(average), mean)
    wrong = ""
    for name, (call, expected) in proofs.items():
        try:
            found = call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if is_consequence(error):
                raise  # another rank's end; that rank says why
            wrong = f"{name} failed: {error}"
            break
        if not torch.allclose(found, torch.as_tensor(expected).to(found)):
            right = expected.tolist() if isinstance(expected, Tensor) else expected
            wrong = f"{name} gave {found.squeeze().tolist()}, expected {right}"
            break
    for other, said in enumerate(ranks.tell_all(wrong)):
        if said:
            raise agreed(
                LaunchError(
                    f"torch {torch.__version__}, backend {world.backend}: {said} on "
                    f"rank {other}; --strategy {strategy} would train with wrong "
                    "gradients.\nExpected torch 2.9 or newer, or another --strategy or "
                    "--backend; `mpirun ... python -m mpitrain check` tries every "
                    "collective"
                )
            )


def all_gather_single() -> Any:
    """Return ``all_gather_into_tensor`` by the name that FSDP calls it by."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Any:
    """Return ``reduce_scatter_tensor`` by the name that FSDP calls it by."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def casting(
    config: StrategyConfig, world: World
) -> contextlib.AbstractContextManager[Any]:
    """Let products be computed in 16 bits, where they are asked for; local."""
    dtype = DTYPES[config.precision]
    if dtype.itemsize == 2:
        return torch.autocast(torch.device(world.device).type, dtype)
    return contextlib.nullcontext()


class Replica:
    """A model, spread over the ranks.

    Args:
        model: Equal on all ranks; on this rank's device. FSDP changes it in place.
        world: Where this process stands.
        config: What was asked for.
        strategy: ``ddp``, ``fsdp``, ``dp`` or ``single``.
        all_used: Whether every weight is known to take part in the loss. Where one does
            not and DDP is not told to look, it leaves gradients beside it unreduced,
            and complains only at the next forward.

    Attributes:
        model: Whose weights they are.
        module: What is called.
        shared_buffers: What `share_buffers` shares.
        sure_weights: That get their gradients in every ``backward``, before DDP waits
            for those of others; empty: not known which do.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        config: StrategyConfig,
        strategy: str,
        *,
        all_used: bool = False,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self._config, self._world = config, world
        self._casts = DTYPES[config.precision].itemsize == 2 and strategy != "fsdp"
        if strategy == "fsdp":
            _fully_shard(model, world, config)
        if config.compile:
            model.compile()
        self.module: nn.Module = model
        self.shared_buffers: list[Tensor] = []
        is_sure = strategy == "ddp" and all_used and not config.compile
        self.sure_weights = self.weights if is_sure else []
        if strategy == "ddp":
            warnings.filterwarnings("ignore", message=".*find_unused_parameters=True")
            sync_buffers: Any = {_SYNC_BUFFERS: False}  # `share_buffers` does it
            self.module = DistributedDataParallel(
                model,
                gradient_as_bucket_view=True,
                find_unused_parameters=not all_used,
                **sync_buffers,
            )
            self.shared_buffers = list(model.buffers())
        elif strategy == "dp":
            self.module = DataParallel(model)

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those that learn."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    @property
    def statistics(self) -> list[Tensor]:
        """Buffers that move as the model trains, such as batch norm's."""
        return [it for it in self.model.buffers() if it.is_floating_point()]

    def moving(self) -> dict[str, Tensor]:
        """Return what changes as the model trains, by name: `weights`, `statistics`."""
        kept = {id(tensor) for tensor in (*self.weights, *self.statistics)}
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in named if id(tensor) in kept}

    def forward(self, inputs: Any, through: nn.Module | None = None) -> Any:
        """Call the model, in the precision asked for.

        Collective over the default group, where the model is spread.

        Args:
            inputs: Of a batch.
            through: Another module to call, of which the model is a part.
        """
        module = self.module if through is None else through
        if not self._casts:
            return module(inputs)
        with casting(self._config, self._world):
            return module(inputs)

    def share_buffers(self) -> None:
        """Give every rank rank zero's buffers before a step, where DDP would, too.

        Collective over the default group. Not left to DDP, whose forward pass would be
        the place where ranks wait for rank zero.
        """
        broadcast: Any = vars(dist)["_broadcast_coalesced"]  # what DDP takes
        broadcast(dist.group.WORLD, self.shared_buffers, BROADCAST_BYTES, 0)

    def synchronize_if(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Let the gradients of all ranks meet in the last microstep of a step only."""
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def weights_have_changed(self) -> None:
        """Forget what was gathered of sharded weights, which others have now; local.

        FSDP keeps the outermost module's after a forward pass without a backward pass.
        """
        if self.strategy == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def synchronize_buffers(self) -> None:
        """Give every rank rank zero's buffers, such as batch norm's statistics.

        Collective over the default group.
        """
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)

    def whole_state(self) -> dict[str, Any]:
        """Return a plain ``state_dict`` on the CPU; of use on rank zero.

        Collective over the default group.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
        )

        if self.strategy == "fsdp":
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return on_cpu(get_model_state_dict(self.model, options=options))
        return on_cpu(self.model.state_dict())


def on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a ``state_dict`` to the CPU."""
    return {
        name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def prepared(model: nn.Module, world: World, config: StrategyConfig) -> nn.Module:
    """Bring a model to this rank's device, in the form asked for; before it is spread.

    Collective over the default group: the weights become rank zero's.

    Args:
        model: Of the same shapes on all ranks.
        world: Where this process stands.
        config: What was asked for.
    """
    if config.sync_batchnorm:
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        model = convert(model)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    model = model.to(world.device)
    for tensor in (*model.parameters(), *model.buffers()):
        # Not by `to`, which makes complex numbers real.
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(
                dtype.to_complex() if tensor.is_complex() else dtype
            )
        if world.world_size > 1:
            dist.broadcast(tensor.detach(), src=0)
    if is_channels_last(world, config):
        model = model.to(memory_format=torch.channels_last)
    if config.activation_checkpointing:
        for block in blocks_of(model):
            if getattr(block.forward, "func", None) is not checkpoint:  # by a `fit`
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False
                )
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            logger.warning(
                "--activation-checkpointing computes batch norm twice a step: its "
                "running statistics move twice as fast"
            )
    return model


def is_channels_last(world: World, config: StrategyConfig) -> bool:
    """Whether images keep the channels of a pixel together in memory."""
    if config.strategy == "fsdp":
        return False  # its shares must be contiguous; torch raises else
    if config.channels_last == "auto":
        return world.device != "cpu" and config.precision in ("bf16", "fp16")
    return config.channels_last == "always"


def settle_numerics(config: StrategyConfig, environ: MutableMapping[str, str]) -> None:
    """Set what holds for the whole process; before the device is used.

    Args:
        config: What was asked for.
        environ: The environment; what cuBLAS needs is set there.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32  # True by default
    if config.deterministic:
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: what FSDP shards one by one.

    They are the outermost members of lists and sequences that have parts and weights of
    their own: residual blocks, transformer layers.

    >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> len(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer(), layer()))))
    2
    """
    found: list[nn.Module] = []

    def look(module: nn.Module, *, is_member: bool) -> None:
        is_list = type(module) in (nn.Sequential, nn.ModuleList)
        has_parts = any(True for _ in module.children())
        if is_member and has_parts and not is_list:
            found.append(module)
            return
        before = len(found)
        for child in module.children():
            look(child, is_member=is_list)
        if is_member and has_parts and len(found) == before:
            found.append(module)  # a sequence of plain layers

    look(model, is_member=False)
    return [block for block in found if any(True for _ in block.parameters())]


def _fully_shard(model: nn.Module, world: World, config: StrategyConfig) -> None:
    """Shard a model's blocks, and then the rest, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    dtype = DTYPES[config.precision]
    options: dict[str, Any] = {"mesh": _mesh(world, config, init_device_mesh)}
    if dtype.itemsize == 2:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if "mp_policy" in options:
        # Batch norm stays in fp32, as under autocast: torch's wants its statistics so.
        in_fp32 = {**options, "mp_policy": MixedPrecisionPolicy()}
        for module in model.modules():
            if isinstance(module, BatchNorm):
                fully_shard(module, **in_fp32)
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _mesh(world: World, config: StrategyConfig, make: Any) -> Any:
    """Lay the ranks out: shard over all, or in each node and replicate across."""
    kind = torch.device(world.device).type
    if not config.hybrid_sharding or world.num_nodes == 1:
        return make(kind, (world.world_size,), mesh_dim_names=("shard",))
    sizes = {len(node.ranks) for node in world.nodes}
    in_order = [rank for node in world.nodes for rank in node.ranks]
    if len(sizes) > 1 or in_order != list(range(world.world_size)):
        raise UsageError(
            "--hybrid-sharding wants as many ranks on every node, and those of a node "
            "one after another; expected mpirun --map-by ppr:N:node --rank-by slot"
        )
    shape = (world.num_nodes, sizes.pop())
    return make(kind, shape, mesh_dim_names=("replicate", "shard"))

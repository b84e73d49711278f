"""How a model is parallelized over the ranks: DDP, FSDP, DP or not at all."""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mpitrain.config import StrategyConfig
from mpitrain.data.samples import to_dtype
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.torch_compat import (
    broadcast_coalesced,
    is_compiled,
    is_persistent_buffer,
    without_compile_wrappers,
)
from mpitrain.train.loader import RankStep

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

# Settings of the process, by name, as they were before a training changed them.
previous_settings: dict[str, Any] = {}

BUCKET_BYTES = 250 << 20  # buffers are broadcast together up to this size, as in DDP

# What DDP's errors mean here, by a part of them.
DDP_HINTS = {
    "mark a variable ready only once": "Expected use_reentrant=False where activations "
    "are checkpointed, and tensors as outputs; or, if each step uses every weight, "
    "--find-unused-parameters never",
    "finished reduction in the prior": "Expected --find-unused-parameters always",
}

WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def choose_strategy(config: StrategyConfig, world: World) -> str:
    """Return ``ddp``, ``fsdp``, ``dp`` or ``single``, if this job can do it."""
    strategy = config.strategy
    if strategy == "auto":
        strategy = "ddp" if world.world_size > 1 else "single"
    error = _find_error(strategy, config, world)
    if error:
        raise UsageError(error).on_all_ranks()
    return strategy


def _find_error(strategy: str, config: StrategyConfig, world: World) -> str:
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
    if strategy == "fsdp" and world.backend == "gloo" and not on_cpu:
        # Its all-gather of several tensors takes a GPU's address for one of the host.
        return (
            "--strategy fsdp: gloo has no collectives of FSDP for GPUs; expected nccl "
            "(one rank per GPU, no --backend gloo), mpi4py (torch 2.14 or newer), or "
            "--strategy ddp"
        )
    if config.cpu_offload and on_cpu:
        return "--cpu-offload: weights are in host memory already"
    return ""


def autocast(config: StrategyConfig, world: World) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` for a 16-bit precision, or a context without effect."""
    dtype = DTYPES[config.precision]
    if dtype.itemsize == 2:
        return torch.autocast(torch.device(world.device).type, dtype)
    return nullcontext()


class ParallelModel:
    """A model, parallelized over the ranks; FSDP shards it in place.

    Without ``find_unused_parameters`` DDP leaves wrong gradients where a weight takes
    no part in the loss, and complains only in the next forward pass. `module` is what
    `forward` calls; `syncs_buffers` whether `start_step` broadcasts buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        config: StrategyConfig,
        strategy: str,
        *,
        find_unused_parameters: bool = True,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self._config, self._world = config, world
        self._is_16_bit = DTYPES[config.precision].itemsize == 2
        self._buffers = _find_buffers(model)
        if strategy == "fsdp":
            _fully_shard(model, world, config)
        if config.compile:
            model.compile()
        self.module: nn.Module = model
        self.syncs_buffers = strategy == "ddp" and bool(self._buffers)
        self.number = 0  # of the micro-batch in the step, with --bitwise
        self._finds_unused = False
        if strategy == "ddp":
            self._finds_unused = find_unused_parameters
            warnings.filterwarnings("ignore", message=".*find_unused_parameters=True")
            sync_buffers: Any = {_SYNC_BUFFERS: False}  # `broadcast_buffers` does it
            self.module = DistributedDataParallel(
                model,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
                **sync_buffers,
            )
        elif strategy == "dp":
            self.module = DataParallel(model)

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

    def float_buffers(self) -> dict[str, Tensor]:
        """Return buffers that change in training, such as batch norm's statistics."""
        named = self.named_buffers().items()
        return {name: buffer for name, buffer in named if buffer.is_floating_point()}

    def forward(self, inputs: Any, through: nn.Module | None = None) -> Any:
        """Call the model, or a module that contains it, in the configured precision.

        With 16-bit precision the outputs are float32 again: losses are computed in it.
        """
        module: Any = self.module if through is None else through
        if self._finds_unused:
            module = functools.partial(_call_quietly, module)
        if not self._is_16_bit:
            return module(inputs)
        if self.strategy == "fsdp":  # casts by itself
            return to_dtype(module(inputs), torch.float32)
        with autocast(self._config, self._world):
            outputs = module(inputs)
        return to_dtype(outputs, torch.float32)

    def broadcast_buffers(self) -> None:
        """Broadcast rank zero's buffers; not left to DDP, so that it is timed.

        Collective over the default group.
        """
        buffers = list(self.named_buffers().values())
        if buffers and self._world.world_size > 1:
            broadcast_coalesced(dist.group.WORLD, buffers, BUCKET_BYTES, 0)

    def start_step(self, epoch: int, step: RankStep) -> None:
        """Begin a step. Collective over the default group: broadcasts buffers."""
        del epoch, step
        if self.syncs_buffers:
            self.broadcast_buffers()

    def reduce_gradients(self) -> None:
        """End the passes of a step: gradients are all-reduced already."""

    @contextmanager
    def keep_statistics(self) -> Iterator[None]:
        """Keep the running statistics of batch norm, through both passes in here."""
        norms = (it for it in self.model.modules() if isinstance(it, BatchNorm))
        before = [(it, it.clone()) for norm in norms for it in norm.buffers()]
        yield
        for buffer, value in before:
            buffer.copy_(value)

    @contextmanager
    def sync_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Return a context: gradients are all-reduced in the last micro-batch only."""
        if self.strategy == "fsdp":
            self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        context: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            context = self.module.no_sync()
        try:
            with context:
                yield
        except RuntimeError as error:
            for reason, hint in DDP_HINTS.items():
                if reason in str(error):
                    error.add_note(hint)
            raise

    def reshard(self) -> None:
        """Free the weights that FSDP keeps gathered: they have changed; local."""
        if self.strategy == "fsdp":
            from torch.distributed.fsdp import FSDPModule

            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def full_state_dict(self) -> dict[str, Any]:
        """Return a plain ``state_dict`` on the CPU; complete on rank zero only."""
        if self.strategy == "fsdp":
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                get_model_state_dict,
            )

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return copy_to_cpu(get_model_state_dict(self.model, options=options))
        return copy_to_cpu(self.model.state_dict())


def _call_quietly(module: nn.Module, inputs: Any) -> Any:
    """Call DDP so that its warning on ``find_unused_parameters`` is one of Python's.

    It comes from C++ code without a warning handler, which prints it on every rank.
    While a function of torch calls back, its handler is there (torch 2.14).
    """
    outputs = []

    def call(number: float) -> float:
        outputs.append(module(inputs))
        return number

    torch.zeros(1, device="cpu").apply_(call)
    return outputs[0]


def _find_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, torch.Size]]:
    """Return module, attribute and shape of each buffer that is saved, by name."""
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if is_persistent_buffer(module, attribute):
            found[name] = (module, attribute, buffer.shape)
    return found


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a ``state_dict`` to the CPU."""
    return {
        name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def unwrap_model(model: nn.Module, world: World, *, is_bitwise: bool) -> nn.Module:
    """Return a model without the wrappers of `torch.compile`; refuse the others."""
    parts = dict(model.named_modules())
    if world.is_rank_zero and any("_orig_mod" in name for name in parts):
        logger.warning(
            "the wrapper of torch.compile was removed, and the model stays compiled: "
            "names in state_dict() and checkpoints are those without _orig_mod."
        )
    for name, part in parts.items():
        kinds = {kind.__name__ for kind in type(part).__mro__}
        if kind := next(iter(kinds.intersection(WRAPPERS)), ""):
            where = f"{name!r} in the model" if name else "the model"
            raise UsageError(
                f"{where} is a {kind}, which reduces gradients itself, as --strategy "
                "does; expected the plain module: pass what was wrapped (its .module)"
            ).on_all_ranks()
    if any(hasattr(weight, "full_tensor") for weight in model.parameters()):
        raise UsageError(
            "the model's weights are sharded already, by fully_shard or an earlier "
            "`fit` with fsdp; expected a model that is whole. After `fit`, make a "
            "new one, and load trainer.state_dict() into it"
        ).on_all_ranks()
    model = without_compile_wrappers(model)
    if is_bitwise and is_compiled(model):
        raise UsageError(
            "--bitwise does not go with torch.compile; expected a plain model"
        ).on_all_ranks()
    return model


@torch.no_grad()
def initialize_lazy(model: nn.Module, inputs: Any) -> None:
    """Let lazy modules see a batch, in evaluation mode; local."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()(to_dtype(inputs, torch.float32))
    except Exception as error:
        raise UsageError(
            "the model has lazy modules, and fails with one batch of inputs: "
            f"{type(error).__name__}: {error}. Expected them to be initialized: call "
            "the model once with a batch before it is trained"
        ) from error
    for module, mode in modes.items():  # parts may be in evaluation mode
        module.training = mode


def prepare_model(model: nn.Module, world: World, config: StrategyConfig) -> nn.Module:
    """Move a model to this rank's device, with rank zero's weights; collective."""
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
        for block in find_blocks(model):
            if getattr(block.forward, "func", None) is not checkpoint:  # an earlier fit
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
    """Return whether images are in the channels-last memory format."""
    if config.strategy == "fsdp":
        return False  # torch shards contiguous weights only
    if config.channels_last == "auto":
        return world.device != "cpu" and config.precision in ("bf16", "fp16")
    return config.channels_last == "always"


def configure_precision(
    config: StrategyConfig, device: str, environ: MutableMapping[str, str]
) -> None:
    """Set TF32 and determinism for the whole process, before the device is used.

    A training without determinism undoes what one before it has set.
    """
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32  # True by default
    if config.deterministic or (config.bitwise and device != "cpu"):
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.are_deterministic_algorithms_enabled():
            previous_settings["deterministic"] = False
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    elif "deterministic" in previous_settings:
        torch.use_deterministic_algorithms(previous_settings.pop("deterministic"))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost members of lists and sequences that have submodules.

    Such as residual blocks and transformer layers; FSDP shards them one by one.

    >>> layer = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> blocks = nn.Sequential(layer(), layer())
    >>> len(find_blocks(nn.Sequential(nn.Linear(2, 2), blocks)))
    2
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module, *, is_member: bool) -> None:
        is_list = type(module) in (nn.Sequential, nn.ModuleList)
        has_parts = any(True for _ in module.children())
        if is_member and has_parts and not is_list:
            found.append(module)
            return
        before = len(found)
        for child in module.children():
            visit(child, is_member=is_list)
        if is_member and has_parts and len(found) == before:
            found.append(module)  # a sequence of plain layers

    visit(model, is_member=False)
    return [block for block in found if any(True for _ in block.parameters())]


def _fully_shard(model: nn.Module, world: World, config: StrategyConfig) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

    dtype = DTYPES[config.precision]
    options: dict[str, Any] = {"mesh": _mesh(world, config, init_device_mesh)}
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if dtype.itemsize == 2:
        # Batch norm stays in fp32, as under autocast: torch's wants its statistics so.
        for module in model.modules():
            if isinstance(module, BatchNorm):
                fully_shard(module, **options)
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32
        )
    num_owners = _count_owners(model)
    for block in find_blocks(model):
        # Not where it shares a weight with others: a weight has one group, here the
        # model's.
        if _count_owners(block).items() <= num_owners.items():
            fully_shard(block, **options)
    fully_shard(model, **options)


def _count_owners(module: nn.Module) -> Counter[int]:
    """Return how many names each weight has, by its id."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(id(weight) for _, weight in named)


def _mesh(world: World, config: StrategyConfig, make: Any) -> Any:
    """Shard over all ranks, or within each node and replicate across nodes."""
    kind = torch.device(world.device).type
    if not config.hybrid_sharding or world.num_nodes == 1:
        return make(kind, (world.world_size,), mesh_dim_names=("shard",))
    sizes = {len(node.ranks) for node in world.nodes}
    in_order = [rank for node in world.nodes for rank in node.ranks]
    if len(sizes) > 1 or in_order != list(range(world.world_size)):
        raise UsageError(
            "--hybrid-sharding wants as many ranks on every node, and those of a node "
            "one after another; expected the launcher to fill one node after another"
        )
    shape = (world.num_nodes, sizes.pop())
    return make(kind, shape, mesh_dim_names=("replicate", "shard"))

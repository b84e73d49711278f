"""The model before it is spread over the ranks: unwrapped, equal, on its device."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from mpitrain.config import TrainConfig
from mpitrain.data.samples import digest, kind_of, to_dtype
from mpitrain.errors import UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.torch_compat import without_compile_wrappers
from mpitrain.train.checks import shown_names, takes
from mpitrain.train.meta_device import is_on_meta

logger = logging.getLogger("mpitrain")

WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}

BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def unwrap_model(model: Any, world: World) -> nn.Module:
    """Return a model without the wrappers of `torch.compile`; refuse the others."""
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise UsageError(f"the model is {found!r}; expected a torch.nn.Module")
    parts = dict(model.named_modules())
    if world.is_rank_zero and any("_orig_mod" in name for name in parts):
        logger.warning(
            "the wrapper of torch.compile was removed, and the model stays compiled: "
            "names in state_dict() and checkpoints are those without _orig_mod."
        )
    # By name, of bases, too: the import of FSDP takes a second.
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
    return without_compile_wrappers(model)


@torch.no_grad()
def initialize_lazy(model: nn.Module, inputs: Any) -> None:
    """Let lazy modules see a batch, in evaluation mode; local."""
    modes = {module: module.training for module in model.modules()}
    try:
        args, kwargs = spread_inputs(model, (to_dtype(inputs, torch.float32),), {})
        model.eval()(*args, **kwargs)
    except Exception as error:
        raise UsageError(
            "the model has lazy modules, and fails with one batch of inputs: "
            f"{type(error).__name__}: {error}. Expected them to be initialized: call "
            "the model once with a batch before it is trained"
        ) from error
    for module, mode in modes.items():  # parts may be in evaluation mode
        module.training = mode


def check_same_model(
    model: nn.Module,
    ranks: Communicator,
    report_dependence: Callable[[str, str], object],
    what: str = "the model",
) -> None:
    """Check that the model is the same on all ranks; collective.

    Weights and buffers become rank zero's. ``report_dependence(found, expected)`` is
    told of other tensors that differ: it may be what an earlier forward pass left.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, it.shape, it.dtype, it.requires_grad) for name, it in tensors]
    of_shapes = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    ranks.check_equal(
        f"{sum(tensor.numel() for _, tensor in tensors)} numbers in {len(tensors)} "
        f"tensors (names, shapes, requires_grad {of_shapes})",
        what,
        "Expected the same on every rank; its first weights are rank zero's",
    )
    of_ranks = ranks.allgather(_plain_tensors(model))
    found = {
        name for others in of_ranks for name, _ in others.items() ^ of_ranks[0].items()
    }
    if found:
        report_dependence(
            f"{shown_names(sorted(found))} of {what} is neither weight nor buffer, and "
            "differs between ranks",
            "call register_buffer for it, or torch.manual_seed before it is made; or "
            "set it to None, if an earlier forward pass has left it",
        )


def _plain_tensors(model: nn.Module) -> dict[str, str]:
    """Return digests of the tensors and arrays that are attributes of modules."""
    found: dict[str, str] = {}
    known = {*map(_storage, (*model.parameters(), *model.buffers()))}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                value = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8)
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            # Made of weights, which become rank zero's: by weight_norm, spectral_norm.
            if value.grad_fn is not None or value.is_meta or _storage(value) in known:
                continue
            text = digest(value.detach().resolve_conj().resolve_neg())
            found[f"{prefix}.{key}".lstrip(".")] = f"{kind_of(value)} {text}"
    return found


def _storage(tensor: Tensor) -> int:
    """Return which storage a tensor has."""
    # Not by data_ptr: one that is sharded, or on meta, has no memory of its own.
    if tensor.layout != torch.strided:
        return id(tensor)
    ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(ref.cdata)


def place_tensor(tensor: Tensor, world: World, config: TrainConfig) -> None:
    """Give a weight or buffer its dtype, and rank zero's numbers; collective."""
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    # Not by `to`, which makes complex numbers real.
    # Into .data: the weight stays the object that the user and other modules hold.
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data = tensor.data.to(
            dtype.to_complex() if tensor.is_complex() else dtype
        )
    broadcast_tensor(tensor, world)


def broadcast_tensor(tensor: Tensor, world: World) -> None:
    """Give a weight or buffer rank zero's numbers; collective."""
    if world.world_size > 1:
        # detach(): autograd refuses to write to a weight that requires a gradient.
        dist.broadcast(tensor.detach(), src=0)


def prepare_model(model: nn.Module, world: World, config: TrainConfig) -> nn.Module:
    """Move a model to this rank's device, with rank zero's weights; collective.

    One on the device meta stays there.
    """
    if config.sync_batchnorm:
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        model = convert(model)
    if not is_on_meta(model):
        model = model.to(world.device)
        for tensor in (*model.parameters(), *model.buffers()):
            place_tensor(tensor, world, config)
    if config.uses_channels_last(world.device):
        model = model.to(memory_format=torch.channels_last)
    if config.activation_checkpointing:
        for block in find_blocks(model):
            if getattr(block.forward, "func", None) is not checkpoint:  # an earlier fit
                # The method alone: a wrapper would change the names of the weights.
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False
                )
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            logger.warning(
                "--activation-checkpointing computes batch norm twice a step: its "
                "running statistics move twice as fast"
            )
    return model


@contextmanager
def keep_statistics(model: nn.Module) -> Iterator[None]:
    """Keep the running statistics of batch norm, through both passes in here."""
    # Of a doubled sample the variance is 0, and no statistic of the data.
    norms = (it for it in model.modules() if isinstance(it, BatchNorm))
    before = [(it, it.clone()) for norm in norms for it in norm.buffers()]
    yield
    for buffer, value in before:
        buffer.copy_(value)


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


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors of a ``state_dict`` to the CPU."""
    # copy=True: on a CPU `to` would return the weights, which training changes.
    return {
        name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def spread_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's arguments: of one dict its values by name, if it has such names.

    >>> class Model(nn.Module):
    ...     def forward(self, ids, mask=None): ...
    >>> spread_inputs(Model(), ({"ids": 1, "mask": 2},), {})
    ((), {'ids': 1, 'mask': 2})
    >>> spread_inputs(Model(), ({"tokens": 1},), {})
    (({'tokens': 1},), {})
    >>> spread_inputs(Model(), ({("user", "item"): 1},), {})  # as of graphs
    (({('user', 'item'): 1},), {})
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return args, kwargs
    parameters, given = inspect.signature(model.forward).parameters, dict(args[0])
    # Also where arguments are missing: then forward's own error names them. Or it
    # takes any: forward(ids, **kwargs), PEFT's wrappers.
    is_by_name = given.keys() <= parameters.keys() or (
        all(isinstance(name, str) for name in given) and takes(model.forward, **given)
    )
    return ((), given) if is_by_name else (args, kwargs)

"""Private APIs of torch that mpitrain relies on, each with the versions it works with.

A new torch version is checked here first: `tests/unit/test_torch_compat.py` tests them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.utils import _pytree
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

# C++ classes without a public name, or without one in torch's type stubs
# (torch 2.14.1, 2.15).
AllgatherOptions = _c10d.AllgatherOptions
Backend = _c10d.Backend
DistributedBackendOptions = _c10d._DistributedBackendOptions  # noqa: SLF001
PrefixStore = _c10d.PrefixStore
Store = _c10d.Store

# Functions without a public name (torch 2.9 to 2.15).
broadcast_coalesced: Any = vars(dist)["_broadcast_coalesced"]  # what DDP calls
foreach_copy: Any = torch._foreach_copy_  # many tensors in one call
foreach_norm: Any = torch._foreach_norm  # noqa: SLF001
queue_backward_callback = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

_PYTHON_OP_TYPE = 100  # of a work object in Python (Work.hpp; torch 2.14.1, 2.15)

_SOURCE_RANK = "_mpitrain_source_rank"  # attribute of a received tensor


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place, by one call if they are alike (torch 2.9 to 2.15)."""
    kinds = {(type(it), it.dtype) for it in tensors}
    # On CPUs torch rounds the factor to 16 bits first, where the tensors have those.
    if len(kinds) == 1 and kinds.pop()[1] in {torch.float32, torch.float64}:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def python_backend_error() -> str:
    """Return why this torch cannot run a backend written in Python; ``""`` if it can.

    Torch before 2.14 does not let Python construct the base class (2.11, 2.13).
    """

    class Probe(Backend):
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return f"torch {torch.__version__} takes no backend written in Python"
    return ""


def options_timeout(options: Backend.Options) -> timedelta:
    """Return the timeout of a backend's options (torch 2.14.1, 2.15)."""
    return options._timeout  # noqa: SLF001 - no public name


def set_options_timeout(options: Backend.Options, timeout: timedelta) -> None:
    """Set the timeout of a backend's options (torch 2.14.1, 2.15)."""
    options._timeout = timeout  # noqa: SLF001 - no public name


def append_to_store(store: Store, key: str, text: str) -> None:
    """Append to a value of a TCPStore; torch's type stub lacks it (2.14.1, 2.15)."""
    store.append(key, text)  # type: ignore[attr-defined]


def set_source_rank(tensor: torch.Tensor, rank: int) -> None:
    """Record the rank that sent a received tensor, for `patch_work`."""
    setattr(tensor, _SOURCE_RANK, rank)


# torch 2.15 renamed it; both take flat tensors.
all_gather_flat = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)

_LOCK = threading.RLock()  # two threads may be the first


class _DeferredModule(ModuleType):
    """Stands for a module, and imports it when an attribute is missing here."""

    def __getattr__(self, name: str) -> Any:
        # `import torch._dynamo.x` asks for the path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # by `inspect`, which looks at all modules
        with _LOCK:
            if isinstance(sys.modules.get("torch._dynamo"), _DeferredModule):
                del sys.modules["torch._dynamo"]
                delattr(torch, "_dynamo")
            return getattr(importlib.import_module(self.__name__), name)


def defer_dynamo() -> None:
    """Let the first use of ``torch._dynamo`` import it, which takes 0.5 s of CPU time.

    DDP and optimizers call three of its functions even if nothing is compiled. For them
    functions that do nothing stand in, until something else of the module is used. The
    functions of torch that were disabled for the compiler until then (those with
    ``wrapping=False``) stay enabled. Call it after ``init_process_group``. With torch
    other than 2.14 (2.14.1 was tried) it is imported at once.
    """
    if not torch.__version__.startswith("2.14.") or "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo")
        return
    dynamo: Any = _DeferredModule("torch._dynamo")

    def disable(*args: Any, wrapping: bool = True, **kwargs: Any) -> Any:
        if not wrapping:
            return args[0]
        return dynamo.__getattr__("disable")(*args, **kwargs)  # the real one

    dynamo.disable = disable
    dynamo.graph_break = lambda: None
    dynamo.utils = _DeferredModule("torch._dynamo.utils")
    dynamo.utils.get_optimize_ddp_mode = lambda: "ddp_optimizer"  # the default
    sys.modules["torch._dynamo"] = dynamo
    setattr(torch, "_dynamo", dynamo)  # noqa: B010 - mypy knows the module


def without_compile_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model whose parts that `torch.compile` wrapped are compiled in place.

    As by ``module.compile()``, with the backend and options of the wrapper, but without
    ``_orig_mod.`` in the names (torch 2.14.1). Parts are replaced in ``model``.
    """
    model = _compiled_in_place(model)
    for part in list(model.modules()):
        # Not `named_children`, which leaves out the second name of a shared part.
        for name, child in list(part._modules.items()):  # noqa: SLF001
            if (found := _compiled_in_place(child)) is not child:
                setattr(part, name, found)
    return model


def _compiled_in_place(module: Any) -> Any:
    if type(module).__name__ != "OptimizedModule":
        return module
    inner = _compiled_in_place(module._orig_mod)  # noqa: SLF001
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # noqa: SLF001
    return inner


def parameters_and_parts(module: torch.nn.Module) -> tuple[Mapping[str, Any], ...]:
    """Return a module's own weights and parts, as torch keeps them (2.9 to 2.15)."""
    return module._parameters, module._modules  # noqa: SLF001


def is_persistent_buffer(module: torch.nn.Module, name: str) -> bool:
    """Whether ``state_dict`` has a buffer of a module (torch 2.9 to 2.15)."""
    return name not in module._non_persistent_buffers_set  # noqa: SLF001


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a part of a model is compiled by ``module.compile()`` (2.9 to 2.15)."""
    return any(it._compiled_call_impl for it in model.modules())  # noqa: SLF001


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has hooks before or after its steps (torch 2.9 to 2.15)."""
    names = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    return any(getattr(optimizer, name, None) for name in names)


def hide_worker_info() -> None:
    """Let `get_worker_info` return ``None`` in this worker (torch 2.9 to 2.15)."""
    torch_worker._worker_info = None  # noqa: SLF001
    assert get_worker_info() is None  # else torch keeps it elsewhere now


def request_batch(batches: Any) -> None:
    """Let a DataLoader's workers read one batch more than they do (torch 2.9 to 2.15).

    `batches` is an iterator of one with workers. Its batch sampler gives the batch.
    """
    batches._try_put_index()  # noqa: SLF001 - else called once per batch taken


def end_workers(batches: Any) -> None:
    """End the workers of a DataLoader's iterator now (torch 2.9 to 2.15)."""
    batches._shutdown_workers()  # noqa: SLF001 - else when nothing refers to it


def local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """Return a DTensor's local tensor, and its chunk: offsets and sizes; else ``None``.

    By this protocol a DTensor tells it to torch.distributed.checkpoint (2.9 to 2.15).
    """
    if not hasattr(tensor, "__create_chunk_list__"):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), chunk  # type: ignore[attr-defined]


# --- for the launch -------------------------------------------------------------------


def reshard(modules: Iterable[Any]) -> None:
    """Let FSDP2 models have their sharded weights; local.

    After a forward pass without a backward pass the root keeps the whole ones, and
    `named_parameters` returns these (torch 2.14, ``_fsdp_state._post_forward``).
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not to import it
    for module in modules:
        if fsdp is not None and isinstance(module, torch.nn.Module):
            for part in module.modules():
                if isinstance(part, fsdp.FSDPModule):
                    part.reshard()


def destroy_process_group() -> None:
    """Destroy all groups, and torch's caches for sharded tensors (torch 2.15).

    These hold names of groups, which the next sub-world uses again.
    """
    dist.destroy_process_group()
    # Where nobody has imported it there are no caches.
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        clear: Any = debug._clear_sharding_prop_cache  # noqa: SLF001
        clear()
        _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001


def _wrap(function: Any, action: Callable[..., object], *, num_args: int) -> Any:
    """Return a function that calls `action` with the first arguments before `function`.

    One that is so already gets the new action: a process may have many jobs.
    """
    if actions := getattr(function, "_mpitrain_actions", None):
        actions[:] = [action]
        return function
    actions = [action]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        actions[0](*args[:num_args])
        return function(*args, **kwargs)

    vars(wrapper)["_mpitrain_actions"] = actions
    return wrapper


def call_before_destroy(action: Callable[[], object]) -> None:
    """Call `action` before groups are destroyed, by whomever (torch 2.14.1, 2.15).

    It takes the place of the action before.
    """
    destroy = _wrap(dist.destroy_process_group, action, num_args=0)
    # Scripts import it from either.
    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = destroy  # type: ignore[attr-defined]


def call_at_messages(action: Callable[[dist.ProcessGroup], object]) -> None:
    """Call `action` with each group that sends or receives (torch 2.14.1, 2.15).

    gloo's ``monitored_barrier`` is made of messages to and from its first rank. It
    takes the place of the action before.
    """
    for name in ("send", "recv", "recv_anysource", "monitored_barrier"):
        method = getattr(dist.ProcessGroup, name)
        setattr(dist.ProcessGroup, name, _wrap(method, action, num_args=1))


def count_collectives() -> Iterator[tuple[dist.ProcessGroup, str, str, int]]:
    """Yield group, its name, device and number of collectives (torch 2.14.1, 2.15)."""
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):  # noqa: SLF001
        for device in group._device_types:  # noqa: SLF001
            with contextlib.suppress(Exception):  # not every backend counts
                backend: Any = group._get_backend(device)  # noqa: SLF001
                number = backend._get_sequence_number_for_group()  # noqa: SLF001
                yield group, name, device.type, int(number)


def lead_scripts_by_port(address: str, port: int) -> None:
    """Lead a script to our store by its port, or let torch open one on another port.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes every rank a client of whatever stands in
    ``MASTER_PORT``: where the script has written its own, nobody serves it, and
    ``init_process_group`` waits for its timeout (torch 2.8 to 2.14; so does torchrun).
    """
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    connect = tcp_store.__init__

    # A script may give its host's name, where a store on loopback does not listen.
    def connect_to_ours(store: Any, host_name: str, *args: Any, **kwargs: Any) -> None:
        is_ours = port == (args[0] if args else kwargs.get("port"))
        connect(store, address if is_ours else host_name, *args, **kwargs)

    tcp_store.__init__ = connect_to_ours
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create = rendezvous._create_c10d_store  # noqa: SLF001

    def create_store(hostname: str, asked: int, *args: Any, **kwargs: Any) -> Any:
        name = "TORCHELASTIC_USE_AGENT_STORE"
        before = os.environ.get(name)
        if before is None or asked == port:
            return create(hostname, asked, *args, **kwargs)
        os.environ[name] = "False"
        try:
            return create(hostname, asked, *args, **kwargs)
        finally:
            os.environ[name] = before

    rendezvous._create_c10d_store = create_store  # noqa: SLF001


# --- for the backend ------------------------------------------------------------------


def patch_work() -> None:
    """Patch ``dist.Work`` so that works written in Python answer every query.

    Torch wraps them and forwards only ``wait`` and ``get_future`` (PyWorkHolder in
    PyProcessGroup.hpp; torch 2.14.1, 2.15). ``is_completed``, ``is_success`` and
    ``source_rank`` are answered through the future where torch itself has no answer. A
    second call does nothing.
    """
    if getattr(dist.Work, "_mpitrain_patched", False):
        return
    torch_is_completed = dist.Work.is_completed
    torch_is_success = dist.Work.is_success
    torch_source_rank = dist.Work._source_rank  # noqa: SLF001

    def future_of(work: dist.Work) -> torch.futures.Future[Any] | None:
        op_type = work._get_op_type()  # type: ignore[attr-defined]  # noqa: SLF001
        if op_type != _PYTHON_OP_TYPE:  # NCCL's future is done when its kernel starts
            return None
        try:
            return work.get_future()
        except RuntimeError:  # works of other backends may have none
            return None

    def is_completed(work: dist.Work) -> bool:
        if torch_is_completed(work):
            return True
        future = future_of(work)
        return future is not None and future.done()

    def is_success(work: dist.Work) -> bool:
        future = None if torch_is_completed(work) else future_of(work)
        if future is None or not future.done():
            return torch_is_success(work)
        try:
            future.value()
        except Exception:
            return False
        return True

    def source_rank(work: dist.Work) -> int:
        try:
            return torch_source_rank(work)
        except RuntimeError:
            future = future_of(work)
            value = future.value() if future is not None and future.done() else None
            if isinstance(value, list) and value and hasattr(value[0], _SOURCE_RANK):
                return int(getattr(value[0], _SOURCE_RANK))
            raise

    for name, value in (
        ("is_completed", is_completed),
        ("is_success", is_success),
        ("_source_rank", source_rank),
        ("source_rank", source_rank),
        ("_mpitrain_patched", True),
    ):
        setattr(dist.Work, name, value)

"""Which GPU each rank gets, which GPUs are shared, and the backend that follows.

Ranks that share a GPU do without NCCL. Up to 2.29 it refuses them ("Duplicate GPU
detected"). From 2.30 it can take them, but their kernels take turns: on an H200 an
all-reduce of 1 KiB by 8 ranks took 130 ms, and ResNet-50 trained 5 times slower than
through host memory (benchmarks/results/2026-11-26-gpu.md).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.config import Backend, LaunchConfig
from mpitrain.errors import TopologyError
from mpitrain.files import make_private_folder
from mpitrain.launch import pci
from mpitrain.mpi.collectives import (
    all_or_none,
    merge_lists,
    merge_on_rank_zero,
    on_rank_zero,
)
from mpitrain.mpi.implementation import has_library, has_thread_multiple, start_mpi
from mpitrain.mpi.world import Node, World, format_ranges, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

# Torch's backends for tensors on GPUs; AMD's are "cuda", too. Untried: Intel's.
LIBRARIES = {"cuda": "nccl", "xpu": "xccl"}
_PCI_NAMES = ("pci_domain_id", "pci_bus_id", "pci_device_id")

logger = logging.getLogger("mpitrain")


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """What one rank sees."""

    gpus: tuple[str, ...] = ()  # UUIDs, equal in all processes, in order of indices
    kind: str = "cuda"  # torch's word for them; also of AMD's
    numa_nodes: tuple[int, ...] = ()  # of the GPUs; -1: unknown
    numa_nodes_of_cores: frozenset[int] = frozenset()  # on which this rank may run
    hidden: str = ""  # GPUs of this host that torch does not see; ``""``: none
    has_nccl: bool = False  # whether torch has NCCL, AMD's RCCL or Intel's XCCL


@dataclass(frozen=True, kw_only=True)
class NodeGpus:
    """Which GPU each rank of a node gets; equal on nodes that are alike."""

    kind: str = ""  # torch's word for the GPUs; ``""``: no rank sees one
    indices: tuple[int, ...]  # among those that the rank sees; -1: it sees none
    gpus: tuple[str, ...]  # a number of the GPU on this node, equal where ranks share
    hidden: str = ""  # see `VisibleGpus`
    has_nccl: bool = False  # on all ranks

    @property
    def devices(self) -> tuple[str, ...]:
        """Each rank's device."""
        return tuple(f"{self.kind}:{i}" if self.kind else "cpu" for i in self.indices)


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """What the job computes on. Equal on all ranks."""

    backend: str  # what to hand to ``init_process_group``
    kind: str = ""  # torch's word for the GPUs; ``""`` without
    warning: str = ""  # for the screen; ``""`` for none


def assign_devices(
    comm: MPI.Intracomm,
    on_node: MPI.Intracomm,
    world: World,
    config: LaunchConfig,
    variables: MutableMapping[str, str],
) -> World:
    """Give every rank its device, and the job its backend.

    Collective over `comm`; `on_node` has the ranks of this node. Sets in `variables`
    what NCCL, which has not started yet, needs of them.
    """
    visible = all_or_none(
        comm,
        lambda: discover_gpus(variables) if config.device != "cpu" else VisibleGpus(),
        "ask for GPUs",
    )
    from mpitrain.torch_compat import python_backend_error  # it imports torch

    reason = python_backend_error()
    # Between nodes a thread of each group calls MPI (docs/decisions/0007).
    if world.num_nodes > 1 and config.backend == "auto" and not has_thread_multiple():
        reason = reason or "MPI was started without MPI_THREAD_MULTIPLE"
    asked = config.backend
    if not has_library():  # a world of one
        if asked == "mpi4py":
            start_mpi()  # raises what to do
        asked = "gloo"
    host_backend, gloo_reason = choose_host_backend(asked, reason)
    mine = plan_node(on_node.allgather(visible))
    found = {mine: [world.node_rank]} if world.local_rank == 0 else {}
    by_node = merge_on_rank_zero(comm, found, merge_lists) or {}
    required = config.device if config.device in LIBRARIES else ""

    def plan_all() -> tuple[DevicePlan, dict[NodeGpus, list[int]]]:
        args = (by_node, world.nodes, required, config.backend, host_backend)
        return plan_devices(*args), by_node

    plan, by_node = on_rank_zero(comm, plan_all, "assign devices")
    if plan.kind:
        uuid = visible.gpus[mine.indices[world.local_rank]]
        logger.info("%s is the GPU %s", mine.devices[world.local_rank], uuid)
        for name, value in cache_variables(world.hostname).items():
            variables.setdefault(name, value)
    if world.is_rank_zero:
        for line in filter(None, (gloo_reason, plan.warning)):
            logger.warning("%s", line)
    nodes = list(world.nodes)
    for of, numbers in by_node.items():
        for number in numbers:
            nodes[number] = replace(nodes[number], devices=of.devices, gpus=of.gpus)
    device = nodes[world.node_rank].devices[world.local_rank]
    return replace(world, nodes=tuple(nodes), device=device, backend=plan.backend)


def discover_gpus(environ: Mapping[str, str]) -> VisibleGpus:
    """Ask torch for the GPUs of this process; without one nothing else is asked."""
    import torch
    import torch.distributed as dist

    kind = "xpu" if torch.xpu.is_available() else "cuda"
    module = torch.get_device_module(kind)
    properties = [module.get_device_properties(i) for i in range(module.device_count())]
    if not properties:
        return VisibleGpus(hidden=pci.hidden_gpus(environ))
    return VisibleGpus(
        gpus=tuple(map(_uuid_of, properties)),
        kind=kind,
        numa_nodes=tuple(map(_numa_node_of, properties)),
        numa_nodes_of_cores=pci.numa_nodes_of(os.sched_getaffinity(0)),
        has_nccl=dist.is_backend_available(LIBRARIES[kind]),
    )


def _numa_node_of(properties: object) -> int:
    numbers = [getattr(properties, name, -1) for name in _PCI_NAMES]
    if min(numbers) < 0:
        return -1
    return pci.numa_node_of("{:04x}:{:02x}:{:02x}.0".format(*numbers))


def _uuid_of(properties: object) -> str:
    import torch

    names = ["uuid"]
    if torch.version.hip is not None or not getattr(properties, "uuid", ""):
        # Some of AMD's devices share a UUID; the bus tells them apart.
        names += _PCI_NAMES
    return "/".join(str(getattr(properties, name, "")) for name in names)


def plan_node(seen: Sequence[VisibleGpus]) -> NodeGpus:
    """Give every rank of a node a GPU; `seen` is by local rank.

    Local rank i takes the i-th device it sees, or the next one on a NUMA node of its
    cores. Where every rank of a node sees one device (``--gpus-per-task=1``, wrapper
    scripts), it takes that one. Where there are more ranks than devices, they share
    them in turn. With fewer ranks than GPUs no rank need have index 0: two jobs of a
    node, one on each socket, share no GPU.

    >>> plan_node([VisibleGpus(gpus=("x", "y"), has_nccl=True)] * 2).devices
    ('cuda:0', 'cuda:1')
    """
    seeing = [visible for visible in seen if visible.gpus]
    chosen = _in_turn(seen)
    pairs = zip(seen, chosen, strict=True)
    uuids = [visible.gpus[index] for visible, index in pairs if index >= 0]
    # Numbers, not UUIDs: nodes that are alike are one entry on their way to rank zero.
    numbers = {uuid: str(i) for i, uuid in enumerate(dict.fromkeys(uuids))}
    return NodeGpus(
        kind=seeing[0].kind if seeing else "",
        indices=chosen,
        gpus=tuple(numbers[uuid] for uuid in uuids),
        hidden=next((visible.hidden for visible in seen if visible.hidden), ""),
        has_nccl=all(visible.has_nccl for visible in seeing),
    )


def plan_devices(
    by_node: Mapping[NodeGpus, Sequence[int]],
    nodes: Sequence[Node],
    required: str = "",
    asked: Backend = "auto",
    host_backend: str = "mpi4py",
) -> DevicePlan:
    """Check the GPUs of all nodes, given with the numbers of the nodes that have them.

    Returns the backend that follows.
    """
    seeing = [of for of in by_node if of.kind]
    if not seeing and any(of.hidden for of in by_node):
        raise _hidden(by_node, nodes)
    libraries = LIBRARIES.values()
    kind = seeing[0].kind if seeing else ""
    is_other = kind != (required or kind) or (
        asked in libraries and asked != LIBRARIES.get(kind)
    )
    if is_other:
        flag = f"--device {required}" if required else f"--backend {asked}"
        raise TopologyError(
            f"torch sees no such GPU on {list_hosts(node.hostname for node in nodes)}, "
            f"but {flag} asks for one per rank.\nAsk the scheduler for GPUs, look at "
            "CUDA_VISIBLE_DEVICES and at nvidia-smi there, or use --device cpu"
        ).on_all_ranks()
    if not seeing:
        return DevicePlan(backend=host_backend)
    if any(index < 0 for of in by_node for index in of.indices):
        raise _mixed(by_node, nodes)
    ranks_per_gpu = max(max(Counter(of.gpus).values()) for of in seeing)
    library = LIBRARIES[kind]
    why = ""
    if ranks_per_gpu > 1:
        why = f"up to {ranks_per_gpu} ranks share a GPU"
    elif not all(of.has_nccl for of in seeing):
        why = f"torch has no {library.upper()} here"
    if why and asked in libraries:
        raise TopologyError(
            f"--backend {asked}: {why}.\nExpected one rank per GPU and a torch with "
            f"{library.upper()}, or leave the flag out: then {host_backend} is taken"
        ).on_all_ranks()
    by_nccl = not why and asked in ("auto", *libraries)
    warning = ""
    if why and asked == "auto":
        warning = (
            f"{why}: {host_backend} instead of {library.upper()}, which sends "
            "gradients through host memory and so costs part of every step"
        )
    return DevicePlan(
        kind=kind,
        backend=f"cpu:{host_backend},{kind}:{library}" if by_nccl else host_backend,
        warning=warning,
    )


def choose_host_backend(asked: Backend, reason: str) -> tuple[str, str]:
    """Choose the backend for tensors in host memory; return it and a warning."""
    if asked == "gloo":
        return "gloo", ""
    if reason and asked == "mpi4py":
        raise TopologyError(
            f"--backend mpi4py: {reason}.\nExpected torch 2.14 or newer: pip "
            "install -U torch, or take --backend gloo"
        ).on_all_ranks()
    if reason:
        return "gloo", f"{reason}: gloo instead of mpi4py, which is slower"
    return "mpi4py", ""


def _in_turn(seen: Sequence[VisibleGpus]) -> tuple[int, ...]:
    """Choose for each rank of a node, by index, the GPU that has the fewest ranks.

    Those that see fewest choose first; where all see the same, it is one after another.
    Of equals a GPU on a NUMA node of the rank's cores.
    """
    num_ranks = Counter[str]()
    indices = [-1] * len(seen)
    for rank in sorted(range(len(seen)), key=lambda rank: len(seen[rank].gpus)):
        gpus, near = seen[rank].gpus, {-1, *seen[rank].numa_nodes_of_cores}
        far = {i for i, node in enumerate(seen[rank].numa_nodes) if node not in near}
        if gpus:
            indices[rank] = min(
                range(len(gpus)), key=lambda i: (num_ranks[gpus[i]], i in far, i)
            )
            num_ranks[gpus[indices[rank]]] += 1
    return tuple(indices)


def _hidden(
    by_node: Mapping[NodeGpus, Sequence[int]], nodes: Sequence[Node]
) -> TopologyError:
    import torch

    lines = [
        f"  {list_hosts(nodes[number].hostname for number in numbers)}: {of.hidden}"
        for of, numbers in by_node.items()
        if of.hidden
    ]
    cause = (
        "It is built for CPUs: install one for these GPUs (https://pytorch.org/"
        "get-started/locally), with pip's --force-reinstall"
    )
    kind = "xpu" if torch.version.xpu else "cuda"
    if torch.version.cuda or torch.version.hip or torch.version.xpu:
        cause = (
            "The driver is older than this torch expects, or not in the container "
            "(apptainer --nv), or *_VISIBLE_DEVICES names no GPU: "
            f'python -c "import torch; torch.ones(1, device={kind!r})" says more'
        )
    return TopologyError(
        f"torch {torch.__version__} sees no GPU, but there are some:\n"
        + "\n".join(lines)
        + f"\n{cause}. To train on CPUs: --device cpu"
    ).on_all_ranks()


def _mixed(
    by_node: Mapping[NodeGpus, Sequence[int]], nodes: Sequence[Node]
) -> TopologyError:
    lines = []
    for of, numbers in by_node.items():
        for node in (nodes[number] for number in numbers):
            pairs = zip(node.ranks, of.indices, strict=True)
            without = [rank for rank, index in pairs if index < 0]
            if without:
                ranks = f"ranks {format_ranges(without)} of {format_ranges(node.ranks)}"
                but = f", but there are {of.hidden}" if of.hidden else ""
                lines.append(f"  {node.hostname}: {ranks} see none{but}")
    return TopologyError(
        "some ranks see a GPU and others see none:\n"
        + "\n".join(lines)
        + "\nExpected GPUs for all or for none. Ask the scheduler for them on "
        "every node, look at CUDA_VISIBLE_DEVICES there, or use --device cpu"
    ).on_all_ranks()


def cache_variables(hostname: str) -> dict[str, str]:
    """Return variables that keep caches of compiled kernels on this node.

    By default they are in the home folder, which all nodes share, and where they are
    slow and race (triton issue 11512, pytorch issue 173679). Inductor's own is
    node-local already. None where the folder is not this user's alone: what lies in it
    is run.
    """
    try:
        # It raises, too: where nothing can be written.
        folder = Path(tempfile.gettempdir(), f"mpitrain-{os.getuid()}-{hostname}")
        make_private_folder(folder)
    except OSError as error:
        logger.info("compiled kernels are kept where they were: %s", error)
        return {}
    logger.info("compiled kernels are kept in %s", folder)
    return {
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "MIOPEN_USER_DB_PATH": f"{folder}/miopen",
        "MIOPEN_CUSTOM_CACHE_DIR": f"{folder}/miopen",
    }

"""Which GPU is whose, which are shared, and hence which backend."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpitrain.errors import TopologyError, agreed
from mpitrain.launch import nccl
from mpitrain.launch.config import Backend, LaunchConfig
from mpitrain.launch.gpus import Gpu, Sight, look
from mpitrain.launch.nvml import EXCLUSIVE_MODES, PROHIBITED_MODE
from mpitrain.topology import all_or_none, has_thread_multiple
from mpitrain.world import Node, World, in_runs

if TYPE_CHECKING:
    from mpi4py import MPI

GLOO = "gloo"
MPI4PY = "mpi4py"

logger = logging.getLogger("mpitrain")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Where every rank computes. Equal on all ranks."""

    devices: tuple[str, ...]
    """``"cpu"`` or ``"cuda:<visible index>"``, by rank."""
    backend: str
    """What to hand to ``init_process_group``."""
    gpus: tuple[str, ...] = ()
    """Each rank's GPU by UUID; empty without GPUs."""
    ranks_per_gpu: int = 1
    """Ranks on the physical GPU that has most."""
    why_not_nccl: str = ""
    """Why it is another than NCCL though there are GPUs."""
    without_mps: tuple[str, ...] = ()
    """Hosts whose ranks share a GPU by NCCL without CUDA MPS."""

    @property
    def shared(self) -> bool:
        """Whether some GPU is used by several ranks."""
        return self.ranks_per_gpu > 1


def settle(
    comm: MPI.Intracomm,
    world: World,
    config: LaunchConfig,
    variables: MutableMapping[str, str],
) -> World:
    """Give every rank its device, and the job its backend.

    Collective over `comm`. Before NCCL starts, which reads its variables once.

    Args:
        comm: All ranks.
        world: Where this process stands.
        config: What was asked for, equal on all ranks.
        variables: The environment; what NCCL needs is set there, if it is not.

    Returns:
        The world with devices and backend.

    Raises:
        TopologyError: The GPUs do not fit; raised on every rank or on none.
    """
    sight = all_or_none(
        comm,
        lambda: look(variables) if config.device != "cpu" else Sight(),
        "ask for GPUs",
    )
    from mpitrain.torch_compat import python_backend_error  # it imports torch

    why_not = python_backend_error()
    if world.num_nodes > 1 and config.backend == "auto" and not has_thread_multiple():
        why_not = why_not or "MPI was started without MPI_THREAD_MULTIPLE"
    host_backend, why_gloo = for_host_memory(config.backend, why_not)
    found = plan(
        comm.allgather(sight),
        world.nodes,
        required=config.device == "cuda",
        asked=config.backend,
        host_backend=host_backend,
    )
    if why_gloo and world.is_rank_zero:
        logger.warning("%s", why_gloo)
    if found.shared and "nccl" in found.backend:
        for name, value in nccl.shared_variables(found.ranks_per_gpu).items():
            variables.setdefault(name, value)
    if world.is_rank_zero:
        for line in warnings_of(found):
            logger.warning("%s", line)
    nodes = tuple(
        replace(
            node,
            devices=tuple(found.devices[rank] for rank in node.ranks),
            gpus=tuple(found.gpus[rank] for rank in node.ranks) if found.gpus else (),
        )
        for node in world.nodes
    )
    device_here = found.devices[world.rank]
    return replace(world, nodes=nodes, device=device_here, backend=found.backend)


def plan(
    seen: Sequence[Sight],
    nodes: Sequence[Node],
    *,
    required: bool = False,
    asked: Backend = "auto",
    host_backend: str = MPI4PY,
) -> DevicePlan:
    """Give every rank a device.

    Local rank i takes the i-th device it sees. Where every rank of a node sees one
    device (``--gpus-per-task=1``, wrapper scripts), it takes that one. Where there are
    more ranks than devices, they share them in turn.

    Args:
        seen: What each rank sees, by rank.
        nodes: The nodes, by node rank.
        required: Whether to refuse CPUs.
        asked: The backend that was asked for.
        host_backend: The one that carries tensors in host memory.

    Returns:
        A device for each rank, and the backend for all.

    Raises:
        TopologyError: Some ranks see a GPU and others see none, or none does though it
            is required, or a GPU does not let as many processes in, or NCCL was asked
            for and cannot. Raised on every rank or on none, when `seen` is equal on
            all.

    >>> two = (Node(hostname="a", ranks=(0, 1)),)
    >>> x, y = Gpu(uuid="x"), Gpu(uuid="y")
    >>> plan([Sight(gpus=(x, y), has_nccl=True)] * 2, two).devices
    ('cuda:0', 'cuda:1')
    >>> plan([Sight(gpus=(x,), has_nccl=True)] * 2, two).ranks_per_gpu
    2
    >>> plan([Sight()] * 2, two)  # doctest: +ELLIPSIS
    DevicePlan(devices=('cpu', 'cpu'), backend='mpi4py', ...)
    """
    seeing = [rank for rank, sight in enumerate(seen) if sight.gpus]
    if not seeing and required:
        raise _without_gpus(nodes, "--device cuda")
    if not seeing and asked == "nccl":
        raise _without_gpus(nodes, "--backend nccl")
    if not seeing:
        return DevicePlan(devices=("cpu",) * len(seen), backend=host_backend)
    if len(seeing) < len(seen):
        raise _mixed(seeing, nodes)
    indices = [0] * len(seen)
    crowded: set[str] = set()
    ranks_per_gpu = 1
    for node in nodes:
        for rank, index in zip(node.ranks, _in_turn(seen, node), strict=True):
            indices[rank] = index
        on_gpu: dict[str, list[int]] = {}
        for rank in node.ranks:
            gpu = seen[rank].gpus[indices[rank]]
            on_gpu.setdefault(gpu.physical, []).append(rank)
        for ranks in on_gpu.values():
            gpus = [seen[rank].gpus[indices[rank]] for rank in ranks]
            _check_mode(gpus, ranks, node.hostname, mps=seen[ranks[0]].mps)
            ranks_per_gpu = max(ranks_per_gpu, len(ranks))
            if len(ranks) > 1:
                crowded.add(node.hostname)
    why = "" if all(s.has_nccl for s in seen) else "torch has no NCCL here"
    if ranks_per_gpu > 1:
        why = why or next((s.why_not_shared for s in seen if s.why_not_shared), "")
    if why and asked == "nccl":
        raise _without_nccl(ranks_per_gpu, why)
    by_nccl = not why and asked in ("auto", "nccl")
    return DevicePlan(
        devices=tuple(f"cuda:{index}" for index in indices),
        gpus=tuple(s.gpus[i].uuid for s, i in zip(seen, indices, strict=True)),
        backend=f"cpu:{host_backend},cuda:nccl" if by_nccl else host_backend,
        ranks_per_gpu=ranks_per_gpu,
        why_not_nccl=why if asked == "auto" else "",
        without_mps=()
        if not by_nccl
        else tuple(
            node.hostname
            for node in nodes
            if node.hostname in crowded and not seen[node.ranks[0]].mps
        ),
    )


def warnings_of(found: DevicePlan) -> list[str]:
    """Say what sharing GPUs costs.

    Returns:
        Lines for the screen; none where no GPU is shared and NCCL does the work.
    """
    share = f"up to {found.ranks_per_gpu} ranks share a GPU"
    if found.why_not_nccl:
        why = found.why_not_nccl
        return [
            f"{f'{share} and {why}' if found.shared else why}: {found.backend} instead "
            "of NCCL, which sends gradients through host memory and so costs part of "
            "every step"
        ]
    if found.without_mps:
        return [
            f"{share} by NCCL without CUDA MPS on {', '.join(found.without_mps)}: "
            "their kernels take turns, which is slow. Start it there before the job: "
            "nvidia-cuda-mps-control -d"
        ]
    return []


def _in_turn(seen: Sequence[Sight], node: Node) -> list[int]:
    """Choose for each rank of a node, by index, the GPU that fewest have so far.

    Those that see fewest choose first; where all see the same, it is one after another.
    """
    taken: dict[str, int] = {}
    chosen: dict[int, int] = {}
    for rank in sorted(node.ranks, key=lambda rank: len(seen[rank].gpus)):
        gpus = seen[rank].gpus
        index = min(range(len(gpus)), key=lambda i: taken.get(gpus[i].uuid, 0))
        taken[gpus[index].uuid] = taken.get(gpus[index].uuid, 0) + 1
        chosen[rank] = index
    return [chosen[rank] for rank in node.ranks]


def _check_mode(
    gpus: Sequence[Gpu], ranks: Sequence[int], hostname: str, *, mps: bool
) -> None:
    """Refuse a GPU whose compute mode does not let its ranks in."""
    name = f"GPU {gpus[0].physical} of {hostname}"
    if any(gpu.compute_mode == PROHIBITED_MODE for gpu in gpus):
        raise agreed(
            TopologyError(
                f"{name} lets no process in (compute mode Prohibited), but is planned "
                f"for ranks {in_runs(ranks)}.\nExpected mode Default: nvidia-smi -c 0 "
                "(as root), or leave it out with CUDA_VISIBLE_DEVICES"
            )
        )
    exclusive = any(gpu.compute_mode in EXCLUSIVE_MODES for gpu in gpus)
    if exclusive and len(ranks) > 1 and not mps:
        raise agreed(
            TopologyError(
                f"{name} lets one process in (compute mode Exclusive), but ranks "
                f"{in_runs(ranks)} share it.\nStart as many ranks as GPUs, or CUDA MPS "
                "before the job (nvidia-cuda-mps-control -d), or ask for mode Default: "
                "nvidia-smi -c 0 (as root)"
            )
        )


def for_host_memory(asked: Backend, why_not: str) -> tuple[str, str]:
    """Choose the backend that carries tensors in host memory.

    Args:
        asked: What was asked for.
        why_not: Why ours cannot; ``""``: it can.

    Returns:
        Its name, and what to say of it.

    Raises:
        TopologyError: Ours was asked for and cannot; on every rank or on none.

    >>> for_host_memory("auto", "")
    ('mpi4py', '')
    >>> for_host_memory("auto", "torch is old")
    ('gloo', 'torch is old: gloo instead of mpi4py, which is slower')
    """
    if asked == "gloo":
        return GLOO, ""
    if why_not and asked == "mpi4py":
        raise agreed(
            TopologyError(
                f"--backend mpi4py: {why_not}.\nExpected torch 2.14 or newer: pip "
                "install -U torch, or take --backend gloo"
            )
        )
    if why_not:
        return GLOO, f"{why_not}: gloo instead of mpi4py, which is slower"
    return MPI4PY, ""


def _without_nccl(ranks_per_gpu: int, why: str) -> TopologyError:
    share = f"up to {ranks_per_gpu} ranks share a GPU and " * (ranks_per_gpu > 1)
    return agreed(
        TopologyError(
            f"--backend nccl: {share}{why}.\nExpected one rank per GPU, or leave the "
            "flag out: then another backend is taken where NCCL cannot"
        )
    )


def _without_gpus(nodes: Sequence[Node], flag: str) -> TopologyError:
    return agreed(
        TopologyError(
            f"torch sees no GPU on {', '.join(node.hostname for node in nodes)}, but "
            f"{flag} asks for one per rank.\nAsk the scheduler for GPUs, look at "
            "CUDA_VISIBLE_DEVICES and at nvidia-smi there, or use --device cpu"
        )
    )


def _mixed(seeing: Sequence[int], nodes: Sequence[Node]) -> TopologyError:
    lines = []
    for node in nodes:
        ranks = in_runs(node.ranks)
        with_gpu = [rank for rank in node.ranks if rank in seeing]
        if len(with_gpu) == len(node.ranks):
            lines.append(f"  {node.hostname}: all of ranks {ranks} see a GPU")
        elif not with_gpu:
            lines.append(f"  {node.hostname}: none of ranks {ranks} sees a GPU")
        else:
            some = in_runs(with_gpu)
            lines.append(f"  {node.hostname}: only ranks {some} of {ranks} see a GPU")
    return agreed(
        TopologyError(
            "some ranks see a GPU and others see none:\n"
            + "\n".join(lines)
            + "\nExpected GPUs for all or for none. Ask the scheduler for them on "
            "every node, look at CUDA_VISIBLE_DEVICES there, or use --device cpu"
        )
    )

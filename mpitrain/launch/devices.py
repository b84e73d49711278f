"""Which GPU is whose, and hence which backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.errors import TopologyError, agreed
from mpitrain.world import Node


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where every rank computes. Equal on all ranks."""

    devices: tuple[str, ...]
    """``"cpu"`` or ``"cuda:<visible index>"``, by rank."""
    shared: bool
    """Whether some GPU is used by several ranks."""

    @property
    def backend(self) -> str:
        """What to hand to ``init_process_group``."""
        if self.shared or self.devices[0] == "cpu":
            return "gloo"
        return "cpu:gloo,cuda:nccl"


def plan(
    visible: Sequence[Sequence[str]],
    nodes: Sequence[Node],
    *,
    required: bool = False,
) -> Plan:
    """Give every rank a device.

    Local rank i takes the i-th device it sees. Where every rank of a node sees one
    device (``--gpus-per-task=1``, wrapper scripts), it takes that one. Where there are
    more ranks than devices, they share them in turn.

    Args:
        visible: The UUIDs of the GPUs that each rank sees, in the order of their
            indices, by rank; empty without any.
        nodes: The nodes, by node rank.
        required: Whether to refuse CPUs.

    Returns:
        A device for each rank, and whether any is shared.

    Raises:
        TopologyError: Some ranks see a GPU and others see none, or none does though it
            is required. Raised on every rank or on none, when `visible` is equal on
            all.

    >>> two = (Node(hostname="a", ranks=(0, 1)),)
    >>> plan([["x", "y"], ["x", "y"]], two)
    Plan(devices=('cuda:0', 'cuda:1'), shared=False)
    >>> plan([["x"], ["x"]], two)
    Plan(devices=('cuda:0', 'cuda:0'), shared=True)
    >>> plan([["x"], ["y"]], two).devices, plan([[], []], two).devices
    (('cuda:0', 'cuda:0'), ('cpu', 'cpu'))
    """
    seeing = [rank for rank, uuids in enumerate(visible) if uuids]
    if not seeing and required:
        raise _without_gpus(nodes)
    if not seeing:
        return Plan(devices=("cpu",) * len(visible), shared=False)
    if len(seeing) < len(visible):
        raise _mixed(seeing, nodes)
    devices = [""] * len(visible)
    taken: list[tuple[str, str]] = []
    for node in nodes:
        for local_rank, rank in enumerate(node.ranks):
            index = local_rank % len(visible[rank])
            devices[rank] = f"cuda:{index}"
            taken.append((node.hostname, visible[rank][index]))
    return Plan(devices=tuple(devices), shared=len(set(taken)) < len(taken))


def _without_gpus(nodes: Sequence[Node]) -> TopologyError:
    return agreed(
        TopologyError(
            f"torch sees no GPU on {', '.join(node.hostname for node in nodes)}, but "
            "--device cuda asks for one per rank.\nAsk the scheduler for GPUs, look at "
            "CUDA_VISIBLE_DEVICES and at nvidia-smi there, or use --device cpu"
        )
    )


def _mixed(seeing: Sequence[int], nodes: Sequence[Node]) -> TopologyError:
    lines = [
        f"  {node.hostname}: ranks {list(node.ranks)}, of which "
        f"{[rank for rank in node.ranks if rank in seeing]} see a GPU"
        for node in nodes
    ]
    return agreed(
        TopologyError(
            "some ranks see a GPU and others see none:\n"
            + "\n".join(lines)
            + "\nExpected GPUs for all or for none. Ask the scheduler for them on "
            "every node, look at CUDA_VISIBLE_DEVICES there, or use --device cpu"
        )
    )


def visible_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that torch sees in this process, by index."""
    import torch

    return tuple(
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    )

"""Lines about the ranks, their nodes and devices. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.mpi.world import World, format_ranges


def world_lines(world: World) -> list[str]:
    """Return a line per node, and one on the backend and the rendezvous.

    Returns:
        Lines for the screen.
    """
    lines = []
    for node_rank, node in enumerate(world.nodes):
        ranks = f"rank{'s' * (len(node.ranks) > 1)} {format_ranges(node.ranks)}"
        lines.append(
            f"node {node_rank}: {node.hostname}, {ranks} on "
            f"{devices_in_words(node.devices, node.gpus)}, "
            f"{node.num_cores} core{'s' * (node.num_cores != 1)}"
        )
    lines.append(
        f"backend {world.backend}, rendezvous at "
        f"{world.master_addr}:{world.master_port}, "
        f"{world.num_threads} thread{'s' * (world.num_threads != 1)} per rank"
    )
    return lines


def devices_in_words(devices: Sequence[str], gpus: Sequence[str] = ()) -> str:
    """Describe the devices of a node's ranks, and how many ranks share each.

    ``gpus`` are their GPUs by UUID, empty without GPUs: ranks that see one GPU each all
    call it ``cuda:0``.

    Returns:
        The devices, and how many ranks share each.

    >>> devices_in_words(["cpu", "cpu"])
    'cpu'
    >>> devices_in_words(["cuda:0", "cuda:1", "cuda:0"], ["a", "b", "a"])
    'cuda:0 (shared by 2 ranks), cuda:1'

    Ranks that see one GPU each, another one for each, all call it ``cuda:0``:

    >>> devices_in_words(["cuda:0", "cuda:0"], ["a", "b"])
    '2 GPUs, each as cuda:0'
    """
    if set(devices) == {"cpu"}:
        return "cpu"
    names: dict[str, list[str]] = {}
    for device, gpu in zip(devices, gpus or devices, strict=True):
        names.setdefault(gpu, []).append(device)
    words: list[str] = []
    for of_gpu in names.values():
        name = " or ".join(dict.fromkeys(of_gpu))
        num_ranks = len(of_gpu)
        words.append(
            name if num_ranks == 1 else f"{name} (shared by {num_ranks} ranks)"
        )
    return ", ".join(
        word if words.count(word) == 1 else f"{words.count(word)} GPUs, each as {word}"
        for word in dict.fromkeys(words)
    )

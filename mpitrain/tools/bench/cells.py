"""What is timed: on how many ranks, with which strategy, with how many samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpitrain.launch.parts import in_node_order
from mpitrain.tools.bench.config import BenchScalingConfig, Strategy
from mpitrain.world import World

Fixed = Literal["problem", "work"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row of the table. Equal on all ranks."""

    fixed: Fixed
    """What does not grow with the ranks: a step's samples (problem), or those of a rank
    (work)."""
    strategy: Strategy
    """How the model is spread."""
    num_nodes: int
    """Nodes that the ranks are on."""
    num_ranks: int
    """How many work."""
    num_devices: int
    """How many compute: with dp the GPUs of one rank."""
    global_batch_size: int
    """Samples of a step."""

    @property
    def samples_per_device(self) -> int:
        """Samples of a step on the device that has most."""
        return -(-self.global_batch_size // self.num_devices)


def sizes_of(world: World, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """Return on how many ranks to time, ascending.

    Args:
        world: Where this process stands.
        asked: What the user wants.

    Returns:
        What was asked for, as far as there are ranks, and 1; else powers of two and
        all, and as many as are on 1, 2, 4 ... nodes and all nodes.

    >>> from mpitrain.world import Node
    >>> nodes = tuple(Node(hostname=h, ranks=tuple(range(i, i + 6)))
    ...               for h, i in (("a", 0), ("b", 6), ("c", 12)))
    >>> of_three = World(rank=0, world_size=18, local_rank=0, local_world_size=6,
    ...                  node_rank=0, nodes=nodes)
    >>> sizes_of(of_three), sizes_of(of_three, [12, 24])
    ((1, 2, 4, 6, 8, 12, 16, 18), (1, 12))
    """
    if asked:
        return tuple(sorted({1, *(num for num in asked if num <= world.world_size)}))
    counts = [len(node.ranks) for node in world.nodes]
    on_nodes = {sum(counts[:num]) for num in _doubled(world.num_nodes)}
    return tuple(sorted({*_doubled(world.world_size), *on_nodes}))


def cells_of(
    config: BenchScalingConfig, world: World, num_gpus: int
) -> tuple[list[Cell], list[str]]:
    """Return what is timed, and why the rest is left out.

    Args:
        config: What was asked for.
        world: Where this process stands.
        num_gpus: That rank zero sees.

    Returns:
        Cells by size, `single` first; and lines for the user.
    """
    sizes = sizes_of(world, config.ranks)
    left_out = [
        f"{num} ranks: mpirun started {world.world_size}"
        for num in sorted(set(config.ranks))
        if num > world.world_size
    ]
    if "dp" in config.strategies and num_gpus < 2:
        left_out.append(f"dp: rank 0 sees {num_gpus or 'no'} GPU")
    shared = [name for name in config.strategies if name in ("ddp", "fsdp")]
    if max(sizes) == 1:
        left_out += [f"{strategy}: there is one rank" for strategy in shared]
    cells: list[Cell] = []
    for num_ranks in sizes:
        ranks = in_node_order(world)[:num_ranks]
        num_nodes = sum(node.ranks[0] in ranks for node in world.nodes)
        strategies: dict[Strategy, int] = dict.fromkeys(shared, num_ranks)
        if num_ranks == 1:
            strategies = {"single": 1}
            if "dp" in config.strategies and num_gpus > 1:
                strategies["dp"] = num_gpus
        whole = config.global_batch_size
        if 0 < whole < num_ranks:
            left_out.append(
                f"{num_ranks} ranks with --global-batch-size {whole}: some would have "
                "no sample"
            )
            whole = 0
        for strategy, num_devices in strategies.items():
            asked: tuple[tuple[Fixed, int], ...] = (
                ("problem", whole),
                ("work", config.rank_batch_size * num_devices),
            )
            cells += [
                Cell(
                    fixed=fixed,
                    strategy=strategy,
                    num_nodes=num_nodes,
                    num_ranks=num_ranks,
                    num_devices=num_devices,
                    global_batch_size=size,
                )
                for fixed, size in asked
                if size
            ]
    return cells, left_out


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4 ... and the most.

    >>> _doubled(6)
    [1, 2, 4, 6]
    """
    found = [1 << power for power in range(most.bit_length())]
    return found if found[-1] == most else [*found, most]

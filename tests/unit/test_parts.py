"""Which rank a process has in a part of the job; without MPI."""

from __future__ import annotations

from dataclasses import replace

from mpitrain.launch.subworld import sub_world_of
from mpitrain.mpi.world import Node, World


def world_of(*nodes: tuple[int, ...]) -> World:
    """Rank zero's, on nodes with these ranks."""
    return World(
        rank=0,
        world_size=sum(map(len, nodes)),
        local_rank=0,
        local_world_size=len(nodes[0]),
        node_rank=0,
        nodes=tuple(
            Node(hostname=f"n{number}", ranks=ranks)
            for number, ranks in enumerate(nodes)
        ),
    )


def in_node_order(world: World) -> list[int]:
    return [rank for node in world.nodes for rank in node.ranks]


def test_nodes_are_filled_one_after_another_however_ranks_are_numbered() -> None:
    by_node = world_of((0, 2, 4), (1, 3, 5))
    assert in_node_order(by_node) == [0, 2, 4, 1, 3, 5]
    here = replace(by_node, rank=3, local_rank=1, node_rank=1)
    part = sub_world_of(here, in_node_order(by_node)[:5])
    assert (part.rank, part.world_size, part.node_rank) == (4, 5, 1)
    assert (part.local_rank, part.local_world_size) == (1, 2)
    assert [node.ranks for node in part.nodes] == [(0, 1, 2), (3, 4)]


def test_a_part_keeps_each_ranks_device_and_gpu() -> None:
    world = replace(
        world_of((0, 2), (1, 3)),
        nodes=(
            Node(
                hostname="a",
                ranks=(0, 2),
                devices=("cuda:0", "cuda:1"),
                gpus=("x", "y"),
            ),
            Node(
                hostname="b",
                ranks=(1, 3),
                devices=("cuda:0", "cuda:1"),
                gpus=("z", "u"),
            ),
        ),
        device="cuda:0",
    )
    part = sub_world_of(world, [0, 2, 1])
    assert [node.gpus for node in part.nodes] == [("x", "y"), ("z",)]
    assert [node.devices for node in part.nodes] == [("cuda:0", "cuda:1"), ("cuda:0",)]
    assert part.device == "cuda:0"

"""Checkpoints in the memory of nodes: any node can be lost, and none is half taken.

The ranks of the machine stand for nodes: folders in memory are of a host's name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpitrain.checkpoint import memory_folder
from mpitrain.checkpoint.layout import Checkpoint, list_checkpoints
from mpitrain.checkpoint.memory_folder import MemoryFolder
from mpitrain.checkpoint.memory_manager import MemoryManager
from mpitrain.checkpoint.memory_restore import (
    MemoryCopy,
    fetch,
    find_in_memory,
    moves_between,
)
from mpitrain.checkpoint.storage import CheckpointReader, TensorWriter, Written
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.topology import Node
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi

SHARED = {f"all/{i}": torch.full((i + 1, 500), 1.0 + i) for i in range(9)}


@pytest.fixture(params=[1, 2, 3], ids=lambda it: f"{it}-on-a-node")
def nodes(world: World, request: pytest.FixtureRequest) -> World:
    """The ranks, as if they were on nodes of so many."""
    per_node, size = request.param, world.world_size
    spans = [range(at, min(at + per_node, size)) for at in range(0, size, per_node)]
    made = tuple(
        Node(hostname=f"node{i}", ranks=tuple(span)) for i, span in enumerate(spans)
    )
    mine = world.rank // per_node
    return replace(
        world,
        nodes=made,
        node_rank=mine,
        local_rank=world.rank % per_node,
        local_world_size=len(spans[mine]),
    )


@pytest.fixture
def folder(
    nodes: World, ranks: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MemoryFolder]:
    there = Path(ranks.on_rank_zero(lambda: str(tmp_path), "make a folder"))
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", there)
    made = MemoryFolder(nodes, "job", "a")
    for rank in range(nodes.world_size):  # one after another: they share a parent
        if rank == nodes.rank:
            made.open()
        ranks.allgather(None)
    yield made
    ranks.allgather(None)


def tensors(world: World) -> dict[str, Tensor]:
    """What all ranks have, and what each has alone."""
    own = torch.arange(700.0) + world.rank
    return {**SHARED, f"own/{world.rank}": own}


def save(
    folder: MemoryFolder, nodes: World, ranks: Communicator, step: int, run: str = "a"
) -> str:
    manager = MemoryManager(folder, nodes, ranks, 0.5)
    metadata = {"run": run, "step": step, "metric": None, "trainer": None}
    manager.save(tensors(nodes), metadata, step, 0)
    result = manager.finish("testing")
    manager.close()
    assert result is not None
    return result.error


def restart(
    folder: MemoryFolder, nodes: World, ranks: Communicator, run: str = "a"
) -> Checkpoint | None:
    found = find_in_memory(folder, run, nodes, ranks)
    if found is not None:
        everyone = {f"own/{r}": torch.zeros(700) for r in range(nodes.world_size)}
        read = {name: torch.zeros_like(it) for name, it in SHARED.items()} | everyone
        CheckpointReader(found).load(read)
        for name, tensor in SHARED.items():
            assert torch.equal(read[name], tensor)
        for rank in range(nodes.world_size):
            assert torch.equal(read[f"own/{rank}"], torch.arange(700.0) + rank)
    return found


def test_what_is_written_is_found_and_each_node_has_it(
    folder: MemoryFolder, nodes: World, ranks: Communicator
) -> None:
    for step in (3, 7):
        assert save(folder, nodes, ranks, step) == ""
    found = restart(folder, nodes, ranks)
    assert found is not None
    assert found.step == 7
    assert [it.step for it in list_checkpoints(folder.path)] == [7]
    assert not [*folder.path.glob("checkpoints/.*")]


def test_any_node_can_be_lost(
    folder: MemoryFolder, nodes: World, ranks: Communicator
) -> None:
    for lost in range(nodes.num_nodes):
        assert save(folder, nodes, ranks, 5 + lost) == ""
        ranks.allgather(None)
        if nodes.node_rank == lost and nodes.local_rank == 0:
            shutil.rmtree(folder.path)
            folder.open()
        ranks.allgather(None)
        found = restart(folder, nodes, ranks)
        if nodes.num_nodes == 1:
            assert found is None
        else:
            assert found is not None
            assert found.step == 5 + lost
            # The node that came new has all of it for the next time, too.
            assert restart(folder, nodes, ranks) is not None


def test_neighbours_that_are_lost_together_are_not_half_taken(
    folder: MemoryFolder, nodes: World, ranks: Communicator
) -> None:
    assert save(folder, nodes, ranks, 5) == ""
    ranks.allgather(None)
    if nodes.node_rank < 2 and nodes.local_rank == 0:
        shutil.rmtree(folder.path)
        folder.open()
    ranks.allgather(None)
    assert restart(folder, nodes, ranks) is None
    assert not list_checkpoints(folder.path)


@pytest.mark.parametrize("harm", ["cut", "changed", "no sums", "no index"])
def test_a_broken_file_is_as_a_lost_node(
    harm: str, folder: MemoryFolder, nodes: World, ranks: Communicator
) -> None:
    assert save(folder, nodes, ranks, 5) == ""
    ranks.allgather(None)
    (found,) = list_checkpoints(folder.path)
    if nodes.rank == 0:
        file = found.path / "rank-0.bin"
        if harm == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        elif harm == "changed":
            data = bytearray(file.read_bytes())
            data[9] ^= 1
            file.write_bytes(data)
        else:
            name = {"no sums": "SHA256SUMS", "no index": "tensors.json"}[harm]
            (found.path / name).unlink()
    ranks.allgather(None)
    got = restart(folder, nodes, ranks)
    assert (got is None) == (nodes.num_nodes == 1)


def test_one_that_is_not_complete_on_all_nodes_gives_way_to_the_one_before(
    folder: MemoryFolder, nodes: World, ranks: Communicator, monkeypatch: Any
) -> None:
    """The job died while the nodes renamed their folders."""
    assert save(folder, nodes, ranks, 5) == ""
    with monkeypatch.context() as patch:
        patch.setattr(
            MemoryFolder, "keep_only", lambda *_: None
        )  # it did not get there
        assert save(folder, nodes, ranks, 9) == ""
    ranks.allgather(None)
    if nodes.node_rank < 2 and nodes.local_rank == 0:
        (newer,) = [it for it in list_checkpoints(folder.path) if it.step == 9]
        newer.path.rename(newer.path.with_name(".step-00000009.abc"))
        folder.open()
    ranks.allgather(None)
    found = restart(folder, nodes, ranks)
    assert found is not None
    assert found.step == 5


def test_a_node_that_cannot_write_keeps_no_other_waiting(
    folder: MemoryFolder, nodes: World, ranks: Communicator, monkeypatch: Any
) -> None:
    """Its partners wait for what it sends: nothing, then."""
    assert save(folder, nodes, ranks, 5) == ""

    def full(_: TensorWriter) -> Written:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if nodes.node_rank == 0:
            patch.setattr(TensorWriter, "write", full)
        assert "No space left" in save(folder, nodes, ranks, 7)
    assert save(folder, nodes, ranks, 9) == ""
    found = restart(folder, nodes, ranks)
    assert found is not None
    assert found.step == 9


def test_another_run_takes_nothing(
    folder: MemoryFolder, nodes: World, ranks: Communicator
) -> None:
    assert save(folder, nodes, ranks, 5, run="b") == ""
    ranks.allgather(None)
    assert restart(folder, nodes, ranks) is None


def test_without_room_nothing_is_written_and_it_is_said_where(
    folder: MemoryFolder, nodes: World, ranks: Communicator, monkeypatch: Any
) -> None:
    last = nodes.node_rank == nodes.num_nodes - 1
    monkeypatch.setattr(MemoryFolder, "free_bytes", lambda _: 1000 if last else 10**12)
    manager = MemoryManager(folder, nodes, ranks, 0.5)
    manager.save(tensors(nodes), {"run": "a", "step": 5}, 5, 0)
    assert not manager.is_busy
    assert manager.refusal.startswith(f"node{nodes.num_nodes - 1} needs ")
    manager.close()
    assert not list_checkpoints(folder.path)


def test_a_file_that_was_fetched_is_sent_on_as_long_as_it_was_told(
    world: World, ranks: Communicator, tmp_path: Path
) -> None:
    """A node had the first part of a file, gets all of it, and is asked for a part."""
    if world.world_size < 3:
        return
    nodes = replace(
        world,
        nodes=tuple(Node(hostname=f"node{r}", ranks=(r,)) for r in range(3)),
        node_rank=min(world.rank, 2),
        local_rank=0 if world.rank < 3 else 1,
    )
    base = Path(ranks.on_rank_zero(lambda: str(tmp_path), "make a folder"))
    (path := base / f"node{world.rank}" / "step-00000005").mkdir(parents=True)
    digest = "0" * 64
    names = ("metadata.json", "tensors.json")
    (path / "SHA256SUMS").write_text("".join(f"{digest}  {it}\n" for it in names))
    data = bytes(range(100))
    sizes = (10, 100, 0)
    if size := sizes[min(world.rank, 2)]:
        (path / "rank-1.bin").write_bytes(data[:size])
    copies = [
        MemoryCopy(token="a", has={"rank-1.bin": has}, needs={"rank-1.bin": needs})
        for has, needs in zip(sizes, (100, 100, 10), strict=True)
    ]
    moves = moves_between(copies, copies[0])
    assert moves == [("rank-1.bin", 1, 0), ("rank-1.bin", 0, 2)]
    assert fetch(path, moves, copies[0], copies, nodes) == ""
    if world.rank < 3:
        assert (path / "rank-1.bin").read_bytes() == data[: (100, 100, 10)[world.rank]]
    ranks.allgather(None)

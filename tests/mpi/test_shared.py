"""What ranks have in common: arrays held once per node, files that are equal."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mpitrain.errors import DataError, MpitrainError, RemoteError
from mpitrain.mpi import shared_arrays
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import Node, World

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi

KINDS = ("?", "u1", "i2", "<i4", ">i4", "i8", "f2", "f4", "f8", "c16", "S3", "U2")


@pytest.fixture
def place(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder in memory that all ranks see, and no other job; empty at the end."""
    name = comm.bcast(f"/dev/shm/mpitrain-test-{os.getpid()}")
    folder = Path(name)
    if comm.rank == 0:
        folder.mkdir()
    comm.Barrier()
    yield folder
    comm.Barrier()
    if comm.rank == 0:
        folder.rmdir()  # fails where something is left


@pytest.fixture(params=["one node", "two nodes", "a node each"])
def on_nodes(request: pytest.FixtureRequest, world: World, apart: World) -> World:
    """The same ranks, as if they were on one, two or as many nodes."""
    if request.param == "one node":
        return world
    return two_nodes(world) if request.param == "two nodes" else apart


def two_nodes(world: World) -> World:
    """Let even and odd ranks be those of two nodes."""
    shares = [tuple(range(start, world.world_size, 2)) for start in (0, 1)]
    nodes = [Node(hostname=f"h{i}", ranks=r) for i, r in enumerate(shares) if r]
    node_rank = world.rank % 2
    mine = nodes[node_rank].ranks
    return replace(
        world,
        nodes=tuple(nodes),
        node_rank=node_rank,
        local_rank=mine.index(world.rank),
        local_world_size=len(mine),
    )


def made() -> dict[str, np.ndarray]:
    """Arrays of every kind and order, some empty, one without dimensions."""
    numbers = np.arange(24).reshape(2, 3, 4)
    arrays = {kind: numbers.astype(kind) for kind in KINDS}
    arrays |= {
        "turned": np.asfortranarray(numbers),
        "sliced": numbers[::-1, ::2, 1:3],
        "empty": np.zeros((0, 5), np.float64),
        "empty bytes": np.zeros(0, np.uint8),
        "single": np.array(7, np.int16),
        "last": np.array([1.5]),
    }
    return arrays


def only_on_rank_zero(comm: MPI.Intracomm, arrays: Mapping[str, Any]) -> Any:
    def make() -> Mapping[str, Any]:
        assert comm.rank == 0, "called on another rank"
        return arrays

    return make


# --- hold -----------------------------------------------------------------------------


def test_arrays_of_rank_zero_are_equal_everywhere(
    comm: MPI.Intracomm, on_nodes: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "CHUNK_BYTES", 100)
    ranks = Communicator(comm, on_nodes)
    expected = made()
    held = ranks.load_shared(only_on_rank_zero(comm, expected), "make some")
    assert list(held) == list(expected)
    for name, array in expected.items():
        assert held[name].dtype == array.dtype, name
        assert held[name].shape == array.shape, name
        assert (held[name] == array).all(), name
        assert held[name].flags.aligned, name
    assert ranks.load_shared(only_on_rank_zero(comm, {}), "make nothing") == {}
    nothing = {"a": np.zeros((3, 0)), "b": np.zeros(0, np.uint8)}
    held = ranks.load_shared(only_on_rank_zero(comm, nothing), "make nothing")
    assert {name: array.shape for name, array in held.items()} == {
        "a": (3, 0),
        "b": (0,),
    }


def test_ranks_of_a_node_share_their_memory(
    comm: MPI.Intracomm, on_nodes: World
) -> None:
    arrays = {"a": np.zeros(3, np.uint8), "b": np.zeros(5000)}
    held = Communicator(comm, on_nodes).load_shared(
        only_on_rank_zero(comm, arrays), "make some"
    )
    comm.Barrier()
    if on_nodes.local_rank == on_nodes.local_world_size - 1:
        held["b"][17] = 1 + on_nodes.node_rank
    comm.Barrier()
    assert held["b"][17] == 1 + on_nodes.node_rank
    files = comm.allgather(file_at(held["b"]))
    for node in on_nodes.nodes:
        assert len({files[rank] for rank in node.ranks}) == 1
    assert len(set(files)) == on_nodes.num_nodes or on_nodes.local_world_size == 1


def file_at(array: np.ndarray) -> str:
    """The device and inode of what is mapped where an array lies; proc(5)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode = line.split()[:5]
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= array.ctypes.data < end:
            return f"{device} {inode}"
    raise AssertionError("not mapped")


def test_memory_is_free_again_when_no_array_is_left(
    comm: MPI.Intracomm, world: World
) -> None:
    ranks = Communicator(comm, world)
    before = mapped_files()  # other tests' trainings may not be collected yet
    for _ in range(3):
        held = ranks.load_shared(
            only_on_rank_zero(comm, {"a": np.ones(1 << 20, np.uint8)}), "make one"
        )
        assert held["a"].all()
    assert mapped_files() > before
    del held
    assert mapped_files() <= before


def mapped_files() -> set[str]:
    """Return the inodes of `load_shared` that this rank maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:mpitrain-data" in line}


@pytest.mark.parametrize("error", [ValueError("no such thing"), DataError("broken")])
def test_an_exception_of_rank_zero_arrives_on_every_rank(
    comm: MPI.Intracomm, on_nodes: World, error: Exception
) -> None:
    def make() -> Mapping[str, Any]:
        raise error

    ranks = Communicator(comm, on_nodes)
    kind = type(error) if comm.rank == 0 else RemoteError
    with pytest.raises(kind, match=str(error)) as caught:
        ranks.load_shared(make, "make some")
    assert getattr(caught.value, "reporting_rank", None) == 0
    everywhere = comm.allgather(getattr(caught.value, "is_collective", False))
    if isinstance(error, MpitrainError):
        assert all(everywhere)
    held = ranks.load_shared(only_on_rank_zero(comm, made()), "make some")
    assert held["last"].tolist() == [1.5]


@pytest.mark.parametrize("where", ["everywhere", "on the last node"])
@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_where_there_is_no_room_each_rank_holds_its_own(
    comm: MPI.Intracomm,
    world: World,
    call: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    feigned = two_nodes(world)
    lacks = where == "everywhere" or feigned.node_rank == feigned.num_nodes - 1

    def fail(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    if lacks:
        monkeypatch.setattr(os, call, fail)
    is_used = call == "posix_fallocate" or feigned.local_world_size > 1
    is_lacking = comm.allreduce(lacks and is_used) > 0
    arrays = {"a": np.arange(100_000), "b": np.array([3])}
    with caplog.at_level(logging.WARNING, "mpitrain"):
        held = Communicator(comm, feigned).load_shared(
            only_on_rank_zero(comm, arrays), "make some"
        )
    monkeypatch.undo()
    assert (held["a"] == arrays["a"]).all()
    assert held["b"].tolist() == [3]
    warned = [r.getMessage() for r in caplog.records]
    assert len(warned) == (is_lacking and comm.rank == 0)
    for words in warned:
        assert words.startswith("no shared memory for the data set (")
        assert "No space left" in words
    comm.Barrier()
    held["b"][0] = comm.rank
    comm.Barrier()
    found = comm.allgather(int(held["b"][0]))
    theirs = {found[rank] for rank in feigned.nodes[feigned.node_rank].ranks}
    if lacks:
        assert found[comm.rank] == comm.rank
    else:  # the other node goes on sharing
        assert len(theirs) == 1


# --- agree, compare -------------------------------------------------------------------


def test_what_is_equal_on_all_ranks_is_agreed(world: World) -> None:
    ranks = communicator(world)
    ranks.check_equal("12", "the length", "Expected one")
    assert ranks.allgather(world.rank) == list(range(world.world_size))
    assert ranks.on_rank_zero(lambda: world.rank, "ask") == 0


def test_what_differs_between_ranks_is_refused_on_all(world: World) -> None:
    if world.world_size == 1:
        return
    last = world.world_size - 1
    mine = "11" if world.rank == last else "12"
    with pytest.raises(DataError) as caught:
        communicator(world).check_equal(mine, "the length of it", "Expected the same.")
    assert str(caught.value) == (
        f"the length of it differs between ranks: 12 on rank 0, 11 on rank {last}.\n"
        "Expected the same."
    )
    assert (caught.value.reporting_rank, caught.value.is_collective) == (0, True)


def test_nodes_that_see_other_files_are_named(
    comm: MPI.Intracomm, on_nodes: World
) -> None:
    ranks = Communicator(comm, on_nodes)
    asked: list[int] = []

    def look(words: str) -> str:
        asked.append(comm.rank)
        return words

    ranks.check_same_on_nodes(lambda: look("the same"), "the files of /data")
    is_asked = on_nodes.local_rank == 0 and on_nodes.num_nodes > 1
    assert asked == [comm.rank] * is_asked
    if on_nodes.num_nodes == 1:
        ranks.check_same_on_nodes(lambda: look(str(comm.rank)), "the files of /data")
        return
    with pytest.raises(DataError) as caught:
        ranks.check_same_on_nodes(
            lambda: look(str(on_nodes.node_rank)), "the files of /data"
        )
    others = [node.hostname for node in on_nodes.nodes[1:]]
    assert str(caught.value).startswith(
        f"the files of /data are not the same on all nodes: {', '.join(others)} "
        f"{'sees' if len(others) == 1 else 'see'} others than h0.\n"
    )
    assert (caught.value.reporting_rank, caught.value.is_collective) == (0, True)


def test_a_node_that_cannot_look_is_told_on_all(
    comm: MPI.Intracomm, on_nodes: World
) -> None:
    def look() -> str:
        if on_nodes.node_rank == on_nodes.num_nodes - 1:
            raise DataError(f"no folder on {on_nodes.hostname}")
        return ""

    ranks = Communicator(comm, on_nodes)
    if on_nodes.num_nodes == 1:
        ranks.check_same_on_nodes(look, "the files")
        return
    with pytest.raises(MpitrainError, match="no folder on h") as caught:
        ranks.check_same_on_nodes(look, "the files")
    assert caught.value.reporting_rank == on_nodes.nodes[-1].ranks[0]


# --- once per node --------------------------------------------------------------------


def test_rank_zero_does_it_before_one_rank_of_each_other_node(
    comm: MPI.Intracomm, on_nodes: World, place: Path
) -> None:
    Communicator(comm, on_nodes).once_per_node(
        lambda: (place / f"{len(list(place.iterdir()))}-{comm.rank}").touch(), "fetch"
    )
    who = sorted(path.name for path in place.iterdir())
    assert who[0] == "0-0"
    firsts = sorted(node.ranks[0] for node in on_nodes.nodes)
    assert sorted(int(name.partition("-")[2]) for name in who) == firsts
    comm.Barrier()
    if on_nodes.local_rank == 0:
        for path in place.glob(f"*-{comm.rank}"):
            path.unlink()


def test_what_fails_once_is_told_on_all(comm: MPI.Intracomm, on_nodes: World) -> None:
    def fail() -> None:
        raise DataError("there is no internet")

    with pytest.raises(MpitrainError, match="there is no internet"):
        Communicator(comm, on_nodes).once_per_node(fail, "fetch")


@pytest.mark.parametrize("name", ["allgather", "gather"])
def test_ranks_wait_asleep_for_one_that_is_busy(
    comm: MPI.Intracomm, world: World, name: str
) -> None:
    collective = getattr(Communicator(comm, world), name)
    if comm.rank == comm.size - 1:
        time.sleep(0.8)
    cpu_seconds = time.process_time()
    collective(comm.rank)
    assert time.process_time() - cpu_seconds < 0.3

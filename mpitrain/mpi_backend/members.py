"""Which MPI communicator a torch group has."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from mpitrain.errors import TopologyError
from mpitrain.mpi_backend.failures import GroupError
from mpitrain.topology import working_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

_TAGS = 32768
"""Every MPI has as many (MPI 4.1, 9.1.2)."""

_ALL_CAME = "all came"

_world: list[MPI.Intracomm] = []
"""All ranks in the order of torch's default group; at most one."""


def meet(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    name: str,
    timeout_seconds: float,
) -> None:
    """Wait until all members of a group to be made have come.

    MPI makes a communicator in a call that cannot give up, and in which a rank spins
    until the last one has come, on a core that this one may need. Here it sleeps.

    Collective over the group to be.

    Args:
        store: The group's own.
        rank: This process in the group.
        ranks: Those of all members in the default group.
        name: The group's name.
        timeout_seconds: How long to wait.

    Raises:
        GroupError: Some did not come in time.
    """
    store.set(f"came/{rank}", "")
    if store.add("number", 1) >= len(ranks):
        store.compare_set("found", "", _ALL_CAME)
    try:
        store.wait(["found"], timedelta(seconds=timeout_seconds))
    except RuntimeError:  # what is found first holds for all, also for who comes late
        came = [store.check([f"came/{place}"]) for place in range(len(ranks))]
        missing = [r for r, is_here in zip(ranks, came, strict=True) if not is_here]
        names = ", ".join(f"rank {r}" for r in missing)
        store.compare_set("found", "", names or _ALL_CAME)
    found = store.get("found").decode()
    if found != _ALL_CAME:
        raise GroupError(
            f"{found} did not come within {timeout_seconds:g} s to make group {name}.\n"
            "Expected all its ranks to make the same groups in one order."
        )


def all_ranks(rank: int, size: int) -> MPI.Intracomm:
    """Make the communicator of the default group.

    Collective over all ranks.

    Args:
        rank: This process's, as torch was told.
        size: Their number, as torch was told.

    Raises:
        TopologyError: MPI knows another number of processes.
    """
    everybody = working_ranks()
    if everybody.size != size:
        raise TopologyError(
            f"torch.distributed was told of {size} ranks, MPI knows {everybody.size}.\n"
            "Expected the mpi4py backend in a program that mpirun has started, with a "
            "group of all its ranks: mpirun -np 4 python -m mpitrain run script.py"
        )
    comm = cast("MPI.Intracomm", everybody.Split(0, key=rank))
    ranks = comm.allgather(rank)
    if ranks != list(range(size)):
        comm.Free()
        raise TopologyError(
            f"torch.distributed was told that the ranks are {sorted(ranks)}; expected "
            f"each of 0 to {size - 1} once. Look at the variable RANK on each."
        )
    _world[:] = [comm]
    return comm


def some_ranks(ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Make the communicator of a group of some ranks.

    Collective over these ranks alone.

    Args:
        ranks: Their ranks in the default group, in the group's order.
        name: The group's name: groups that are made at one time must not mix.
    """
    world = _world[0] if _world and _world[0] else _as_mpi_numbers_them()
    members = world.Get_group().Incl(list(ranks))
    try:
        return world.Create_group(members, tag=zlib.crc32(name.encode()) % _TAGS)
    finally:
        members.Free()


def _as_mpi_numbers_them() -> MPI.Intracomm:
    """Return all ranks, where torch's default group is another backend's.

    Raises:
        TopologyError: Torch numbers them in another way than MPI.
    """
    everybody = working_ranks()
    told, found = (
        (dist.get_rank(), dist.get_world_size()),
        (
            everybody.rank,
            everybody.size,
        ),
    )
    if told != found:
        raise TopologyError(
            f"torch.distributed was told that this is rank {told[0]} of {told[1]}, MPI "
            f"knows it as rank {found[0]} of {found[1]}.\nExpected both to be equal: "
            "mpirun -np 4 python -m mpitrain run script.py"
        )
    return everybody

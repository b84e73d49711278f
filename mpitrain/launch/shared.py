"""What all ranks have in common: arrays held once per node, files that are equal.

An array is read by rank zero, sent to one rank of each node, and mapped by all ranks
there: a file in `/dev/shm` without a name, so that nothing is left of it however its
ranks end (docs/decisions/0008: why no MPI window).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.errors import DataError, agreed
from mpitrain.topology import all_or_none, on_rank_zero, wait_for_all, working_ranks
from mpitrain.world import World, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpitrain")

T = TypeVar("T")

Array = npt.NDArray[Any]

FOLDER = Path("/dev/shm")
"""A file system in memory."""

ALIGNMENT = 64
"""Each array begins at a multiple of so many bytes."""

CHUNK_BYTES = 256 << 20
"""Sent at once between nodes."""


class Ranks:
    """The ranks of a job, for those who read files.

    Args:
        comm: All ranks.
        world: Where this process stands.
    """

    def __init__(self, comm: MPI.Intracomm, world: World) -> None:
        self._comm = comm
        self._world = world

    def on_rank_zero(self, action: Callable[[], T], doing: str) -> T:
        """Do something on rank zero alone and give every rank its (small) result.

        Collective over all ranks.

        Args:
            action: What rank zero does.
            doing: What it is, for messages.
        """
        return on_rank_zero(self._comm, action, doing)

    def tell_all(self, mine: T) -> list[T]:
        """Give every rank what each has, by rank.

        Collective over all ranks.
        """
        return self._comm.allgather(mine)

    def tell_zero(self, mine: T) -> list[T]:
        """Give rank zero what each has, by rank; nothing to the others.

        Collective over all ranks.
        """
        return self._comm.gather(mine) or []

    def hold(
        self, make: Callable[[], Mapping[str, Array]], doing: str
    ) -> dict[str, Array]:
        """Make arrays on rank zero, and hold them once on every node.

        Collective over all ranks.

        Args:
            make: Called on rank zero alone.
            doing: What it does, for messages.

        Returns:
            The arrays, equal on all ranks; those of one node share their memory, so
            that nobody may write to them.

        Raises:
            Exception: Rank zero's; on every rank or on none.
        """
        made: dict[str, Array] = {}

        def outline() -> list[tuple[str, str, tuple[int, ...]]]:
            made.update(
                (name, np.asarray(array, order="C")) for name, array in make().items()
            )
            return [(name, a.dtype.str, a.shape) for name, a in made.items()]

        outlines = on_rank_zero(self._comm, outline, doing)
        places, num_bytes = _places(outlines)
        memory, is_first = self._memory(num_bytes)
        whole = np.frombuffer(memory, np.uint8)
        held = {
            name: whole[start : start + length].view(dtype).reshape(shape)
            for (name, dtype, shape), (start, length) in zip(
                outlines, places, strict=True
            )
        }
        for name, array in made.items():
            held[name][...] = array
        self._spread(whole, is_first)
        return held

    def compare(self, look: Callable[[], str], what: str) -> None:
        """Refuse files that differ between nodes.

        Collective over all ranks.

        Args:
            look: Called on one rank of every node: sums up what it sees there.
            what: What is compared, for the message: ``"the files of ..."``.

        Raises:
            DataError: With the hosts that see another thing than rank zero; on every
                rank or on none.
            Exception: That of `look`; on every rank or on none.
        """
        world = self._world
        if world.num_nodes == 1:
            return
        is_first = world.local_rank == 0
        seen = all_or_none(self._comm, lambda: look() if is_first else "", "compare")
        found: list[str] = self._comm.allgather(seen)
        firsts = [node.ranks[0] for node in world.nodes]
        strange = [
            world.nodes[i].hostname
            for i, rank in enumerate(firsts)
            if found[rank] != found[0]
        ]
        if strange:
            raise agreed(
                DataError(
                    f"{what} are not the same on all nodes: {list_hosts(strange)} "
                    f"{'sees' if len(strange) == 1 else 'see'} others than "
                    f"{world.nodes[0].hostname}.\nExpected the same names and sizes "
                    "everywhere: name a folder that all nodes share, or copy it whole "
                    "to each"
                )
            )

    def agree(self, seen: str, what: str, expected: str) -> None:
        """Refuse what differs between ranks.

        Collective over all ranks.

        Args:
            seen: What this rank has, in words.
            what: What is compared: ``"the length of the training data"``.
            expected: What to do about it.

        Raises:
            DataError: With what the first rank that differs has; on every rank or on
                none.
        """
        found: list[str] = self._comm.allgather(seen)
        other = next((rank for rank, it in enumerate(found) if it != found[0]), None)
        if other is not None:
            raise agreed(
                DataError(
                    f"{what} differs between ranks: {found[0]} on rank 0, "
                    f"{found[other]} on rank {other}.\n{expected}"
                )
            )

    def once_per_file_system(
        self, folder: Path, action: Callable[[], object], doing: str
    ) -> None:
        """Do something on one rank of those that see one folder; the others wait.

        Collective over all ranks.

        Args:
            folder: Made where it is missing. Nodes that see a file that another has
                written there share it.
            action: What is done, such as a download into that folder.
            doing: What it is, for messages.

        Raises:
            Exception: What failed; on every rank or on none.
        """
        world, comm = self._world, self._comm
        name = on_rank_zero(comm, lambda: secrets.token_hex(8), "choose a name")
        is_first_here = world.local_rank == 0

        def marker(node_rank: int) -> Path:
            return folder / f".mpitrain-{name}-{node_rank}"

        def mark() -> None:
            if is_first_here:
                folder.mkdir(parents=True, exist_ok=True)
                marker(world.node_rank).touch()

        try:
            all_or_none(comm, mark, f"write to {folder}")
            wait_for_all(comm)
            sees = [marker(other).exists() for other in range(world.node_rank)]
            wait_for_all(comm)
        finally:
            if is_first_here:
                with contextlib.suppress(OSError):
                    marker(world.node_rank).unlink(missing_ok=True)
        does = is_first_here and not any(sees)
        all_or_none(comm, lambda: action() if does else None, doing)

    def _memory(self, num_bytes: int) -> tuple[mmap.mmap, bool]:
        """Map memory that the ranks of each node share, where it has room for that.

        Returns:
            The memory, and whether this rank is the one that fills it.
        """
        world, comm = self._world, self._comm
        path, descriptor, why = "", -1, ""
        memory: mmap.mmap | None = None
        try:
            if world.local_rank == 0 and world.local_world_size > 1:
                try:
                    path, descriptor = _create(num_bytes)
                    memory = mmap.mmap(descriptor, max(num_bytes, 1))
                except OSError as error:
                    why = f"{FOLDER} of {world.hostname}: {error.strerror or error}"
            offers: list[tuple[str, str]] = comm.allgather((path, why))
            theirs, _ = offers[world.nodes[world.node_rank].ranks[0]]
            if theirs and memory is None:
                try:
                    memory = _open(theirs, num_bytes)
                except OSError as error:
                    why = f"{theirs}: {error.strerror or error}"
            wait_for_all(comm)
            if path:
                # From here on nothing is left of it: to take its pages may last.
                Path(path).unlink()
                path = ""
                try:
                    # Taken now: one that cannot be had later ends the process (SIGBUS).
                    os.posix_fallocate(descriptor, 0, max(num_bytes, 1))
                except OSError as error:
                    why = f"{FOLDER} of {world.hostname}: {error.strerror or error}"
            wait_for_all(comm)
            reasons: list[str] = comm.allgather(why)
        finally:
            if path:
                with contextlib.suppress(OSError):
                    Path(path).unlink()
            if descriptor >= 0:
                os.close(descriptor)
        if any(reasons) and world.is_rank_zero:
            logger.warning(
                "no shared memory for the data set (%s): each rank of that node holds "
                "%.1f MB of its own",
                *(next(filter(None, reasons)), num_bytes / 1e6),
            )
        here = (reasons[rank] for rank in world.nodes[world.node_rank].ranks)
        if memory is None or any(here):
            return mmap.mmap(-1, max(num_bytes, 1)), True
        return memory, world.local_rank == 0

    def _spread(self, whole: Array, is_first: bool) -> None:
        """Send rank zero's bytes to the first rank of each block of memory."""
        comm = self._comm
        between = comm.Split(0 if is_first else 1, comm.rank)
        try:
            if is_first and between.size > 1:
                for start in range(0, len(whole), CHUNK_BYTES):
                    between.Bcast(whole[start : start + CHUNK_BYTES])
        finally:
            between.Free()
        wait_for_all(comm)


def all_ranks(world: World) -> Ranks:
    """Return all ranks that make up the world now; MPI has started.

    Args:
        world: Where this process stands.
    """
    return Ranks(working_ranks(), world)


class Alone:
    """What `Ranks` is to a process without others, such as a tool on a login node."""

    def on_rank_zero(self, action: Callable[[], T], doing: str) -> T:
        """Do it."""
        del doing
        return action()

    def tell_all(self, mine: T) -> list[T]:
        """Give it back."""
        return [mine]

    def tell_zero(self, mine: T) -> list[T]:
        """Give it back."""
        return [mine]

    def hold(
        self, make: Callable[[], Mapping[str, Array]], doing: str
    ) -> dict[str, Array]:
        """Make the arrays."""
        del doing
        return dict(make())

    def compare(self, look: Callable[[], str], what: str) -> None:
        """Do nothing: there is but one node."""

    def agree(self, seen: str, what: str, expected: str) -> None:
        """Do nothing: there is but one rank."""

    def once_per_file_system(
        self, folder: Path, action: Callable[[], object], doing: str
    ) -> None:
        """Do it."""
        del folder, doing
        action()


def _places(
    outlines: list[tuple[str, str, tuple[int, ...]]],
) -> tuple[list[tuple[int, int]], int]:
    """Lay arrays one behind the other.

    >>> _places([("a", "<f8", (3,)), ("b", "|u1", (2, 2))])
    ([(0, 24), (64, 4)], 68)
    """
    places: list[tuple[int, int]] = []
    end = 0
    for _, dtype, shape in outlines:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        length = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        places.append((start, length))
        end = start + length
    return places, end


def _create(num_bytes: int) -> tuple[str, int]:
    """Make a file, without any memory yet; return its path and descriptor."""
    descriptor, path = tempfile.mkstemp(prefix="mpitrain-data-", dir=FOLDER)
    try:
        os.ftruncate(descriptor, max(num_bytes, 1))
    except OSError:
        Path(path).unlink()
        os.close(descriptor)
        raise
    return path, descriptor


def _open(path: str, num_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, max(num_bytes, 1))
    finally:
        os.close(descriptor)

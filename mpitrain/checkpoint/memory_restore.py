"""Finds the newest checkpoint in the memory of the nodes, and completes it on each.

    all ranks                check the files of their node, a part each, and exchange
                             what is whole
    all ranks                choose, alike, the newest whose files the nodes have
    first ranks of nodes     send and receive the files that a node needs
    all ranks                exchange errors; after one the next older is tried

After a restart nodes may be new, or have lost a part: a partner has the first part of a
file, which its own node has whole.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mpitrain.checkpoint.format import (
    METADATA,
    TENSOR_FILE,
    TENSORS,
    check_file,
    read_sums,
    write_durably,
    write_sums,
)
from mpitrain.checkpoint.layout import FOLDER, Checkpoint, list_checkpoints
from mpitrain.checkpoint.memory_folder import PIECE_BYTES, MemoryFolder
from mpitrain.checkpoint.storage import files_of
from mpitrain.errors import DataError
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

logger = logging.getLogger("mpitrain")


@dataclass(kw_only=True)
class MemoryCopy:
    """A checkpoint in the memory of a node, as its ranks have found it."""

    token: str  # of the attempt that wrote it
    has: dict[str, int]  # the bytes of each file
    needs: dict[str, int]  # the bytes of each file that its index names
    small_files: dict[str, bytes] = field(default_factory=dict)  # JSON, on one rank


def find_in_memory(
    folder: MemoryFolder, run_id: str, world: World, ranks: Communicator
) -> Checkpoint | None:
    """Return the newest checkpoint that the nodes have together; all have it then.

    Collective over all ranks. What cannot be used is removed.
    """
    mine = {
        it.path.name: copy
        for it in list_checkpoints(folder.path)
        if (copy := _look(it, run_id, world)) is not None
    }
    by_rank = ranks.allgather(mine)
    for name in sorted({it for found in by_rank for it in found}, reverse=True):
        copies = []
        for node in world.nodes:
            of_ranks = [by_rank[rank].get(name) for rank in node.ranks]
            # Each rank has looked at some of the files of its node.
            copies.append(None if None in of_ranks else of_ranks[0])
        source = next((it for it in copies if it is not None), None)
        # Of two attempts at one step parts do not fit together.
        if source is None or any(it and it.token != source.token for it in copies):
            continue
        moves = moves_between(copies, source)
        if moves is None:
            continue
        path = folder.path / FOLDER / name
        errors = ranks.allgather(fetch(path, moves, source, copies, world))
        if not any(errors):
            folder.keep_only([name])
            ranks.allgather(None)  # the others are gone on all nodes
            return next(it for it in list_checkpoints(folder.path) if it.path == path)
        folder.has_warned = True
        if world.is_rank_zero:
            reason = next(filter(None, errors))
            logger.warning("no checkpoint from memory: %s", reason)
    folder.keep_only([])
    ranks.allgather(None)  # before a rank writes new ones into the folder
    return None


def _look(checkpoint: Checkpoint, run_id: str, world: World) -> MemoryCopy | None:
    """Check this rank's part of the files; the first rank of a node reads the rest."""
    path = checkpoint.path
    try:
        sums = read_sums(path)
        for name in sorted(sums)[world.local_rank :: world.local_world_size]:
            check_file(path, name, sums[name])
        metadata = checkpoint.metadata()
        if metadata["run"] != run_id:
            return None
        copy = MemoryCopy(
            token=metadata["token"],
            has={
                it: (path / it).stat().st_size for it in sums if TENSOR_FILE.match(it)
            },
            needs=files_of(path),
        )
        if world.local_rank == 0:
            small = (TENSORS, METADATA)
            copy.small_files = {name: (path / name).read_bytes() for name in small}
    except (OSError, DataError, KeyError):
        return None  # as if this node had lost it: the others may have all
    return copy


def moves_between(
    copies: Sequence[MemoryCopy | None], source: MemoryCopy
) -> list[tuple[str, int, int]] | None:
    """Return which file goes from which node to which; ``None`` if one is lost."""
    moves = []
    for node, copy in enumerate(copies):
        has = {} if copy is None else copy.has
        for name, size in (copy or source).needs.items():
            if has.get(name, -1) >= size:
                continue
            # A partner has the first part of a file: it may be enough.
            owners = [
                number
                for number, it in enumerate(copies)
                if it is not None and it.has.get(name, -1) >= size
            ]
            if not owners:
                return None
            moves.append((name, owners[0], node))
    return moves


def fetch(
    path: Path,
    moves: Sequence[tuple[str, int, int]],
    source: MemoryCopy,
    copies: Sequence[MemoryCopy | None],
    world: World,
) -> str:
    """Let each node have all that it needs, by its first rank; return an error."""
    if world.local_rank or not moves:
        return ""
    comm, here, error = world_comm(), world.node_rank, ""
    first = [node.ranks[0] for node in world.nodes]
    is_new = copies[here] is None
    folder = path.with_name(f".{path.name}.fetched") if is_new else path
    sums = {} if is_new else read_sums(path)
    for name, owner, node in moves:  # in one order on all nodes: none waits for ever
        copy = copies[owner]
        assert copy is not None
        if here == owner:
            left = copy.has[name]  # the file has more by now, if it was fetched here
            with (path / name).open("rb") as file:
                while data := file.read(min(PIECE_BYTES, left)):
                    heartbeat("sending a checkpoint")
                    comm.Send(np.frombuffer(data, np.uint8), first[node])
                    left -= len(data)
        elif here == node:
            pieces = _received(copy.has[name], first[owner])
            try:
                folder.mkdir(exist_ok=True)
                sums[name] = _write(folder / name, pieces)
            except OSError as full:
                error = f"[{world}] {name}: {full.strerror}"
                for _ in pieces:  # the other one sends all the same
                    pass
    try:
        if is_new:
            for name, data in source.small_files.items():
                sums[name] = write_durably(folder / name, data)
        write_sums(folder, sums)
        if is_new:
            shutil.rmtree(path, ignore_errors=True)  # a broken one
            folder.rename(path)
    except OSError as full:
        error = f"[{world}] {path.name}: {full.strerror}"
    return error


def _received(size: int, rank: int) -> Iterator[bytes]:
    """Yield the pieces of a file that another rank sends."""
    while size:
        heartbeat("fetching a checkpoint")
        piece = np.empty(min(PIECE_BYTES, size), np.uint8)
        world_comm().Recv(piece, rank)
        size -= len(piece)
        yield piece.tobytes()


def _write(path: Path, pieces: Iterator[bytes]) -> str:
    """Write a file, and return its SHA-256."""
    found = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            found.update(piece)
    return found.hexdigest()

"""Writes checkpoints into the memory of all nodes.

Each node has what its ranks hold, once. What no other node has, such as shards and the
states of random numbers, its partner has, too: the next node. So any one node can be
lost, and the others have all of it. HPC calls this multi-level checkpointing, with
copies on partners (SCR, VeloC, FTI; docs/decisions/0017).

A write has these steps:

    a thread of each rank             write its chunks            rank-R.bin
                                      send the size, then the bytes, of what no other
                                      node has; receive them      rank-S.bin
                                      write the sums of both      .sums-R
    all ranks, at a step              exchange how far they are
    a thread of a node's first rank   write JSON and SHA256SUMS, rename the folder
    all ranks, at a step              exchange how far they are
                                      remove the checkpoint before
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpitrain.checkpoint.manager import CheckpointManager, Write, WritePlan, WriteResult
from mpitrain.checkpoint.memory_folder import PIECE_BYTES, SHARED_MEMORY, MemoryFolder
from mpitrain.checkpoint.storage import (
    Chunk,
    Outline,
    Written,
    assign_writers,
    sizes_of,
)
from mpitrain.mpi.collectives import barrier, world_comm
from mpitrain.mpi.implementation import has_thread_multiple
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.record.supervised import write_memory_step

POLL_SECONDS = 0.002


@dataclass(kw_only=True)
class NodePlan(WritePlan):
    """What a rank writes, and what partners send to each other."""

    num_sent: int = 0  # of its first chunks, which no other node has
    partner: int = -1  # the rank to which they go
    sources: tuple[int, ...] = ()  # the ranks that send theirs to this one
    node_bytes: int = 0  # of all files of this node, about


class MemoryManager(CheckpointManager):
    """Writes checkpoints into the memory of every node, one after another.

    Attributes:
        thread_seconds: How long this rank's threads have worked for the last one.
    """

    def __init__(
        self, folder: MemoryFolder, world: World, ranks: Communicator, fraction: float
    ) -> None:
        super().__init__(folder.path, world, ranks, keep=None)
        self.thread_seconds = 0.0
        self._folder, self._fraction = folder, fraction
        self._places: list[Written] = []
        self._comm = None
        if world.num_nodes > 1 and all(ranks.allgather(has_thread_multiple())):
            barrier(world_comm())  # a wait that can be cancelled; that of Dup cannot
            # For the threads: the training must receive none of their messages.
            self._comm = world_comm().Dup()

    def close(self) -> None:
        """Free the communicator. Collective over all ranks."""
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    # --- the plan -------------------------------------------------------------------

    def _assign(self, by_rank: Sequence[Outline]) -> list[NodePlan]:
        sizes = [*map(sizes_of, by_rank)]
        nodes = [node.ranks for node in self._world.nodes]
        plans = [NodePlan(chunks={}) for _ in by_rank]
        holders: dict[Chunk, set[int]] = {}
        for node, ranks in enumerate(nodes):
            assigned = assign_writers([sizes[rank] for rank in ranks])
            for rank, chunks in zip(ranks, assigned, strict=True):
                plans[rank].chunks = dict.fromkeys(chunks)
                for chunk in chunks:
                    holders.setdefault(chunk, set()).add(node)
        bytes_of = [0] * len(nodes)
        for node, ranks in enumerate(nodes):
            at = (node + 1) % len(nodes)
            for number, rank in enumerate(ranks):
                plan = plans[rank]
                bytes_of[node] += sum(sizes[rank][it] for it in plan.chunks)
                if self._comm is None:
                    continue
                only = [it for it in plan.chunks if len(holders[it]) == 1]
                plan.chunks = dict.fromkeys([*only, *plan.chunks])
                plan.num_sent = len(only)
                plan.partner = nodes[at][number % len(nodes[at])]
                plans[plan.partner].sources += (rank,)
                bytes_of[at] += sum(sizes[rank][it] for it in only)
        for node, ranks in enumerate(nodes):
            for rank in ranks:
                plans[rank].node_bytes = bytes_of[node]
        return plans

    def _make_plan(self, outline: Outline) -> None:
        super()._make_plan(outline)
        self._places = []
        plan, mine = self._plan, ""
        assert isinstance(plan, NodePlan)
        if self._folder.is_keeper:
            # The old one, the new one, and the copies from which that is written.
            needed = 3 * plan.node_bytes
            room = self._fraction * self._folder.free_bytes()
            if needed > room:
                mine = (
                    f"{self._world.hostname} needs {needed / 1e9:.2g} GB in "
                    f"{SHARED_MEMORY}, and {room / 1e9:.2g} GB are allowed "
                    f"(--checkpoint-memory {self._fraction:g}, of what is free)"
                )
        self.refusal = next(filter(None, self._ranks.allgather(mine)), "")

    # --- in threads -----------------------------------------------------------------

    def _write(self, write: Write) -> None:
        began, failure = time.monotonic(), None
        try:
            super()._write(write)
        except Exception as error:
            failure = error
        seconds = time.monotonic() - began  # not what it waits for its partner
        if self._comm is not None:
            # Also after a failure, with nothing: the partner waits for it.
            self._exchange(write, has_data=failure is None)
        if failure is not None:
            raise failure
        # To the node's first rank by a file: an exchange of all ranks would hold up the
        # training, here about each second.
        sums = json.dumps(write.written.sums)
        (write.writer.unfinished / f".sums-{self._world.rank}").write_text(sums)
        self.thread_seconds = seconds

    def _exchange(self, write: Write, *, has_data: bool) -> None:
        """Send what no other node has to the partner, and write what comes."""
        plan, writer = write.plan, write.writer
        assert isinstance(plan, NodePlan)
        sent = [*plan.chunks][: plan.num_sent] if has_data else []
        end = max((writer.spans[it][1] for it in sent), default=0)
        mine = writer.copied[:end].numpy()
        # First the sizes: a rank that has failed sends nothing, which nobody knows.
        sizes = [np.zeros(1, np.int64) for _ in plan.sources]
        self._transfer(plan, np.array([end], np.int64), sizes)
        parts = [np.empty(int(size[0]), np.uint8) for size in sizes]
        self._transfer(plan, mine, parts)
        # Without data of its own the write has failed: then what came is left out.
        for source, data in zip(plan.sources, parts if has_data else [], strict=False):
            name = f"rank-{source}.bin"
            (writer.unfinished / name).write_bytes(data.data)
            write.written.sums[name] = hashlib.sha256(data.data).hexdigest()

    def _transfer(self, plan: NodePlan, mine: Any, parts: Sequence[Any]) -> None:
        comm = self._comm
        assert comm is not None
        requests = [
            comm.Isend(mine[at : at + PIECE_BYTES], plan.partner)
            for at in range(0, len(mine), PIECE_BYTES)
        ]
        requests += [
            comm.Irecv(part[at : at + PIECE_BYTES], source)
            for source, part in zip(plan.sources, parts, strict=True)
            for at in range(0, len(part), PIECE_BYTES)
        ]
        # Asleep: a wait of MPI takes a core, and the training needs it.
        while not all(request.Test() for request in requests):
            time.sleep(POLL_SECONDS)

    def _gather(self, written: Written) -> list[Written]:
        """Return the places alone: they are the same until there is another plan."""
        if not self._places:  # equal on all ranks, since all make plans together
            self._places = self._ranks.allgather(Written(places=written.places))
        return self._places

    def _seconds(self, write: Write) -> float:
        return self._thread.ended_at - write.began  # of this rank: without an exchange

    def _complete(self, write: Write, by_rank: list[Written]) -> None:
        if not self._folder.is_keeper:
            return
        began = time.monotonic()
        here = self._world.nodes[self._world.node_rank].ranks
        # The last that has a chunk counts: of this node, if it can be.
        written = [it for rank, it in enumerate(by_rank) if rank not in here]
        for rank in here:
            file = write.writer.unfinished / f".sums-{rank}"
            written.append(replace(by_rank[rank], sums=json.loads(file.read_text())))
            file.unlink()  # it is no file of a checkpoint
        write.writer.commit(write.tensors, written)
        if self._world.is_rank_zero:
            write_memory_step(write.step)  # the step that counts as progress
        self.thread_seconds += time.monotonic() - began

    def _ended(self, write: Write, seconds: float, error: str = "") -> WriteResult:
        if not error:
            self._folder.keep_only([write.writer.path.name])
        elif self._folder.is_keeper:
            shutil.rmtree(write.writer.unfinished, ignore_errors=True)
        return super()._ended(write, seconds, error)

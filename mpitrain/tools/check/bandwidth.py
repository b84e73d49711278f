"""How fast an all-reduce is over message sizes, by every backend that can run here.

The backends take turns within one run, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpitrain.mpi.collectives import all_reduce, barrier
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpitrain.launch.job import Job

SIZES = tuple(1024 * 4**power for power in range(9))
"""Bytes per rank: 1 KiB to 64 MiB."""

TURNS = 5
"""Samples per size and backend, of which the median is told."""

SAMPLE_SECONDS = 0.02
"""A sample is as many all-reduces in a row as fit into this, one at least."""

MOST_IN_A_ROW = 50

COPY_BYTES = 16 * 2**20
COPY_SECONDS = 0.2

_TENSORS = 5
"""Messages' worth of memory that a rank may take: two tensors, and copies inside."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One message size. Equal on all ranks."""

    num_bytes: int
    """Size of the message on each rank."""
    seconds: dict[str, float]
    """Median time of one all-reduce on the slowest rank, by backend."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What was measured. Equal on all ranks."""

    world_size: int
    """Number of ranks."""
    rows: tuple[Row, ...]
    """By size, ascending."""
    left_out: str
    """Why there are no larger sizes; ``""``: all were measured."""
    copy_bytes_per_second: float
    """Memory copy of each rank while all ranks copy; the median over ranks."""


def bus_factor(world_size: int) -> float:
    """Return what a rank must at least send, as a multiple of the message.

    The bus bandwidth is this times the message over the time, as NCCL's tests have it
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    >>> bus_factor(2), bus_factor(8)
    (1.0, 1.75)
    """
    return 2 * (world_size - 1) / world_size


def measure(
    job: Job, world: World, budget_seconds: float, available_bytes: int
) -> Bandwidth:
    """Measure all-reduces of growing messages, until the time is up.

    Collective over all ranks.

    Args:
        job: The running job.
        world: Where this process stands.
        budget_seconds: How long all of it may take.
        available_bytes: Memory for all ranks of a node; equal on all ranks.

    Returns:
        The table.
    """
    end = time.monotonic() + budget_seconds
    job.progress("check: memory copy")
    copies = job.comm.allgather(_copy_bytes_per_second(job))
    rows: list[Row] = []
    left_out = ""
    groups = groups_in_host_memory(world)
    most_ranks = max(len(node.ranks) for node in world.nodes)
    for size in SIZES:
        job.progress(f"check: bandwidth, {size} bytes")
        needed = 4 * sum(rows[-1].seconds.values()) * (TURNS + 2) if rows else 0.0
        if size * most_ranks * _TENSORS > available_bytes:
            left_out = "not enough memory"
        elif job.comm.bcast(time.monotonic() + needed > end):
            left_out = f"more than {budget_seconds:.0f} s"
        if left_out:
            break
        rows.append(_measure_size(job, calls(job, world, size, groups), size, end))
    return Bandwidth(
        world_size=world.world_size,
        rows=tuple(rows),
        left_out=left_out,
        copy_bytes_per_second=statistics.median(copies),
    )


def host_backend(world: World) -> str:
    """Return the backend of tensors in host memory.

    >>> from types import SimpleNamespace as Some
    >>> host_backend(Some(backend="cpu:gloo,cuda:nccl"))
    'gloo'
    """
    return world.backend.partition(",")[0].rpartition(":")[2]


def groups_in_host_memory(world: World) -> dict[str, dist.ProcessGroup | None]:
    """Return a group of all ranks for each backend of tensors in host memory.

    Collective over all ranks.
    """
    found: dict[str, dist.ProcessGroup | None] = {host_backend(world): None}
    if "gloo" not in found:
        made = dist.new_group(backend="gloo")
        assert isinstance(made, dist.ProcessGroup)  # of all ranks
        found["gloo"] = made
    return found


def calls(
    job: Job,
    world: World,
    num_bytes: int,
    groups: Mapping[str, dist.ProcessGroup | None],
) -> dict[str, Callable[[], object]]:
    """Return one all-reduce of each backend that can run here.

    Args:
        job: The running job.
        world: Where this process stands.
        num_bytes: Size of the message, a multiple of 4.
        groups: Of `groups_in_host_memory`.

    Returns:
        By name; each returns when the result is there.
    """
    on_cpu = torch.zeros(num_bytes // 4)
    array = on_cpu.numpy()
    found: dict[str, Callable[[], object]] = {
        name: functools.partial(dist.all_reduce, on_cpu, group=group)
        for name, group in groups.items()
    }
    if world.device != "cpu":
        on_gpu = torch.zeros(num_bytes // 4, device=world.device)

        def reduce_on_gpu() -> None:
            dist.all_reduce(on_gpu)
            torch.cuda.synchronize(on_gpu.device)

        name = "nccl" if "nccl" in world.backend else f"{world.backend} on GPUs"
        found[name] = reduce_on_gpu
    found["MPI"] = lambda: all_reduce(job.comm, array)
    return found


def _measure_size(
    job: Job, backends: Mapping[str, Callable[[], object]], num_bytes: int, end: float
) -> Row:
    """Let all backends take turns, fewer where time is short.

    Collective over all ranks.
    """
    once = _slowest(job, [_time(job, call, 1) for call in backends.values()])
    counts = [
        max(1, min(MOST_IN_A_ROW, int(SAMPLE_SECONDS / seconds))) for seconds in once
    ]
    cost = sum(n * seconds + seconds for n, seconds in zip(counts, once, strict=True))
    num_turns = job.comm.bcast(int((end - time.monotonic()) / cost))
    turns = [
        _slowest(
            job,
            [
                _time(job, call, count)
                for call, count in zip(backends.values(), counts, strict=True)
            ],
        )
        for _ in range(max(1, min(TURNS, num_turns)))
    ]
    medians = (statistics.median(samples) for samples in zip(*turns, strict=True))
    return Row(num_bytes=num_bytes, seconds=dict(zip(backends, medians, strict=True)))


def _time(job: Job, call: Callable[[], object], count: int) -> float:
    """Return the seconds of one call. Collective over all ranks."""
    barrier(job.comm)
    call()  # ranks leave the sleep above at different times, and this one together
    started = time.perf_counter()
    for _ in range(count):
        call()
    seconds = (time.perf_counter() - started) / count
    job.progress("check: bandwidth")
    return seconds


def _slowest(job: Job, seconds: Sequence[float]) -> list[float]:
    """Return the most that each number is on any rank. Collective over all ranks."""
    barrier(job.comm)
    return [max(column) for column in zip(*job.comm.allgather(seconds), strict=True)]


def _copy_bytes_per_second(job: Job) -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.zeros_like(source)
    barrier(job.comm)
    count, started = 0, time.perf_counter()
    while time.perf_counter() < started + COPY_SECONDS:
        target.copy_(source)
        count += 1
    return count * COPY_BYTES / (time.perf_counter() - started)

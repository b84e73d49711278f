"""Whether nodes reach each other, and whether torch.distributed is right and fast.

Every function with a job or a communicator is collective over all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.launch.process_exit import is_consequence
from mpitrain.launch.rendezvous.reachability import listen
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.world import World, format_ranges
from mpitrain.tools.check.report import Finding
from mpitrain.train.strategy.build import STRATEGIES

if TYPE_CHECKING:
    from mpitrain.launch.job import Job

CONNECT_SECONDS = 3.0
MAX_FINDINGS = 8

# By strategy: gradients of the order of one, in float64 with DDP and in float32 with
# FSDP, which calls reduce-scatter with AVG only there.
TOLERANCES = {"ddp": 1e-12, "fsdp": 1e-4}

REMEDY = (
    "do not train on this: try without one node after another, another network "
    "(--interface), another torch, the same torch on all nodes"
)

NUM_VALUES = 257  # a prime, so that no number of ranks divides it

Part = dict[str, Any]

SIZES = tuple(1024 * 4**power for power in range(9))  # bytes per rank: 1 KiB to 64 MiB

# The backends take turns, so that what disturbs one disturbs all. Medians count.
NUM_TURNS = 5
SAMPLE_SECONDS = 0.02  # a sample is as many all-reduces as fit into this, 1 to 50
NUM_BUFFERS = 5  # messages that a rank needs room for: three tensors, copies inside


class Link(NamedTuple):
    """A connection that failed: node ranks, and the error."""

    source: int
    target: int
    error: str


def find_broken_links(job: Job, world: World, address: str) -> list[Link]:
    """Connect the first rank of every node to that of every other node.

    Runs before the process group exists, since gloo connects all ranks with each other
    and would wait for those that cannot.
    """
    if world.num_nodes == 1:
        return []
    comm = job.comm
    broken: list[Link] = []
    with contextlib.ExitStack() as stack:
        port = 0
        if world.local_rank == 0:
            with contextlib.suppress(OSError):  # nobody will be able to connect to it
                port = stack.enter_context(listen(address)).getsockname()[1]
        # The kernel completes connections while the socket listens: no thread accepts.
        offers: list[tuple[str, int]] = comm.allgather((address, port))
        if world.local_rank == 0:
            others = [node for node in world.nodes if world.rank not in node.ranks]
            with ThreadPoolExecutor(max_workers=64) as pool:
                errors = pool.map(_connect, [offers[it.ranks[0]] for it in others])
                broken = [
                    Link(world.node_rank, world.nodes.index(node), error)
                    for node, error in zip(others, errors, strict=True)
                    if error
                ]
        # Nobody closes its socket before all have tried it.
        barrier(comm)
    return [link for links in comm.allgather(broken) for link in links]


def link_findings(broken: list[Link], world: World) -> list[Finding]:
    """Return an error for each broken link; the last one counts those left out."""
    hosts = [node.hostname for node in world.nodes]
    texts = [
        f"{hosts[source]} does not reach {hosts[target]}: {error}"
        for source, target, error in broken[:MAX_FINDINGS]
    ]
    if len(broken) > MAX_FINDINGS:
        texts[-1] += f"; and {len(broken) - MAX_FINDINGS} more"
    remedy = "every node must reach every other: look for a firewall, name another "
    remedy += "network (--interface), or leave one node out"
    return [Finding("error", "unreachable", text, remedy) for text in texts]


def _connect(offer: tuple[str, int]) -> str:
    if offer[1] == 0:
        return "it cannot listen on its address"
    try:
        socket.create_connection(offer, timeout=CONNECT_SECONDS).close()
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def check_all_reduce(job: Job, world: World) -> tuple[list[Part], list[Finding]]:
    """Sum numbers over all ranks on the CPU, and on the GPUs if they are used."""
    backends = {"cpu": host_backend(world)}
    if world.device != "cpu":
        backends[world.device] = world.backend.rpartition(":")[2]
    parts, findings = [], []
    for device, backend in backends.items():
        device_type = device.partition(":")[0]
        job.progress(f"check: all-reduce on {device}")
        found = all_reduce_error(world, device)
        # Asleep: in allgather a rank would take the core of one that still computes.
        barrier(job.comm)
        errors = {rank: it for rank, it in enumerate(job.comm.allgather(found)) if it}
        part: Part = {"device": device_type, "backend": backend, "is_right": not errors}
        parts.append(part)
        if errors:
            first = min(errors)
            where = f"rank {first} {world.host_of(first)}"
            if len(errors) > 1:
                where = f"ranks {format_ranges(sorted(errors))}, first {where}"
            text = f"all_reduce on {device_type}, {where}: {errors[first]}"
            findings.append(Finding("error", "wrong-all-reduce", text, REMEDY))
    return parts, findings


def all_reduce_error(world: World, device: str) -> str:
    """Return what is wrong with a sum over all ranks on this rank; "" if it is right.

    Collective over all ranks. The sums are exact in float32.
    """
    values = torch.arange(NUM_VALUES, device=device) % 7
    expected = sum((values + rank % 5).float() for rank in range(world.world_size))
    assert isinstance(expected, Tensor)
    found = (values + world.rank % 5).float()
    try:
        dist.all_reduce(found)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        if is_consequence(error):
            raise  # another rank ends, and that rank prints why
        return (str(error).splitlines() or [type(error).__name__])[0]
    wrong = (found != expected).nonzero()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return f"element {at} is {found[at].item()}, expected {expected[at].item()}"


def host_backend(world: World) -> str:
    """Return the backend of tensors in host memory.

    >>> from types import SimpleNamespace as Some
    >>> host_backend(Some(backend="cpu:gloo,cuda:nccl"))
    'gloo'
    """
    return world.backend.partition(",")[0].rpartition(":")[2]


def check_gradients(job: Job, world: World) -> tuple[Part, list[Finding]]:
    """Compare the gradients of DDP and FSDP with those of one process."""
    part: Part = {}
    findings = []
    for strategy, tolerance in TOLERANCES.items():
        if strategy == "fsdp" and world.device != "cpu" and "ccl" not in world.backend:
            continue  # gloo lacks collectives that FSDP calls; untried with mpi4py
        job.progress(f"check: gradients of {strategy}")
        difference = gradient_difference(world, strategy)
        barrier(job.comm)
        by_rank: list[float] = job.comm.allgather(difference)
        far = [rank for rank, value in enumerate(by_rank) if not value <= tolerance]
        worst = max(far or range(len(by_rank)), key=by_rank.__getitem__)
        largest = by_rank[worst]
        part[strategy] = {
            "largest_difference": largest if math.isfinite(largest) else None,
            "tolerance": tolerance,
        }
        if far:
            text = f"{strategy.upper()}'s gradients differ from those of one process "
            text += f"by {largest:.1e} on rank {worst} {world.host_of(worst)} (ranks "
            text += f"{format_ranges(far)}), expected {tolerance:.0e} at most"
            findings.append(Finding("error", "wrong-gradients", text, REMEDY))
    return part, findings


def gradient_difference(world: World, strategy: str) -> float:
    """Return the largest difference of this rank's gradients from one process's.

    Collective over all ranks, which have 1, 2 or 3 samples each.
    """
    dtype = torch.float64 if strategy == "ddp" else torch.float32
    # Unequal, so that the mean of the ranks' means is another one than that of all.
    counts = [1 + rank % 3 for rank in range(world.world_size)]
    first, num_samples = sum(counts[: world.rank]), sum(counts)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        alone = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        samples = torch.randn(num_samples, 16).to(world.device, dtype)
    alone = alone.to(world.device, dtype)
    together = copy.deepcopy(alone)
    alone(samples).square().sum().div(num_samples).backward()
    parallel = STRATEGIES[strategy](TrainConfig(), world)
    parallel.wrap(together, find_unused_parameters=False)
    outputs = parallel.forward(samples[first : first + counts[world.rank]])

    # DDP and FSDP average over ranks; one process averages over samples.
    outputs.square().sum().mul(world.world_size / num_samples).backward()
    differences = []
    for ours, expected in zip(together.parameters(), alone.parameters(), strict=True):
        gradient: Any = ours.grad
        if strategy == "fsdp":
            gradient = gradient.full_tensor()
        differences.append((gradient - expected.grad).abs().max())
    return float(torch.stack(differences).max())  # also if one is not a number


def measure_bandwidth(
    job: Job,
    world: World,
    budget_seconds: float,
    available_bytes: int,
    *,
    with_gloo: bool = True,
) -> tuple[list[Part], str]:
    """Return a row for each message size, and why larger ones are left out."""
    end = time.monotonic() + budget_seconds
    groups: dict[str, dist.ProcessGroup | None] = {host_backend(world): None}
    if with_gloo and "gloo" not in groups:
        groups["gloo"] = dist.new_group(backend="gloo")  # type: ignore[assignment]
    # What each rank sends at least, as NCCL's tests define the bus bandwidth:
    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    factor = 2 * (world.world_size - 1) / world.world_size
    max_ranks = max(len(node.ranks) for node in world.nodes)
    rows: list[Part] = []
    seconds_of_last = 0.0
    for size in SIZES:
        if size * max_ranks * NUM_BUFFERS > available_bytes:
            return rows, "not enough memory"
        # By rank zero's clock, for all; the next message is four times as large.
        if job.comm.bcast(time.monotonic() + 4 * seconds_of_last > end):
            return rows, f"more than {budget_seconds:.0f} s"
        started = time.monotonic()
        calls = _all_reduces(job, world, size, groups)
        turns = [
            [_time(job, call, f"{name}, {size} bytes") for name, call in calls.items()]
            for _ in range(NUM_TURNS)
        ]
        barrier(job.comm)
        by_rank: list[list[list[float]]] = job.comm.allgather(turns)
        row: Part = {"num_bytes": size, "ms": {}, "bus_gb_s": {}}
        for at, name in enumerate(calls):
            # Of each turn the slowest rank, and of these the median.
            slowest = [max(rank[n][at] for rank in by_rank) for n in range(NUM_TURNS)]
            seconds = statistics.median(slowest)
            row["ms"][name] = 1e3 * seconds
            row["bus_gb_s"][name] = factor * size / seconds / 1e9
        rows.append(row)
        seconds_of_last = time.monotonic() - started
    return rows, ""


def _all_reduces(
    job: Job, world: World, num_bytes: int, groups: dict[str, dist.ProcessGroup | None]
) -> dict[str, Callable[[], object]]:
    """Return an all-reduce of each backend; each returns when the result is there."""
    on_cpu = torch.zeros(num_bytes // 4)
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(dist.all_reduce, on_cpu, group=group)
        for name, group in groups.items()
    }
    if world.device != "cpu":
        on_gpu = on_cpu.to(world.device)
        library = world.backend.rpartition(":")[2]
        name = library if "ccl" in library else f"{library} on GPUs"

        def reduce_on_gpu() -> None:
            dist.all_reduce(on_gpu)
            torch.get_device_module(world.device).synchronize()

        calls[name] = reduce_on_gpu
    result = torch.empty_like(on_cpu).numpy()
    calls["MPI"] = functools.partial(job.comm.Allreduce, on_cpu.numpy(), result)
    return calls


def _time(job: Job, call: Callable[[], object], name: str) -> float:
    job.progress(f"check: all-reduce by {name}")
    barrier(job.comm)
    call()  # ranks leave the barrier at different times, and this call together
    started = time.perf_counter()
    call()
    once = time.perf_counter() - started
    # Ranks must make equally many calls.
    count: int = job.comm.bcast(max(1, min(50, int(SAMPLE_SECONDS / once))))
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count

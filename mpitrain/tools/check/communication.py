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
from torch.distributed import ReduceOp

from mpitrain.config import StrategyConfig
from mpitrain.launch.process_exit import is_consequence
from mpitrain.launch.rendezvous.probe import listen
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.world import World, format_ranges
from mpitrain.tools.check.report import Finding
from mpitrain.train.parallel import ParallelModel

if TYPE_CHECKING:
    from mpitrain.launch.exit_guard import ExitGuard
    from mpitrain.launch.init import Job

CONNECT_SECONDS = 3.0
MAX_FINDINGS = 8

# By strategy: gradients of the order of one, in float64 with DDP and in float32 with
# FSDP, which calls reduce-scatter with AVG only there.
TOLERANCES = {"ddp": 1e-12, "fsdp": 1e-4}

# Parts of torch's messages about a collective that a backend does not have.
LACKING = (
    *("cannot use reduceop", "does not support", "is only implemented for"),
    *("not implemented", "not supported", "unsupported"),
)

REMEDY = (
    "do not train on this: try without one node after another, another network "
    "(--interface), another torch, the same torch on all nodes"
)

NUM_VALUES = 257  # values per rank: a prime, so that no number of ranks divides it

Check = tuple[Callable[[], Tensor], Tensor]  # a call, and what it must return here
Outcome = tuple[str, str]  # "right", "wrong", "failed" or "lacking", and details
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


def find_broken_links(guard: ExitGuard, world: World, address: str) -> list[Link]:
    """Connect the first rank of every node to that of every other node.

    Runs before the process group exists, since gloo connects all ranks with each other
    and would wait for those that cannot.
    """
    if world.num_nodes == 1:
        return []
    comm = guard.comm
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


def check_collectives(job: Job, world: World) -> tuple[list[Part], list[Finding]]:
    """Call each collective on the CPU, and on the GPUs if they are used."""
    backends = {"cpu": host_backend(world)}
    if world.device != "cpu":
        backends[world.device] = world.backend.rpartition(":")[2]
    parts, findings = [], []
    for device, backend in backends.items():
        device_type = device.partition(":")[0]
        mine: dict[str, Outcome] = {}
        checks = collective_checks(world.rank, world.world_size, device, backend)
        for kind, (call, expected) in checks.items():
            job.progress(f"check: {kind} on {device}")
            mine[kind] = run_check(call, expected)
        barrier(job.comm)
        bad_here = {kind: it for kind, it in mine.items() if it[0] != "right"}
        by_rank: list[dict[str, Outcome]] = job.comm.allgather(bad_here)
        part: Part = {"device": device_type, "backend": backend}
        part |= {outcome: [] for outcome in ("right", "wrong", "failed", "lacking")}
        for kind in checks:
            bad = {rank: it[kind] for rank, it in enumerate(by_rank) if kind in it}
            outcome, finding = judge(f"{kind} on {device_type}", bad, world)
            part[outcome].append(kind)
            findings += [finding] if finding else []
        parts.append(part)
    return parts, findings


def host_backend(world: World) -> str:
    """Return the backend of tensors in host memory.

    >>> from types import SimpleNamespace as Some
    >>> host_backend(Some(backend="cpu:gloo,cuda:nccl"))
    'gloo'
    """
    return world.backend.partition(",")[0].rpartition(":")[2]


def collective_checks(
    rank: int, size: int, device: str, backend: str
) -> dict[str, Check]:
    """Return the collectives of training; the last rank is their root."""
    values = torch.arange(NUM_VALUES, device=device)
    all_mine = [(values % 7 + r % 5 + 1).float() for r in range(size)]
    every, mine = torch.stack(all_mine), all_mine[rank]
    to_each = mine + torch.arange(size, device=device).view(-1, 1) % 3
    for_me = every + rank % 3
    after, before = (rank + 1) % size, (rank - 1) % size

    # FSDP's names of these two, which torch 2.15 changed.
    names = dist.__dict__
    all_gather: Any = names.get("all_gather_single") or dist.all_gather_into_tensor
    reduce_scatter: Any = (
        names.get("reduce_scatter_single") or dist.reduce_scatter_tensor
    )

    def on_copy(value: Tensor, call: Any, *args: Any, **options: Any) -> Any:
        def run() -> Tensor:
            result = value.clone()
            call(result, *args, **options)
            return result

        return run

    def send_and_receive() -> Tensor:
        if backend == "gloo" and device != "cpu":  # it would abort the process
            raise NotImplementedError("gloo does not support send and recv on GPUs")
        result = torch.zeros_like(mine)
        for turn in (0, 1):  # even ranks send first
            if rank % 2 == turn:
                dist.send(mine, after)
            else:
                dist.recv(result, before)
        return result

    everything, all_for_me, total = every.flatten(), for_me.flatten(), every.sum(0)
    send, zeros = to_each.flatten(), torch.zeros_like(mine)
    checks: dict[str, Check] = {
        "broadcast": (on_copy(mine, dist.broadcast, size - 1), every[-1]),
        "all_reduce (sum)": (on_copy(mine, dist.all_reduce), total),
        "all_reduce (avg)": (
            on_copy(mine * size, dist.all_reduce, ReduceOp.AVG),
            total,
        ),
        "all_reduce (max)": (
            on_copy(mine, dist.all_reduce, ReduceOp.MAX),
            every.amax(0),
        ),
        "all_gather_into_tensor": (
            on_copy(torch.zeros_like(everything), all_gather, mine),
            everything,
        ),
        "reduce_scatter_tensor": (on_copy(zeros, reduce_scatter, send), for_me.sum(0)),
        "reduce_scatter_tensor (avg)": (  # averages gradients with FSDP
            on_copy(zeros, reduce_scatter, send * size, op=ReduceOp.AVG),
            for_me.sum(0),
        ),
        "all_to_all_single": (
            on_copy(torch.zeros_like(all_for_me), dist.all_to_all_single, send),
            all_for_me,
        ),
        "send and recv": (send_and_receive, every[before]),
    }
    if size == 1:
        del checks["send and recv"]
    return checks


def run_check(call: Callable[[], Tensor], expected: Tensor) -> Outcome:
    """Run one check on this rank."""
    try:
        found = call()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if any(words in text.lower() for words in LACKING):
            return "lacking", text
        if is_consequence(error):
            raise  # another rank ends, and that rank prints why
        return "failed", text
    # Averages may round; all else is exact.
    far = ~torch.isclose(found, expected, rtol=1e-6, atol=0.0)
    if not far.any():
        return "right", ""
    at = int(far.nonzero()[0])
    values = found[at].item(), expected[at].item()
    return "wrong", f"element {at} is {values[0]}, expected {values[1]}"


def judge(
    name: str, bad: dict[int, Outcome], world: World
) -> tuple[str, Finding | None]:
    """Return the outcome over all ranks, and a finding; `bad` ranks are not right."""
    if not bad:
        return "right", None
    first = min(bad)
    outcome, detail = bad[first]
    if len(bad) == world.world_size and {o for o, _ in bad.values()} == {"lacking"}:
        remedy = "nothing, if your training does not call it"
        text = f"the backend has no {name}"
        return outcome, Finding("note", "lacking-collective", text, remedy)
    outcome = "wrong" if outcome == "wrong" else "failed"
    where = f"rank {first} {_host_of(first, world)}"
    if len(bad) > 1:
        where = f"ranks {format_ranges(sorted(bad))}, first {where}"
    text = f"{name} {'is wrong' if outcome == 'wrong' else 'failed'} on {where}: "
    if outcome == "wrong":
        return outcome, Finding("error", "wrong-collective", text + detail, REMEDY)
    return outcome, Finding("error", "failed-collective", text + detail, REMEDY)


def _host_of(rank: int, world: World) -> str:
    return next(node.hostname for node in world.nodes if rank in node.ranks)


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
            "largest_difference": None if math.isnan(largest) else largest,
            "tolerance": tolerance,
        }
        if far:
            text = f"{strategy.upper()}'s gradients differ from those of one process "
            text += f"by {largest:.1e} on rank {worst} {_host_of(worst, world)} (ranks "
            text += f"{format_ranges(far)}), expected {tolerance:.0e} at most"
            findings.append(Finding("error", "wrong-gradients", text, REMEDY))
    return part, findings


def gradient_difference(world: World, strategy: str) -> float:
    """Return the largest difference of this rank's gradients from one process's.

    Collective over all ranks, which have 1, 2 or 3 samples each.
    """
    dtype = torch.float64 if strategy == "ddp" else torch.float32
    counts = [1 + rank % 3 for rank in range(world.world_size)]
    first, num_samples = sum(counts[: world.rank]), sum(counts)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        alone = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        samples = torch.randn(num_samples, 16).to(world.device, dtype)
    alone = alone.to(world.device, dtype)
    together = copy.deepcopy(alone)
    alone(samples).square().sum().div(num_samples).backward()
    parallel = ParallelModel(
        together, world, StrategyConfig(), strategy, find_unused_parameters=False
    )
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
    count: int = job.comm.bcast(max(1, min(50, int(SAMPLE_SECONDS / once))))
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count

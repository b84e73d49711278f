"""What is looked for in a job: pure functions over what its ranks told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpitrain.launch.consistency import version_numbers
from mpitrain.mpi.world import Node, format_ranges, list_hosts
from mpitrain.tools.check.facts import (
    SOCKET_VARIABLES,
    HostFacts,
    RankFacts,
)
from mpitrain.tools.check.findings import Finding, by_severity

TRIED_TORCH = "2.15"
"""The oldest torch that our tests ran with."""

LEAST_SHM_BYTES = 2**30
LEAST_MEMLOCK_BYTES = 2**30
LEAST_FREE_BYTES = 2**30
MOST_CLOCK_SECONDS = 2.0

OPEN_FILES = 256
"""Files that a rank has open besides its connections, with room for data workers."""

FILES_PER_RANK = 3
"""Sockets that rank zero has for each rank: gloo's, the store's, the watchdog's."""

SLOW_MBPS = 1000


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What all ranks told."""

    nodes: tuple[Node, ...]
    """The nodes, with their ranks and cores."""
    ranks: tuple[RankFacts, ...]
    """The ranks."""
    hosts: tuple[HostFacts, ...]
    """The nodes as their first ranks see them, by node rank."""
    unwritable: str = ""
    """Why rank zero could not write where trainings would; ``""``: it could."""
    torch_version: str = TRIED_TORCH
    """Version of torch on rank zero."""
    job: str = ""
    """Such as ``"SLURM job 17"``; ``""``: no scheduler."""
    knows_end: bool = False
    """Whether the scheduler told when the job ends."""
    ask_end: str = ""
    """What to type to learn when it ends."""


def find(facts: Facts) -> list[Finding]:
    """Go through everything; the worst first."""
    found = [finding for look in LOOKS for finding in look(facts)]
    return by_severity(found)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2g} GiB"


def one_core(facts: Facts) -> Iterator[Finding]:
    """Ranks that mpirun bound to one core though there are more."""
    bound = []
    for node, host in zip(facts.nodes, facts.hosts, strict=True):
        ranks = [rank for rank in node.ranks if len(facts.ranks[rank].cores) == 1]
        used = {core for rank in node.ranks for core in facts.ranks[rank].cores}
        if ranks and len(used) < host.given_cores:
            bound.append((node.hostname, ranks, host.given_cores))
    if bound:
        hostname, ranks, cores = bound[0]
        more = f" (and so on {len(bound) - 1} more)" if len(bound) > 1 else ""
        yield Finding(
            severity="warning",
            name="one-core",
            found=f"ranks {format_ranges(ranks)} on {hostname}{more} may use one core "
            f"each, of {cores}",
            remedy="mpirun --bind-to none (MPICH: -bind-to none), so that threads and "
            "data workers have cores, too",
        )


def oversubscribed(facts: Facts) -> Iterator[Finding]:
    """More ranks than cores."""
    full = [node for node in facts.nodes if len(node.ranks) > node.num_cores]
    if full:
        worst = max(full, key=lambda node: len(node.ranks) / node.num_cores)
        yield Finding(
            severity="warning",
            name="oversubscribed",
            found=f"{len(worst.ranks)} ranks share "
            f"{_plural(worst.num_cores, 'core')} on "
            f"{list_hosts(node.hostname for node in full)}: the times above are of "
            "ranks that wait for a core",
            remedy="fine for a try; for speed at most one rank per core: mpirun -np "
            f"{sum(min(len(n.ranks), n.num_cores) for n in facts.nodes)}",
        )


def shared_gpus(facts: Facts) -> Iterator[Finding]:
    """Several ranks on one GPU."""
    users: dict[tuple[str, str], int] = {}
    for node in facts.nodes:
        for rank in node.ranks:
            if gpu := facts.ranks[rank].gpu:
                place = (node.hostname, gpu)
                users[place] = users.get(place, 0) + 1
    shared = {place: count for place, count in users.items() if count > 1}
    if shared:
        hosts = list(dict.fromkeys(host for host, _ in shared))
        yield Finding(
            severity="warning",
            name="shared-gpu",
            found=f"up to {max(shared.values())} ranks share a GPU on "
            f"{list_hosts(hosts)}",
            remedy=f"one rank per GPU: mpirun -np {len(users)}, or ask for more GPUs",
        )


def uneven(facts: Facts) -> Iterator[Finding]:
    """Different numbers of ranks per node."""
    sizes = {len(node.ranks) for node in facts.nodes}
    if len(sizes) > 1:
        least = min(facts.nodes, key=lambda node: len(node.ranks))
        most = max(facts.nodes, key=lambda node: len(node.ranks))
        yield Finding(
            severity="warning",
            name="uneven-nodes",
            found=f"{_plural(len(least.ranks), 'rank')} on {least.hostname}, but "
            f"{len(most.ranks)} on {most.hostname}",
            remedy=f"the same on every node: mpirun --map-by ppr:{len(most.ranks)}:node"
            f" (MPICH: -ppn {len(most.ranks)})",
        )


def own_names(facts: Facts) -> Iterator[Finding]:
    """Hosts whose own name leads to a loopback address."""
    loop = [
        host.hostname
        for host in facts.hosts
        if host.name_leads_to
        and all(_is_loopback(address) for address in host.name_leads_to)
    ]
    if loop:
        yield Finding(
            severity="warning" if len(facts.hosts) > 1 else "note",
            name="loopback-name",
            found=f"the own name of {list_hosts(loop)} leads to a loopback address",
            remedy="mpitrain finds the address by itself; for other programs on "
            "several nodes, correct /etc/hosts",
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def small_shm(facts: Facts) -> Iterator[Finding]:
    """A small /dev/shm, as in containers."""
    small = [h for h in facts.hosts if (h.shm_bytes or 0) < LEAST_SHM_BYTES]
    if small:
        least = min(small, key=lambda host: host.shm_bytes or 0)
        yield Finding(
            severity="warning",
            name="small-shm",
            found=f"/dev/shm has {_gib(least.shm_bytes or 0)} on "
            f"{list_hosts(h.hostname for h in small)}: MPI, NCCL and data workers "
            "pass data through it",
            remedy="docker run --shm-size=8g, or --ipc=host; "
            "mount -o remount,size=50% /dev/shm",
        )


def omp_threads(facts: Facts) -> Iterator[Finding]:
    """OMP_NUM_THREADS set by somebody else, and used: the start says where not."""
    given = [
        value
        for rank in facts.ranks
        if (value := rank.variables.get("OMP_NUM_THREADS"))
        and value.partition(",")[0].strip() == str(rank.num_threads)
    ]
    if not given:
        return
    crowded = [
        node
        for node in facts.nodes
        if sum(facts.ranks[rank].num_threads for rank in node.ranks)
        > max(node.num_cores, len(node.ranks))
    ]
    said = f"OMP_NUM_THREADS={given[0]} was set before the start, and is obeyed"
    if crowded:
        threads = sum(facts.ranks[rank].num_threads for rank in crowded[0].ranks)
        said += (
            f": {threads} threads on {_plural(crowded[0].num_cores, 'core')} of "
            f"{crowded[0].hostname}"
        )
    yield Finding(
        severity="warning" if crowded else "note",
        name="omp-num-threads",
        found=said,
        remedy="unset OMP_NUM_THREADS for a fair share of the cores (PBS sets it: "
        "ompthreads of the job script)",
    )


def socket_names(facts: Facts) -> Iterator[Finding]:
    """Interfaces that the user chose."""
    given = {
        name: value
        for rank in facts.ranks
        for name, value in rank.variables.items()
        if name in SOCKET_VARIABLES
    }
    if given:
        words = " ".join(f"{name}={value}" for name, value in given.items())
        yield Finding(
            severity="note",
            name="socket-ifname",
            found=f"{words} was set before the start, and overrules what was found",
            remedy="unset it, unless you know better than the table above",
        )


def memlock(facts: Facts) -> Iterator[Finding]:
    """Too little memory that may be locked, where InfiniBand wants it."""
    low = [
        host
        for host in facts.hosts
        if host.infiniband
        and host.memlock_bytes is not None
        and host.memlock_bytes < LEAST_MEMLOCK_BYTES
    ]
    if low:
        yield Finding(
            severity="warning",
            name="memlock",
            found=f"ulimit -l is {(low[0].memlock_bytes or 0) // 1024} KiB on "
            f"{list_hosts(host.hostname for host in low)}, which has InfiniBand "
            f"({', '.join(low[0].infiniband)}): it cannot register memory",
            remedy="let the administrator set memlock to unlimited, also for the "
            "scheduler's and ssh's daemons",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Too few open files for that many ranks."""
    needed = OPEN_FILES + FILES_PER_RANK * len(facts.ranks)
    low = [h for h in facts.hosts if h.open_files is not None and h.open_files < needed]
    if low:
        yield Finding(
            severity="warning",
            name="open-files",
            found=f"ulimit -n is {low[0].open_files} on "
            f"{list_hosts(h.hostname for h in low)}; {len(facts.ranks)} ranks may "
            f"want {needed}",
            remedy="ulimit -n 65536 in the job script, before mpirun",
        )


def cpu_quota(facts: Facts) -> Iterator[Finding]:
    """A container that may use less time than it sees cores."""
    limited = [
        host
        for host in facts.hosts
        if host.quota is not None and host.quota < host.num_cores
    ]
    if limited:
        yield Finding(
            severity="note",
            name="cpu-quota",
            found=f"the container may use {limited[0].quota:g} of "
            f"{_plural(limited[0].num_cores, 'core')} on "
            f"{list_hosts(host.hostname for host in limited)}",
            remedy="threads are counted by that; docker run --cpus=N for more",
        )


def clocks(facts: Facts) -> Iterator[Finding]:
    """Clocks that are apart."""
    behind = min(facts.hosts, key=lambda host: host.clock_seconds)
    ahead = max(facts.hosts, key=lambda host: host.clock_seconds)
    apart = ahead.clock_seconds - behind.clock_seconds
    if apart > MOST_CLOCK_SECONDS:
        yield Finding(
            severity="warning",
            name="clocks",
            found=f"the clock of {ahead.hostname} is {apart:.0f} s ahead of that of "
            f"{behind.hostname}",
            remedy="let the hosts keep the network's time (timedatectl, chronyc)",
        )


def old_torch(facts: Facts) -> Iterator[Finding]:
    """A torch that is older than what was tried."""
    if version_numbers(facts.torch_version) < version_numbers(TRIED_TORCH):
        yield Finding(
            severity="note",
            name="old-torch",
            found=f"torch {facts.torch_version} is older than {TRIED_TORCH}, with "
            "which mpitrain is tested",
            remedy="pip install --upgrade torch, or trust the checks above",
        )


def runs_folder(facts: Facts) -> Iterator[Finding]:
    """Where trainings would write: writable, shared, with room."""
    zero = facts.hosts[0]
    if facts.unwritable:
        yield Finding(
            severity="error",
            name="unwritable",
            found=f"{zero.hostname} cannot write in {facts.unwritable}",
            remedy="start in a folder of your own, or name one: --runs-dir",
        )
        return
    blind = [host.hostname for host in facts.hosts[1:] if not host.sees_runs]
    if blind:
        yield Finding(
            severity="warning",
            name="not-shared",
            found=f"what {zero.hostname} writes in {zero.runs_dir} is not seen on "
            f"{list_hosts(blind)}: logs of ranks there stay there",
            remedy="start in a folder that all nodes share, or name one: --runs-dir",
        )
    if zero.free_bytes is not None and zero.free_bytes < LEAST_FREE_BYTES:
        yield Finding(
            severity="warning",
            name="disk-full",
            found=f"{_gib(zero.free_bytes)} are free in {zero.runs_dir} on "
            f"{zero.hostname}",
            remedy="make room, or write elsewhere: --runs-dir",
        )


def deadline(facts: Facts) -> Iterator[Finding]:
    """Whether the end of the job is known."""
    if facts.job and not facts.knows_end:
        yield Finding(
            severity="note",
            name="no-deadline",
            found=f"{facts.job} does not tell when it ends",
            remedy=f"try `{facts.ask_end}` on {facts.hosts[0].hostname}; say "
            "--time-limit to trainings",
        )


def slow_link(facts: Facts) -> Iterator[Finding]:
    """Nodes joined by a slow link."""
    if len(facts.hosts) == 1:
        return
    slow = [host for host in facts.hosts if 0 < host.speed_mbps <= SLOW_MBPS]
    if slow:
        yield Finding(
            severity="note",
            name="slow-link",
            found=f"{slow[0].interface} of {list_hosts(h.hostname for h in slow)} has "
            f"{slow[0].speed_mbps} Mb/s",
            remedy="if there is a faster network between the nodes: --interface NAME",
        )


def watchdog(facts: Facts) -> Iterator[Finding]:
    """Ranks without a watchdog."""
    without = [r for r, record in enumerate(facts.ranks) if not record.is_watched]
    if without:
        yield Finding(
            severity="warning",
            name="no-watchdog",
            found=f"no watchdog could start beside ranks {format_ranges(without)}: "
            "hangs there have no name",
            remedy="see the warning that these ranks printed; ulimit -u (processes)",
        )


LOOKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    one_core,
    oversubscribed,
    shared_gpus,
    uneven,
    own_names,
    small_shm,
    omp_threads,
    socket_names,
    memlock,
    open_files,
    cpu_quota,
    clocks,
    old_torch,
    runs_folder,
    deadline,
    slow_link,
    watchdog,
)
"""All that is looked for, in the order of the screen."""

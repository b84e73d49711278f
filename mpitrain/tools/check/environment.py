"""Facts about ranks and nodes, and what may be wrong with them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from mpitrain.launch import cpu
from mpitrain.launch.consistency import version_numbers
from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.launchers import DEFAULT, LAUNCHERS
from mpitrain.mpi.world import World, format_ranges, list_hosts
from mpitrain.tools.check.report import Finding, Severity

VISIBLE_SECONDS = 3.0  # a node looks so long for a new file, which NFS may hide
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TESTED_TORCH = "2.9"  # the oldest
GIB = 2**30
MAX_CLOCK_SECONDS = 2.0
SLOW_MBPS = 1000

# What is known of a rank, a node or a job; docs/howto/check.md describes the fields.
# Limits are None where there is none; unknown numbers are 0.
Facts = SimpleNamespace


def rank_facts(
    world: World, environ: Mapping[str, str], stage_seconds: Mapping[str, float]
) -> Facts:
    """Return the facts about this rank; `environ` is as the user set it."""
    names = ("OMP_NUM_THREADS", *SOCKET_VARIABLES)
    gpus = world.nodes[world.node_rank].gpus
    return Facts(
        num_cores=len(os.sched_getaffinity(0)),
        num_threads=world.num_threads,
        device=world.device,
        gpu=gpus[world.local_rank] if gpus else "",
        variables={name: environ[name] for name in names if name in environ},
        stage_seconds=dict(stage_seconds),
    )


def node_facts(
    world: World, rendezvous: Rendezvous, runs_dir: Path, marker: str
) -> Facts:
    """Return the facts about this node; `marker` is a file that rank zero has made."""
    import psutil

    quota = cpu.cpu_quota()
    folder = nearest(runs_dir)
    shm, infiniband = Path("/dev/shm"), Path("/sys/class/infiniband")
    adapters = sorted(infiniband.iterdir()) if infiniband.is_dir() else []
    return Facts(
        hostname=world.hostname,
        num_cores=os.cpu_count() or 1,
        given_cores=len(cpu.launcher_cores(os.environ)),
        quota=None if quota == float("inf") else quota,
        available_bytes=psutil.virtual_memory().available,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else 0,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        infiniband=tuple(path.name for path in adapters),
        lacks_ofi_plugin="nccl" in world.backend and _lacks_ofi_plugin(),
        address=rendezvous.own_address,
        interface=rendezvous.interface.name,
        kind=rendezvous.interface.kind,
        speed_mbps=rendezvous.interface.speed_mbps,
        runs_dir=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
        sees_runs=_is_visible(marker),
        clock_seconds=time.time(),
    )


@contextlib.contextmanager
def marker_file(runs_dir: Path) -> Iterator[tuple[str, str]]:
    """Make a file for this block; yield its path, and an error or ``""``."""
    file = nearest(runs_dir) / f".mpitrain-check-{secrets.token_hex(8)}"
    try:
        file.write_text("written by `python -m mpitrain check`, to be deleted\n")
    except OSError as error:
        yield "", f"{file.parent}: {error.strerror}"
        return
    try:
        yield str(file), ""
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def nearest(folder: Path) -> Path:
    """Return a folder as an absolute path, or the nearest above it that exists."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _lacks_ofi_plugin() -> bool:
    """Whether this node is on Slingshot, and NCCL will not find its plugin for it.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net-plugin
    """
    if not Path("/sys/class/cxi").is_dir():
        return False
    named = os.environ.get("NCCL_NET_PLUGIN", "")
    names = ["libnccl-net.so", "librccl-net.so", f"libnccl-net-{named}.so", named]
    for name in filter(None, names):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return False
    return True


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _is_visible(marker: str) -> bool:
    end = time.monotonic() + VISIBLE_SECONDS
    while marker:
        with contextlib.suppress(OSError):
            # Listing the folder makes NFS look again; asking for the name may not.
            if Path(marker) in Path(marker).parent.iterdir():
                return True
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return False


def find_problems(facts: Facts) -> list[Finding]:
    """Return what may be wrong with the ranks and nodes of a job."""
    return [
        *_placement(facts),
        *_variables(facts),
        *_limits(facts),
        *_nodes(facts),
        *_runs_folder(facts),
        *_watching(facts),
    ]


def _below(value: float | None, minimum: float) -> bool:
    return value is not None and value < minimum


def _names(hosts: Sequence[Facts]) -> str:
    return list_hosts(host.hostname for host in hosts)


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _placement(facts: Facts) -> Iterator[Finding]:
    nodes, ranks = facts.nodes, facts.ranks
    launcher = LAUNCHERS[facts.launcher or DEFAULT]
    for node, host in zip(nodes, facts.hosts, strict=True):
        bound = [rank for rank in node.ranks if ranks[rank].num_cores == 1]
        if bound and len(node.ranks) < host.given_cores:
            text = f"ranks {format_ranges(bound)} on {node.hostname} may use one "
            text += f"core each, of {host.given_cores}"
            remedy = f"{launcher.program} {launcher.unbound}"
            yield Finding("warning", "one-core", text, remedy)
            break
    if full := [node for node in nodes if len(node.ranks) > node.num_cores]:
        worst = max(full, key=lambda node: len(node.ranks) / node.num_cores)
        text = f"{len(worst.ranks)} ranks share {_plural(worst.num_cores, 'core')} on "
        text += f"{list_hosts(node.hostname for node in full)}: times are long"
        num_ranks = sum(min(len(node.ranks), node.num_cores) for node in nodes)
        remedy = f"for speed at most one rank per core: mpirun -np {num_ranks}"
        yield Finding("warning", "oversubscribed", text, remedy)
    gpus = [(n.hostname, ranks[r].gpu) for n in nodes for r in n.ranks if ranks[r].gpu]
    users = Counter(gpus)
    if hosts := [host for (host, _), count in users.items() if count > 1]:
        text = f"up to {max(users.values())} ranks share a GPU on {list_hosts(hosts)}"
        remedy = f"one rank per GPU: mpirun -np {len(users)}, or ask for more GPUs"
        yield Finding("warning", "shared-gpu", text, remedy)
    # Of each size the first node.
    sizes = {len(node.ranks): node.hostname for node in reversed(nodes)}
    low, high = min(sizes), max(sizes)
    if low < high:
        text = f"{_plural(low, 'rank')} on {sizes[low]}, but {high} on {sizes[high]}"
        words = launcher.per_node.format(slots=high, nodes=len(nodes), ranks="N")
        remedy = f"{launcher.program} {words}"
        yield Finding("warning", "uneven-nodes", text, remedy)


def _variables(facts: Facts) -> Iterator[Finding]:
    """Variables of the user that are used instead of what mpitrain would choose."""
    given = [
        value
        for rank in facts.ranks
        if (value := rank.variables.get("OMP_NUM_THREADS", ""))
        # The start warns if it is not used.
        and value.partition(",")[0].strip() == str(rank.num_threads)
    ]
    if given:
        text = f"OMP_NUM_THREADS={given[0]} was set before the start, and is used"
        severity: Severity = "note"
        for node in facts.nodes:
            threads = sum(facts.ranks[rank].num_threads for rank in node.ranks)
            if severity == "note" and threads > max(node.num_cores, len(node.ranks)):
                severity = "warning"
                text += f": {threads} threads on {_plural(node.num_cores, 'core')} of "
                text += node.hostname
        remedy = "unset OMP_NUM_THREADS (PBS sets it: ompthreads of the job script)"
        if severity == "warning" or facts.scheduler.name != "pbs":  # it sets one itself
            yield Finding(severity, "omp-num-threads", text, remedy)
    names = dict.fromkeys(
        f"{name}={value}"
        for rank in facts.ranks
        for name, value in rank.variables.items()
        if name in SOCKET_VARIABLES
    )
    if names:
        text = f"{' '.join(names)} was set before the start, and overrides the "
        text += "interface that mpitrain chose"
        remedy = "unset it, unless the interface in the table above is wrong"
        yield Finding("note", "socket-ifname", text, remedy)


def _limits(facts: Facts) -> Iterator[Finding]:
    hosts = facts.hosts
    if low := [host for host in hosts if host.shm_bytes < GIB]:
        text = f"/dev/shm has {low[0].shm_bytes / GIB:.2g} GiB on {_names(low)}"
        text += ": MPI, NCCL and data workers pass data through it"
        remedy = "docker run --shm-size=8g, or --ipc=host; else mount -o remount,"
        remedy += "size=50% /dev/shm"
        yield Finding("warning", "small-shm", text, remedy)
    if low := [h for h in hosts if h.infiniband and _below(h.memlock_bytes, GIB)]:
        text = f"ulimit -l is {(low[0].memlock_bytes or 0) // 1024} KiB on "
        text += f"{_names(low)}, which has InfiniBand: it cannot register memory"
        remedy = "memlock unlimited, also for the daemons of the scheduler and of ssh"
        yield Finding("warning", "memlock", text, remedy)
    # With room for data workers; rank zero has sockets of gloo, store and watchdog.
    needed = 256 + 3 * len(facts.ranks)
    if low := [host for host in hosts if _below(host.open_files, needed)]:
        text = f"ulimit -n is {low[0].open_files} on {_names(low)}; "
        text += f"{len(facts.ranks)} ranks may need {needed}"
        remedy = "ulimit -n 65536 in the job script, before mpirun"
        yield Finding("warning", "open-files", text, remedy)
    if low := [host for host in hosts if _below(host.quota, host.num_cores)]:
        cores = _plural(low[0].num_cores, "core")
        text = f"the container may use {low[0].quota:g} of {cores} on {_names(low)}"
        remedy = "threads are counted by it; docker run --cpus=N for more"
        yield Finding("note", "cpu-quota", text, remedy)


def _nodes(facts: Facts) -> Iterator[Finding]:
    behind = min(facts.hosts, key=lambda host: host.clock_seconds)
    ahead = max(facts.hosts, key=lambda host: host.clock_seconds)
    apart = ahead.clock_seconds - behind.clock_seconds
    if apart > MAX_CLOCK_SECONDS:
        text = f"the clock of {ahead.hostname} is {apart:.0f} s ahead of that of "
        remedy = "synchronize the clocks of the hosts (timedatectl, chronyc)"
        yield Finding("warning", "clocks", text + behind.hostname, remedy)
    slow = [host for host in facts.hosts if 0 < host.speed_mbps <= SLOW_MBPS]
    if slow and len(facts.hosts) > 1:
        text = f"{slow[0].interface} of {_names(slow)} has {slow[0].speed_mbps} Mb/s"
        remedy = "if there is a faster network between the nodes: --interface NAME"
        yield Finding("note", "slow-link", text, remedy)
    if without := [host for host in facts.hosts if host.lacks_ofi_plugin]:
        text = f"{_names(without)} is on Slingshot, and NCCL finds no OFI plugin "
        text += "(libnccl-net.so, or librccl-net.so): it would use TCP, which is slow"
        remedy = "load the site's module of aws-ofi-nccl, or aws-ofi-rccl"
        yield Finding("warning", "no-ofi-plugin", text, remedy)
    if version_numbers(facts.torch_version) < version_numbers(TESTED_TORCH):
        text = f"torch {facts.torch_version} is older than {TESTED_TORCH}, with which "
        remedy = "pip install --upgrade torch, or trust the checks above"
        yield Finding("note", "old-torch", text + "mpitrain is tested", remedy)


def _runs_folder(facts: Facts) -> Iterator[Finding]:
    zero = facts.hosts[0]
    if facts.unwritable:
        text = f"{zero.hostname} cannot write in {facts.unwritable}"
        remedy = "start in a folder of your own, or name one: --runs-dir"
        yield Finding("error", "unwritable", text, remedy)
        return
    if blind := [host for host in facts.hosts[1:] if not host.sees_runs]:
        text = f"what {zero.hostname} writes in {zero.runs_dir} is not seen on "
        text += f"{_names(blind)}: logs of ranks there stay there"
        remedy = "start in a folder that all nodes share, or name one: --runs-dir"
        yield Finding("warning", "not-shared", text, remedy)
    if zero.free_bytes < GIB:
        text = f"{zero.free_bytes / GIB:.2g} GiB are free in {zero.runs_dir} on "
        remedy = "make room, or name another folder: --runs-dir"
        yield Finding("warning", "disk-full", text + zero.hostname, remedy)


def _watching(facts: Facts) -> Iterator[Finding]:
    job_id, name = facts.scheduler.job_id, facts.scheduler.name
    if job_id and not facts.knows_end:
        command = {"slurm": f"squeue -h -j {job_id} -o %L", "pbs": f"qstat -f {job_id}"}
        text = f"{name.upper()} job {job_id} does not tell when it ends"
        remedy = f"try `{command.get(name)}` on {facts.hosts[0].hostname}; give "
        yield Finding("note", "no-deadline", text, remedy + "trainings --time-limit")

"""What one rank and one node are like: small records, gathered once from all ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.launch.placement import cpu
from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.world import World

SEEN_SECONDS = 3.0
"""How long a node looks for a file of rank zero: NFS may hide a new one for a while."""

SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One node, as its first rank sees it."""

    hostname: str
    """Its name."""
    num_cores: int
    """Cores of the machine."""
    given_cores: int
    """Cores that the launcher of this rank may use there; 0: unknown."""
    quota: float | None
    """Cores' worth of time that the container may use; ``None``: no limit."""
    available_bytes: int
    """Memory that programs may still take."""
    shm_bytes: int | None
    """Size of /dev/shm; ``None``: there is none."""
    memlock_bytes: int | None
    """``ulimit -l`` in bytes; ``None``: no limit."""
    open_files: int | None
    """``ulimit -n``; ``None``: no limit."""
    infiniband: tuple[str, ...]
    """Adapters of InfiniBand or RoCE."""
    name_leads_to: tuple[str, ...]
    """Addresses that the host's own name resolves to."""
    address: str
    """Its address on the network by which rank zero is reached."""
    interface: str
    """The interface with that address; ``""``: unknown."""
    kind: str
    """The interface's class, such as ``"infiniband"``."""
    speed_mbps: int
    """The interface's speed in Mb/s; 0: unknown."""
    runs_dir: str
    """The folder that trainings would write to, or the one it would be made in."""
    free_bytes: int | None
    """Room on its file system; ``None``: there is no such folder here."""
    sees_runs: bool
    """Whether a file that rank zero has just written there is here, too."""
    clock_seconds: float
    """Its clock when all ranks were at one place, seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank."""

    cores: tuple[int, ...]
    """Its affinity mask."""
    num_threads: int
    """Threads that it computes with."""
    device: str
    """Where it computes, as ``"cpu"`` or ``"cuda:1"``."""
    gpu: str
    """UUID of its GPU; ``""`` on a CPU."""
    variables: Mapping[str, str]
    """What the user had set of the variables that the start settles."""
    stage_seconds: Mapping[str, float]
    """How long each stage of the start took."""
    is_watched: bool
    """Whether the watchdog could start."""
    host: HostFacts | None = None
    """Its node; ``None`` where another rank of the node tells."""


def of_rank(
    world: World,
    before: Mapping[str, str],
    stage_seconds: Mapping[str, float],
    *,
    is_watched: bool,
    host: HostFacts | None,
) -> RankFacts:
    """Look at this rank.

    Args:
        world: Where it stands.
        before: Its environment as the user made it.
        stage_seconds: How long each stage of its start took.
        is_watched: Whether its watchdog could start.
        host: Its node, if this rank tells of it.

    Returns:
        Its record.
    """
    names = ("OMP_NUM_THREADS", *SOCKET_VARIABLES)
    gpus = world.nodes[world.node_rank].gpus
    return RankFacts(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        num_threads=world.num_threads,
        device=world.device,
        gpu=gpus[world.local_rank] if gpus else "",
        variables={name: before[name] for name in names if name in before},
        stage_seconds=dict(stage_seconds),
        is_watched=is_watched,
        host=host,
    )


def of_host(
    world: World, rendezvous: Rendezvous, runs_dir: Path, marker: str
) -> HostFacts:
    """Look at this node.

    Args:
        world: Where this process stands.
        rendezvous: Where rank zero is reached, and from where.
        runs_dir: Where trainings would write.
        marker: Path of a file that rank zero has written there; ``""``: it could not.

    Returns:
        Its record; the clock is read last.
    """
    import psutil

    quota = cpu.cpu_quota()
    folder = nearest(runs_dir)
    return HostFacts(
        hostname=world.hostname,
        num_cores=os.cpu_count() or 1,
        given_cores=_launcher_cores(),
        quota=None if quota == float("inf") else quota,
        available_bytes=psutil.virtual_memory().available,
        shm_bytes=_size_of(Path("/dev/shm")),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        infiniband=_entries(Path("/sys/class/infiniband")),
        name_leads_to=_name_leads_to(),
        address=rendezvous.own_address,
        interface=rendezvous.interface.name,
        kind=rendezvous.interface.kind,
        speed_mbps=rendezvous.interface.speed_mbps,
        runs_dir=str(folder),
        free_bytes=_free(folder),
        sees_runs=_sees(marker),
        clock_seconds=time.time(),
    )


@contextlib.contextmanager
def marked(runs_dir: Path) -> Iterator[tuple[str, str]]:
    """Leave a file where trainings would write, for the time of this block.

    Args:
        runs_dir: The folder; where there is none, the nearest above is taken.

    Yields:
        The file's path and nothing, or nothing and why it could not be written.
    """
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
    """Return a folder as an absolute path, or the nearest above it that is there."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def shares(records: Sequence[RankFacts], quota: float | None) -> tuple[float, ...]:
    """Divide the cores of one node: a core that n ranks may use counts 1/n for each.

    Args:
        records: The ranks of the node.
        quota: Cores' worth of time that they may use together; ``None``: no limit.

    Returns:
        Cores of each, in the order of `records`.
    """
    owners: dict[int, int] = {}
    for record in records:
        for core in record.cores:
            owners[core] = owners.get(core, 0) + 1
    most = float("inf") if quota is None else quota / len(records)
    return tuple(
        round(min(sum(1 / owners[core] for core in record.cores), most), 3)
        for record in records
    )


def _launcher_cores() -> int:
    """Count the cores of the process that started this one: mpirun, or its daemon."""
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return 0


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _size_of(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _entries(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def _name_leads_to() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _sees(marker: str) -> bool:
    end = time.monotonic() + SEEN_SECONDS
    while marker:
        with contextlib.suppress(OSError):
            # Listing the folder makes NFS look again; asking for the name may not.
            if Path(marker) in Path(marker).parent.iterdir():
                return True
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return False

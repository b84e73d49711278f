"""What the start costs at up to 131,072 ranks, by the real code and a modelled network.

    .venv/bin/python benchmarks/start_model.py
    .venv/bin/python benchmarks/start_model.py --ranks 8 4096 --per-node 4

The stages of `mpitrain.launch` run as rank zero, then as a rank in the middle of the
job, each with a communicator that stands for all other ranks: it makes their values
from this rank's, merges them up the tree, and counts messages and bytes. Time is what
Python needs here, measured, plus the messages: a latency for each hop and the bytes
over a bandwidth. MPI's own work in MPI_Init and MPI_Comm_split_type is not in it.

Then one server each of the watchdog and of torch's store gets real clients on loopback.
Rank zero has a watchdog's connection for each rank of its node, each of the next nodes
and each further group of nodes, and one of the store for each rank.
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mpitrain.config import LaunchConfig
from mpitrain.launch import consistency, cpu, gpu
from mpitrain.launch.rendezvous import reachability, select, transports
from mpitrain.launch.rendezvous.interfaces import Interface
from mpitrain.launch.watchdog_tree import FAN_OUT, MAX_DIRECT_LINKS, connect_watchdogs
from mpitrain.mpi.collectives import Compressed
from mpitrain.mpi.topology import discover_world
from mpitrain.watchdog.links import CoordinatorServer

HOP_SECONDS = 10e-6  # one message of mpi4py with a pickle, between two nodes
BYTES_PER_SECOND = 1e9
CLIENTS = 400  # of the watchdog's server
STORE_CLIENTS = 20  # of one process: its 26th waits 5 s (torch 2.14)


STAGES = (
    *("who is where", "compare", "network", "watchdog", "MPI between nodes"),
    *("threads", "devices"),
)


class Done:
    """A request that is complete."""

    def Test(self) -> bool:
        return True


class ModelComm:
    """Stands for all ranks of a job, or of a node; counts what this rank receives."""

    def __init__(self, rank: int, size: int, job: ModelJob | None = None) -> None:
        self.rank, self.size, self._job = rank, size, job
        self._levels = math.ceil(math.log2(size)) if size > 1 else 0
        self.seconds = self.model_seconds = 0.0  # of messages; of making this model
        self.num_bytes = self.max_bytes = 0  # into this rank; into any rank but zero

    def _message(self, num_bytes: int, hops: int) -> None:
        self.seconds += hops * HOP_SECONDS + num_bytes / BYTES_PER_SECOND

    def Ibarrier(self) -> Done:
        self._message(0, 2 * self._levels)
        return Done()

    def Irecv(self, buffer: Any, source: int) -> Done:
        self._message(len(buffer), 1)
        self.num_bytes += len(buffer)
        return Done()

    def Isend(self, buffer: Any, dest: int) -> Done:
        return Done()

    def Allreduce(self, first: Any, numbers: Any, op: Any) -> None:
        self._message(0, 2 * self._levels)
        self.num_bytes += 8 * self._levels

    def bcast(self, value: Any, root: int = 0) -> Any:
        if self._job is None:  # of a node: its ranks are alike
            return value
        sent = self._job.broadcast(self.rank, root, value)
        self._message(len(sent), self._levels)
        self.num_bytes += len(sent) if self.rank != root else 0
        self.max_bytes += len(sent)
        return pickle.loads(sent) if self.rank != root else value

    def allgather(self, value: Any) -> list[Any]:
        assert self._job is None
        return [value] * self.size

    gather = allgather

    def reduce(self, mine: Compressed[Any], merge: Callable[[Any, Any], Any]) -> Any:
        """Merge, as mpi4py does it: from the ranks 1, 2, 4 ... away, up a tree."""
        assert self._job is not None
        contribution = self._job.contribution()

        def other(mine: Compressed[Any], rank: int) -> Compressed[Any]:
            return Compressed(contribution(mine.value, rank))

        result, distance = copy.deepcopy(mine), 1
        while distance < self.size and self.rank % (2 * distance) == 0:
            began = time.perf_counter()
            end = min(self.rank + 2 * distance, self.size)
            subtree: Any = other(mine, self.rank + distance)
            for rank in range(self.rank + distance + 1, end):
                subtree = merge(subtree, other(mine, rank))
            sent = pickle.dumps(subtree)
            self.model_seconds += time.perf_counter() - began
            self._message(len(sent), 1)
            self.num_bytes += len(sent)
            self.max_bytes = max(self.max_bytes, len(sent))
            result = merge(result, pickle.loads(sent))
            distance *= 2
        return result if self.rank == 0 else None


class ModelJob:
    """All ranks: what rank zero has broadcast, and what each rank contributes."""

    def __init__(self, size: int, per_node: int) -> None:
        self.size, self.per_node = size, per_node
        self.num_nodes = -(-size // per_node)
        self._sent: list[bytes] = []
        self._num_received = self._num_reduced = 0

    def start(self) -> None:
        """Begin the run of another rank."""
        self._num_received = self._num_reduced = 0

    def broadcast(self, rank: int, root: int, value: Any) -> bytes:
        """Return what is broadcast; rank zero runs first."""
        assert root == 0
        if rank == 0:
            self._sent.append(pickle.dumps(value))
            return self._sent[-1]
        self._num_received += 1
        return self._sent[self._num_received - 1]

    def contribution(self) -> Callable[[Any, int], Any]:
        """Return what makes another rank's value of the next reduction from this one's.

        In the order of the stages.
        """
        n, first = self.per_node, lambda rank: rank % self.per_node == 0

        def hosts(mine: Any, rank: int) -> Any:
            ranks = tuple(range(rank, min(rank + n, self.size)))
            return {self.hostname(rank): [(ranks, len(ranks))]} if first(rank) else {}

        def by_value(mine: Any, rank: int) -> Any:
            return {next(iter(mine or MISSING)): [rank]}

        def clocks(mine: Any, rank: int) -> Any:
            return {rank // n: next(iter(mine.values()))}

        def attempts(mine: Any, rank: int) -> Any:
            tries = first(rank) and select.probes(rank // n, self.num_nodes)
            return {(ATTEMPT,) * 4: [self.hostname(rank)]} if tries else {}

        def by_node(mine: Any, rank: int) -> Any:
            key = next(iter(mine or MISSING))
            return {key: [rank // n]} if first(rank) else {}

        def hubs(mine: Any, rank: int) -> Any:
            node = rank // n
            is_hub = first(rank) and node % FAN_OUT == 0 < node
            return {node: ("10.128.0.1", 40000)} if is_hub else {}

        many = [hubs] if self.size > MAX_DIRECT_LINKS else []
        orders = (hosts, by_value, clocks, attempts, *many, by_node, by_node)
        self._num_reduced += 1
        return orders[self._num_reduced - 1]

    def hostname(self, rank: int) -> str:
        """Return a name such as machines of that size have."""
        return f"nid{rank // self.per_node:06}"


MISSING = {"another rank's": []}
CARD = Interface(name="hsn0", kind="slingshot", speed_mbps=200_000)
ATTEMPT = select.Attempt(interface=CARD)
FOUR = gpu.VisibleGpus(
    gpus=tuple(f"GPU-8932f937-d72c-4106-c12f-20bd9faed9f{i}" for i in range(4)),
    has_nccl=True,
)


def run_stages(job: ModelJob, rank: int) -> tuple[dict[str, float], ModelComm]:
    """Run the start as one rank; return seconds by stage, and the communicator."""
    job.start()
    comm: Any = ModelComm(rank, job.size, job)
    per_node = min(job.per_node, job.size)
    on_node: Any = ModelComm(rank % per_node, per_node)
    socket.gethostname = lambda: job.hostname(rank)
    seconds: dict[str, float] = {}

    def timed(name: str, stage: Callable[[], Any]) -> Any:
        messages, model = comm.seconds, comm.model_seconds
        began = time.perf_counter()
        result = stage()
        python = time.perf_counter() - began - (comm.model_seconds - model)
        seconds[name] = python + comm.seconds - messages
        return result

    on_node.gather = lambda it: [
        (it[0] - it[0] % per_node + i, *it[1:]) for i in range(per_node)
    ]
    world = timed("who is where", lambda: discover_world(comm, on_node))
    config = LaunchConfig(device="auto")
    timed("compare", lambda: consistency.check_consistency(comm, world, config, 60.0))
    select.try_offers = lambda offers, *_: [ATTEMPT] * len(offers)
    found = timed("network", lambda: select.find_rendezvous(comm, on_node, world))
    watched: Any = SimpleNamespace(
        is_connected=False, listen=lambda *_: 40000, connect=lambda *_: None
    )
    timed(
        "watchdog",
        lambda: connect_watchdogs(comm, watched, world, on_node, "10.128.0.1"),
    )
    if world.num_nodes > 1:
        timed(
            "MPI between nodes",
            lambda: transports.check_mpi_messages(comm, world, found, 60.0),
        )
    variables = dict(os.environ)
    world = timed(
        "threads", lambda: cpu.configure_threads(comm, on_node, world, variables)
    )
    gpu.discover_gpus = lambda _: FOUR
    gpu.has_thread_multiple = lambda: True
    timed(
        "devices", lambda: gpu.assign_devices(comm, on_node, world, config, variables)
    )
    if found.listener is not None:
        found.listener.close()
    return seconds, comm


def tries(job: ModelJob) -> float:
    """Return rank zero's seconds for the connections of the nodes that try it."""
    nodes = job.num_nodes
    num_probing = sum(select.probes(node, nodes) for node in range(nodes))
    if not num_probing:
        return 0.0
    with reachability.listen("127.0.0.1") as listener:
        where = listener.getsockname()[:2]
        with reachability.answering([listener], b"secret"):
            began = time.perf_counter()
            for _ in range(64):
                assert not reachability.connect(where, 0, b"secret", seconds=3.0)[1]
            each = (time.perf_counter() - began) / 64  # of both ends
    return each * num_probing * 4


def links(job: ModelJob) -> int:
    """Return the number of connections of rank zero's watchdog."""
    if job.size <= MAX_DIRECT_LINKS:
        return job.size - 1
    on_node = min(job.per_node, job.size) - 1
    return on_node + min(job.num_nodes, FAN_OUT) - 1 + (job.num_nodes - 1) // FAN_OUT


def watchdog_seconds() -> float:
    """Return a watchdog's seconds for the connection of another one."""
    server = CoordinatorServer("127.0.0.1", "token", CLIENTS)
    clients = [
        socket.create_connection(("127.0.0.1", server.port)) for _ in range(CLIENTS)
    ]
    for rank, client in enumerate(clients):
        client.sendall(f"token {rank}\n".encode())
    began = time.perf_counter()
    server.receive(server.sockets())
    server.receive(server.sockets())
    each = (time.perf_counter() - began) / CLIENTS
    for client in clients:
        assert client.recv(100)  # its answer
        client.close()
    server.close()
    return each


STORE_PROGRAM = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore

where = "127.0.0.1", int(sys.argv[1]), 1, False, timedelta(seconds=60)
began = time.perf_counter()
clients = [TCPStore(*where, wait_for_workers=False) for _ in range(int(sys.argv[2]))]
print((time.perf_counter() - began) / len(clients))
"""


def store_seconds() -> float:
    """Return the seconds of one connection to torch's store, both ends."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", STORE_PROGRAM, str(server.port), str(STORE_CLIENTS)]
    return float(subprocess.run(words, capture_output=True, check=True).stdout)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [8, 64, 512, 4096, 32768, 131072]
    parser.add_argument("--ranks", type=int, nargs="+", default=sizes)
    parser.add_argument("--per-node", type=int, default=8)
    asked = parser.parse_args()
    import torch.distributed  # noqa: F401 - its import is not part of a stage

    from mpitrain.mpi.implementation import start_mpi

    start_mpi()
    logging.getLogger("mpitrain").setLevel(logging.ERROR)
    watchdog, store = watchdog_seconds(), store_seconds()
    print(f"{'ranks':>7} " + "".join(f"{name:>19}" for name in STAGES), end="")
    print(f"{'rank 0':>10}{'another':>10}{'into 0':>12}{'into another':>14}")
    for size in asked.ranks:
        job = ModelJob(size, asked.per_node)
        of_zero, zero = run_stages(job, 0)
        of_other, other = run_stages(job, size // 2)
        of_zero["network"] += tries(job)
        of_zero["watchdog"] += links(job) * watchdog
        print(f"{size:7} ", end="")
        for name in STAGES:
            print(f"{1e3 * of_zero.get(name, 0.0):16.1f} ms", end="")
        into = max(zero.max_bytes, other.num_bytes)
        print(
            f"{sum(of_zero.values()):8.2f} s{sum(of_other.values()):8.2f} s"
            f"{zero.num_bytes / 1e6:9.3f} MB{into / 1e6:11.3f} MB"
        )
    largest = max(asked.ranks)
    print(
        f"besides, at rank zero: {1e6 * store:.0f} us for each rank's client of the "
        f"store: {largest * store:.1f} s at {largest} ranks"
    )


if __name__ == "__main__":
    main()

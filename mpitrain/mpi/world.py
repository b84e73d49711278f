"""`World`: the place of one process among all of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MAX_HOSTS = 8


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of the job. Equal on all ranks."""

    hostname: str
    ranks: tuple[int, ...]  #: ascending; local rank `i` is ``ranks[i]``
    num_cores: int = 0  #: that its ranks may use together; 0 before they were counted
    #: Each rank's, such as "cuda:1"; empty before they were assigned.
    devices: tuple[str, ...] = ()
    #: Each rank's GPU by a number of this node, equal where ranks share one; empty
    #: without GPUs. The ranks' logs have the UUIDs.
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process in the job, in torchrun's words.

    `world_size`, `num_nodes`, `nodes`, `backend`, `master_addr` and `master_port`
    are equal on all ranks; the other fields are this rank's own.
    """

    rank: int  #: this process among all, 0 to ``world_size - 1``
    world_size: int  #: number of processes of the job
    local_rank: int  #: this process among those of its node, ordered by rank
    local_world_size: int  #: number of processes on this node
    node_rank: int  #: this node among all; nodes are numbered by their lowest rank
    nodes: tuple[Node, ...]  #: by node rank

    num_cores: int = 1  #: this rank's share of its node's, for threads and data workers
    num_threads: int = 1  #: that this process computes with
    device: str = "cpu"  #: where it computes: "cpu" or "cuda:<visible index>"
    backend: str = ""  #: torch.distributed's, such as "gloo"; empty before the start
    master_addr: str = ""  #: where rank zero's store listens; empty before the start
    master_port: int = 0  #: of rank zero's store; 0 before the start

    @property
    def num_nodes(self) -> int:
        """Number of machines of the job."""
        return len(self.nodes)

    @property
    def hostname(self) -> str:
        """Name of this process's machine."""
        return self.nodes[self.node_rank].hostname

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which writes files and the screen."""
        return self.rank == 0

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's machine."""
        return next(node.hostname for node in self.nodes if rank in node.ranks)

    def __str__(self) -> str:
        return rank_label(self.rank, self.world_size, self.hostname)


def rank_label(rank: int, world_size: int, hostname: str) -> str:
    """Name a process as every message does.

    >>> rank_label(2, 4, "gpu03")
    'rank 2/4 gpu03'
    """
    return f"rank {rank}/{world_size} {hostname}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges.

    >>> format_ranges([0, 1, 2, 3]), format_ranges([0, 2, 3, 7])
    ('0-3', '0,2-3,7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def list_hosts(hosts: Iterable[str]) -> str:
    """Name hosts, each once; where there are many, count the rest.

    >>> list_hosts(["a", "b", "a"])
    'a, b'
    >>> list_hosts(f"n{i}" for i in range(100))
    'n0, n1, n2, n3, n4, n5, n6, n7 and 92 more'
    """
    names = list(dict.fromkeys(hosts))
    more = len(names) - _MAX_HOSTS
    return ", ".join(names[:_MAX_HOSTS]) + (f" and {more} more" if more > 0 else "")

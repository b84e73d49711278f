"""How long a step should take: computing, and then bytes over bandwidth.

Nothing of a network or a machine is put in that was not measured in the same job: one
rank's steps, and an all-reduce of as many bytes as the gradients have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpitrain.world import World


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The time of a step on one rank: a line over the number of its samples."""

    step_seconds: float
    """However few they are."""
    sample_seconds: float
    """For each of them."""

    def seconds(self, num_samples: int) -> float:
        """Return how long a step of so many samples takes."""
        return self.step_seconds + num_samples * self.sample_seconds


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What of a model travels."""

    num_bytes: int
    """Of its gradients."""
    block_bytes: int
    """Of those in the repeated blocks, whose weights FSDP gathers twice: it lets go of
    them between forward and backward."""
    gathered_share: float = 1.0
    """What a gathered weight has of its bytes: half in 16 bits."""

    def traffic(self, strategy: str, num_ranks: int) -> float:
        """Return what a rank must at least send in a step, in bytes.

        >>> Weights(num_bytes=100, block_bytes=0).traffic("ddp", 4)
        150.0
        >>> Weights(num_bytes=100, block_bytes=100).traffic("fsdp", 4)
        225.0
        """
        if strategy == "ddp":
            times = 2.0 * self.num_bytes  # reduce-scatter and all-gather
        else:
            gathered = self.num_bytes + self.block_bytes
            times = self.num_bytes + self.gathered_share * gathered
        return times * (num_ranks - 1) / num_ranks


def line_through(points: Sequence[tuple[int, float]]) -> Compute:
    """Lay a line through one rank's steps.

    Args:
        points: Samples and seconds; one or two.

    Returns:
        The line; through the origin where there is one point, or the smaller number of
        samples took too long, or too short, for a line that rises from there.

    >>> line_through([(10, 0.3), (20, 0.5)])
    Compute(step_seconds=0.1, sample_seconds=0.02)
    >>> line_through([(20, 0.5)])
    Compute(step_seconds=0.0, sample_seconds=0.025)
    """
    (few, short), (many, long) = min(points), max(points)
    if few < many and (rise := (long - short) / (many - few)) > 0.0:
        start = round(long - many * rise, 9)
        if start >= 0.0:
            return Compute(step_seconds=start, sample_seconds=round(rise, 12))
    return Compute(step_seconds=0.0, sample_seconds=long / many)


def crowding(part: World) -> float:
    """Return how much slower ranks compute together than one of them alone.

    Args:
        part: The ranks that work, with the cores and GPUs of their nodes.

    Returns:
        Threads per core, or ranks per GPU, where there are most; at least 1.

    >>> from mpitrain.world import Node
    >>> node = Node(hostname="a", ranks=tuple(range(8)), num_cores=2)
    >>> crowding(World(rank=0, world_size=8, local_rank=0, local_world_size=8,
    ...                node_rank=0, nodes=(node,), num_threads=1))
    4.0
    """
    most = 1.0
    for node in part.nodes:
        if part.device == "cpu":
            threads = len(node.ranks) * part.num_threads
            most = max(most, threads / max(1, node.num_cores))
        else:
            most = max([most, *(float(node.gpus.count(gpu)) for gpu in node.gpus)])
    return most


def predicted_seconds(
    compute: Compute,
    num_samples: int,
    part: World,
    traffic: float,
    bytes_per_second: float,
) -> float:
    """Predict the time of a step.

    Args:
        compute: One rank's.
        num_samples: Of the rank that has most.
        part: The ranks that work.
        traffic: What a rank must at least send.
        bytes_per_second: The bus bandwidth of these ranks.
    """
    return crowding(part) * compute.seconds(num_samples) + traffic / bytes_per_second

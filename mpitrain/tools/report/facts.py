"""What a run's files come to: jobs, where the time went, and who was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpitrain.record.reading import CutShort, RankJob, Run, TimedThroughput
from mpitrain.train.metrics import (
    COMMUNICATION,
    NUM_PHASES,
    OTHER,
    PHASES,
    UPDATE,
)

Floats = NDArray[np.float64]

SAME_JOB_SECONDS = 60.0
"""Ranks of a job write their first lines within this time, as clocks and disks go."""

STAGES = ("start", *PHASES)
"""Where the time of a job goes; in `Shares` communication is parted in two."""

SHARES = (
    "start",
    "data",
    "forward",
    "backward",
    "communication",
    "waiting",
    "update",
    "evaluation",
    "checkpoint",
    "other",
)
"""As they are shown. ``waiting``: for the rank that is the last; ``communication``:
what it takes from then on."""


@dataclass(kw_only=True)
class Job:
    """What one mpirun came to, as the files of its ranks tell."""

    number: int
    """From 1."""
    world_size: int
    began: float
    """When the first process started, seconds since 1970."""
    ended: float
    """Until when something is known, seconds since 1970."""
    ranks: dict[int, RankJob] = field(default_factory=dict)
    """Those that wrote something."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes whose ranks wrote something."""
        return len({rank.node_rank for rank in self.ranks.values()})

    @property
    def wall_seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began

    def holds(self, time: float | None) -> bool:
        """Tell whether something happened during this job."""
        return time is not None and self.began <= time <= self.ended + 1.0

    def silent(self) -> list[int]:
        """Return ranks without a word on its end, where most have one: killed."""
        words = self._cuts()
        every = range(self.world_size)
        most = len(words) > self.world_size / 2
        known = self.ranks
        return [it for it in every if it in known and it not in words] if most else []

    def unseen(self) -> list[int]:
        """Return ranks without a file: their nodes may not see the run folder."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def last_words(self) -> list[int]:
        """Return the few ranks that left a word, where the others were ended by them.

        A rank that fails ends the job, which leaves the others no time.
        """
        words = list(self._cuts())
        return words if len(words) <= len(self.ranks) / 2 else []

    def culprits(self) -> list[int]:
        """Return the ranks that did something else at the end than most: the others.

        Those waited for them, in ``communication``; on GPUs for the gradient's norm.
        """
        cuts = self._cuts()
        phases = Counter(cut.phase for cut in cuts.values())
        if not phases:
            return []
        most = max(phases, key=lambda it: (phases[it], it == COMMUNICATION))
        others = [rank for rank, cut in cuts.items() if cut.phase != most]
        waits = most in (COMMUNICATION, UPDATE)
        return others if waits and len(others) <= len(cuts) / 2 else []

    def _cuts(self) -> dict[int, CutShort]:
        return {rank: it.cut for rank, it in self.ranks.items() if it.cut is not None}


def jobs_of(run: Run) -> list[Job]:
    """Put together what the ranks of each job have written.

    No clock says which first lines belong together: a new job has begun where a rank
    begins once more, another number of ranks does, or much later.
    """
    parts = [job for file in run.ranks.values() for job in file.jobs]
    jobs: list[Job] = []
    first = 0.0
    for part in sorted(parts, key=lambda it: it.time):
        if (
            not jobs
            or part.rank in jobs[-1].ranks
            or part.world_size != jobs[-1].world_size
            or part.time > first + SAME_JOB_SECONDS
        ):
            first = part.time
            jobs.append(
                Job(
                    number=len(jobs) + 1,
                    world_size=part.world_size,
                    began=part.time - part.start_seconds,
                    ended=part.ended,
                )
            )
        job = jobs[-1]
        job.ranks[part.rank] = part
        job.began = min(job.began, part.time - part.start_seconds)
        job.ended = max(job.ended, part.ended)
    return jobs


def columns(part: RankJob) -> Floats:
    """Return the seconds of each phase in each line: `(lines, phases)`."""
    return np.array([list(column) for column in part.seconds]).T.reshape(-1, NUM_PHASES)


def until_first_line(part: RankJob) -> float:
    """Return how long a rank loaded data and built its model, in seconds."""
    if not len(part.ends):
        return 0.0
    in_line = sum(column[0] for column in part.seconds)
    return max(0.0, part.ends[0] - part.time - in_line)


def stage_seconds(part: RankJob) -> Floats:
    """Return where the time of a rank went in a job.

    Args:
        part: The rank's lines.

    Returns:
        Seconds of each of `STAGES`; their sum is the time from the process's start to
        the rank's last word.
    """
    seconds = np.zeros(1 + NUM_PHASES)
    seconds[0] = part.start_seconds + until_first_line(part)
    seconds[1:] = columns(part).sum(0)
    wall = part.ended - part.time + part.start_seconds
    if part.cut is not None:
        left = max(0.0, wall - seconds.sum())
        seconds[1 + part.cut.phase] += min(part.cut.seconds, left)
    # What lies between the last line and the end, and what rounding leaves.
    seconds[1 + OTHER] += wall - seconds.sum()
    return seconds


def shares(jobs: Sequence[Job], paces: Sequence[TimedThroughput]) -> dict[str, float]:
    """Return where the time of jobs went: seconds by `SHARES`, mean of the ranks."""
    total = dict.fromkeys(SHARES, 0.0)
    for job in jobs:
        if not job.ranks:
            continue
        of_ranks = np.array([stage_seconds(part) for part in job.ranks.values()])
        means = dict(zip(STAGES, of_ranks.mean(0).tolist(), strict=True))
        hung = sum(
            part.cut.seconds
            for part in job.ranks.values()
            if part.cut is not None and part.cut.phase == COMMUNICATION
        ) / len(job.ranks)
        both = means.pop("communication")
        inside = [pace for pace in paces if job.holds(pace.time)]
        waited = sum(pace.wait_seconds for pace in inside)
        met = sum(pace.communication_seconds for pace in inside)
        hung = min(hung, both)
        part_waited = waited / (waited + met) if waited + met else 0.0
        means["waiting"] = hung + (both - hung) * part_waited
        means["communication"] = both - means["waiting"]
        for name, seconds in means.items():
            total[name] += seconds
    return total


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Who the others waited for."""

    rank: int
    """Which was the last most often."""
    hostname: str
    share: float
    """Of the steps: in how many it is known to have been the last."""
    late_seconds: float
    """How much later it was in those than the rank in the middle: mean."""
    late_share: float
    """The same, of the time of all steps."""
    waited_share: float
    """Of the time of all steps: waiting for the last rank, mean of the ranks."""

    @property
    def stands_out(self) -> bool:
        """Whether the waiting is for this rank, and not for now this, now that one."""
        return self.late_share > 0.05 and self.share > 0.5


def lateness(job: Job, paces: Sequence[TimedThroughput]) -> Lateness | None:
    """Tell whom the ranks of a job waited for; ``None`` where nobody knows."""
    inside = [pace for pace in paces if job.holds(pace.time) and pace.num_steps]
    counts: Counter[int] = Counter()
    for pace in inside:
        if pace.slowest_rank >= 0:
            counts[pace.slowest_rank] += pace.slowest_steps
    if not counts or job.world_size < 2:
        return None
    ((rank, steps),) = counts.most_common(1)
    whole = sum(pace.seconds for pace in inside)
    late = sum(pace.late_seconds for pace in inside if pace.slowest_rank == rank)
    return Lateness(
        rank=rank,
        hostname=job.ranks[rank].hostname if rank in job.ranks else "",
        share=min(1.0, steps / sum(pace.num_steps for pace in inside)),
        late_seconds=late / steps if steps else 0.0,
        late_share=late / whole if whole else 0.0,
        waited_share=sum(it.wait_seconds for it in inside) / whole if whole else 0.0,
    )

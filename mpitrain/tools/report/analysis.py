"""Jobs of a run, and where their time went."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpitrain.record.reading import (
    NUM_COLUMNS,
    CutShort,
    RankJob,
    Run,
    TimedThroughput,
    sums,
)
from mpitrain.record.supervised import Restart
from mpitrain.train.metrics import COMMUNICATION, OTHER, PHASES, UPDATE, EpochMetrics

Floats = NDArray[np.float64]

SAME_JOB_SECONDS = 60.0  # the ranks of a job write their first lines within this time
ALL_PHASES = ("start", *PHASES)  # what a rank does in a job

CATEGORIES = (
    *("start", "data", "forward", "backward", "communication", "waiting"),
    *("update", "evaluation", "checkpoint", "other"),
)
"""`ALL_PHASES`, and *waiting* for the last rank apart from *communication* after it."""


@dataclass(kw_only=True)
class JobTimes:
    """What the ranks of one job wrote."""

    number: int  # from 1
    world_size: int
    began: float  # when the first process started, seconds since 1970
    ended: float  # time of the last line, seconds since 1970
    ranks: dict[int, RankJob] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Number of nodes whose ranks wrote something."""
        return len({rank.node_rank for rank in self.ranks.values()})

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.ended - self.began

    def covers(self, time: float) -> bool:
        """Return whether a time is within the job."""
        # A throughput is written when all ranks know it, after the last of its steps.
        return self.began <= time <= self.ended + 1.0

    def killed_ranks(self) -> list[int]:
        """Return ranks without a line about their end, where most have one."""
        cuts = self.cuts()
        if len(cuts) <= self.world_size / 2:
            return []
        return [rank for rank in sorted(self.ranks) if rank not in cuts]

    def missing_ranks(self) -> list[int]:
        """Return ranks without a file: their nodes may not see the run folder."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    def failed_ranks(self) -> list[int]:
        """Return the few ranks with a line about their end: they ended the others."""
        cuts = list(self.cuts())
        return cuts if len(cuts) <= len(self.ranks) / 2 else []

    def hanging_ranks(self) -> list[int]:
        """Return the few ranks for which all others waited when the job was ended."""
        cuts = self.cuts()
        phases = Counter(cut.phase for cut in cuts.values())
        if not phases:
            return []
        # GPU ranks wait for the others in the update, by the gradient's norm.
        most = max(phases, key=lambda it: (phases[it], it == COMMUNICATION))
        others = [rank for rank, cut in cuts.items() if cut.phase != most]
        waits = most in (COMMUNICATION, UPDATE)
        return others if waits and len(others) <= len(cuts) / 2 else []

    def cuts(self) -> dict[int, CutShort]:
        """Return what ranks did when the job was ended in the middle, by rank."""
        return {rank: it.cut for rank, it in self.ranks.items() if it.cut is not None}


def jobs_of(run: Run) -> list[JobTimes]:
    """Group what ranks wrote into jobs.

    A new job begins where a rank writes its first line again, where the number of ranks
    differs, or after `SAME_JOB_SECONDS`.
    """
    parts = [part for file in run.ranks for part in file.jobs]
    jobs: list[JobTimes] = []
    first = 0.0
    for part in sorted(parts, key=lambda it: it.time):
        began = part.time - part.start_seconds
        if (
            not jobs
            or part.rank in jobs[-1].ranks
            or part.world_size != jobs[-1].world_size
            or part.time > first + SAME_JOB_SECONDS
        ):
            first = part.time
            size, number = part.world_size, len(jobs) + 1
            jobs.append(
                JobTimes(number=number, world_size=size, began=began, ended=part.ended)
            )
        job = jobs[-1]
        job.ranks[part.rank] = part
        job.began = min(job.began, began)
        job.ended = max(job.ended, part.ended)
    return jobs


@dataclass(frozen=True, kw_only=True)
class RestartCost:
    """What a fault has cost."""

    restart: Restart
    steps: int  # that were done again
    step_seconds: float  # about what these had taken
    down_seconds: float  # from the end of mpirun to the resume


def restart_costs(run: Run, jobs: Sequence[JobTimes]) -> list[RestartCost]:
    """Return what each restart of a run has cost."""
    total = sums(run.metrics.throughputs)
    seconds = total.seconds / total.num_steps if total.num_steps else 0.0
    metrics, found = run.metrics, []
    began = [it.time for it in metrics.began]
    starts = sorted([*began, *(it.time for it in metrics.resumed)])
    ends = [*(it.time for it in run.restarts[1:]), math.inf]
    for restart, end in zip(run.restarts, ends, strict=False):
        first = next((it for it in starts if it >= restart.time), math.inf)
        job = next((it for it in jobs if restart.time <= it.began < end), None)
        # A job that ends before its first checkpoint: the next resume cuts its lines
        # in the record, and begins at the same step.
        next_job = next((it.began for it in jobs if job and it.began > job.began), end)
        is_cut = job is not None and next_job <= first and next_job < end
        if first == end == math.inf:
            continue  # it has not begun yet
        if first == math.inf or (first >= end and not is_cut):
            # One that failed before that has cost the time until the next.
            time, step = end, restart.step
        else:
            # Another job may have resumed later, with no restart between.
            until = min((it for it in began if it > first), default=math.inf)
            until = until if is_cut else min(until, end)
            resumes = (it for it in metrics.resumed if first <= it.time < until)
            # Without a checkpoint it has begun at step 0.
            time, step = next(((it.time, it.step) for it in resumes), (first, 0))
            if job is not None and is_cut:
                time = job.began + _start_seconds(job)
        steps = max(0, restart.step - step)
        found.append(
            RestartCost(
                restart=restart,
                steps=steps,
                step_seconds=steps * seconds,
                down_seconds=time - restart.time,
            )
        )
    return found


def goodput(run: Run, jobs: Sequence[JobTimes]) -> float:
    """Return the share of the time that is not lost; nan: nothing is known of restarts.

    Lost are the starts of jobs, and what each restart has cost. The time between two
    jobs that no restart explains, as in a queue, does not count.
    """
    if not jobs or not run.restarts:
        return math.nan
    total = max(job.ended for job in jobs) - jobs[0].began
    lost = sum(it.step_seconds + it.down_seconds for it in restart_costs(run, jobs))
    lost += _start_seconds(jobs[0])
    for before, job in itertools.pairwise(jobs):
        if not any(before.began < it.time <= job.began for it in run.restarts):
            total -= max(0.0, job.began - before.ended)
            lost += _start_seconds(job)
    return max(0.0, 1.0 - lost / total) if total > 0 else math.nan


def _start_seconds(job: JobTimes) -> float:
    return max(it.start_seconds for it in job.ranks.values())


def stages_of(run: Run) -> list[list[EpochMetrics]]:
    """Return the epochs of each stage; those of one that is under way, too."""
    groups = itertools.groupby(run.metrics.epochs, key=lambda it: it.stage)
    return [list(epochs) for _, epochs in groups]


def timeline(part: RankJob) -> tuple[Floats, Floats]:
    """Return times `(times,)`, from the start of a rank's process to its end.

    And how long it has been in each of `ALL_PHASES` until then: `(times, phases)`.
    """
    lines = np.array(part.lines).reshape(-1, NUM_COLUMNS)
    ends, phases = lines[:, 0], lines[:, 2:]
    began = max(part.time, ends[0] - phases[0].sum()) if len(lines) else part.time
    spans = np.maximum(np.diff(ends, prepend=began), 0.0)
    # Time of no phase is `other`. GPU times are read late: then there is too much.
    phases[:, OTHER] += np.maximum(spans - phases.sum(1), 0.0)
    phases *= spans[:, None] / np.maximum(phases.sum(1, keepdims=True), 1e-12)
    times = [part.time - part.start_seconds, began, *ends.tolist()]
    of_start = np.eye(1, len(ALL_PHASES)) * (began - times[0])
    rows = [np.zeros((1, len(ALL_PHASES))), of_start, np.pad(phases, ((0, 0), (1, 0)))]
    if part.cut is not None:
        since = part.cut.time - part.cut.seconds
        for end, phase in ((since, OTHER), (part.cut.time, part.cut.phase)):
            seconds = max(0.0, end - times[-1])
            rows.append(np.eye(1, len(ALL_PHASES), 1 + phase) * seconds)
            times.append(times[-1] + seconds)
    return np.maximum.accumulate(times), np.concatenate(rows).cumsum(0)


def seconds_by_category(
    jobs: Sequence[JobTimes], throughputs: Sequence[TimedThroughput]
) -> dict[str, float]:
    """Return the seconds of jobs in each of `CATEGORIES`, mean over ranks."""
    total = dict.fromkeys(CATEGORIES, 0.0)
    for job in jobs:
        of_ranks = np.array([timeline(part)[1][-1] for part in job.ranks.values()])
        means = dict(zip(ALL_PHASES, of_ranks.mean(0).tolist(), strict=True))
        both = means.pop("communication")
        cuts = [cut for cut in job.cuts().values() if cut.phase == COMMUNICATION]
        hung = min(both, sum(cut.seconds for cut in cuts) / len(job.ranks))
        inside = sums(row for row in throughputs if job.covers(row.time))
        known = inside.wait_seconds + inside.communication_seconds
        waiting = inside.wait_seconds / known if known else 0.0
        means["waiting"] = hung + (both - hung) * waiting
        means["communication"] = both - means["waiting"]
        for name, seconds in means.items():
            total[name] += seconds
    return total

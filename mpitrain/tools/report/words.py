"""What the charts show, in words, for this run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from mpitrain.record.reading import Run, TimedEpoch, TimedThroughput
from mpitrain.tools.report.facts import Job, Lateness, lateness
from mpitrain.train.metrics import PHASES
from mpitrain.world import in_runs

DOING = {
    "data": "waiting for samples",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "communication": "waiting for the others' gradients",
    "update": "updating weights",
    "evaluation": "evaluating",
    "checkpoint": "at a checkpoint",
    "other": "between steps",
}


def duration(seconds: float) -> str:
    """Write a time with two digits or more, and its unit.

    >>> [duration(s) for s in (0.00012, 0.25, 2.5, 75, 3600 * 5 + 61, 86400 * 3)]
    ['0.12 ms', '250 ms', '2.5 s', '1 min 15 s', '5 h 01 min', '3 d 0 h']
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1:
        thousandths = seconds * 1000
        digits = 2 if thousandths < 1 else 1 if thousandths < 10 else 0
        return f"{thousandths:.{digits}f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes} min {whole % 60:02} s"
    if days < 1:
        return f"{hours} h {minutes % 60:02} min"
    return f"{days} d {hours % 24} h"


def per_cent(share: float) -> str:
    """Write a share.

    >>> per_cent(0.714), per_cent(0.0123), per_cent(0.9996)
    ('71 %', '1.2 %', '100 %')
    """
    digits = 1 if share < 0.0995 else 0
    return f"{share:.{digits}%}".replace("%", " %")


def number(value: float) -> str:
    """Write a number as short as it may be.

    >>> number(0.123456), number(12345.6), number(0.00001234)
    ('0.1235', '12,346', '1.23e-05')
    """
    if not math.isfinite(value):
        return "not a number"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Write a moment as its date and time here."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def several(num: int, what: str) -> str:
    """Count things.

    >>> several(1, "job"), several(1200, "step")
    ('1 job', '1,200 steps')
    """
    return f"{num:,} {what}{'s' * (num != 1)}"


def place(rank: int, job: Job) -> str:
    """Name a rank and its host."""
    part = job.ranks.get(rank)
    return f"rank {rank}" + (f" ({part.hostname})" if part else "")


def sentence(text: str) -> str:
    """Let a text begin large, and end."""
    return text[:1].upper() + text[1:] + "."


def loss(run: Run) -> str:
    """Say how the loss went."""
    steps, epochs = run.metrics.steps, run.metrics.epochs
    values = [value for value in steps.loss if math.isfinite(value)]
    if not values:
        return "No step has been told yet."
    few = max(1, len(values) // 50)
    first, last = sum(values[:few]) / few, sum(values[-few:]) / few
    said = [
        f"The loss went from {number(first)} to {number(last)} in "
        f"{several(len(steps.loss), 'step')}"
    ]
    judged = [it for it in epochs if math.isfinite(it.values.get("loss", math.nan))]
    if judged:
        best = min(judged, key=lambda it: it.values["loss"])
        now = judged[-1].values["loss"]
        said.append(
            f"in validation it was least after epoch {best.epoch}, "
            f"{number(best.values['loss'])}"
            + (f", and is {number(now)} now" if best is not judged[-1] else "")
        )
    lost = len(steps.loss) - len(values)
    if lost:
        said.append(f"in {several(lost, 'step')} it was not a finite number")
    return sentence("; ".join(said))


def best_of(epochs: Sequence[TimedEpoch]) -> TimedEpoch | None:
    """Return the epoch of the best accuracy in validation."""
    judged = [it for it in epochs if math.isfinite(it.values.get("accuracy", math.nan))]
    return max(judged, key=lambda it: it.values["accuracy"], default=None)


def accuracy(run: Run) -> str:
    """Say how good it became."""
    best = best_of(run.metrics.epochs)
    if best is None:
        return "No accuracy has been told: this training has none, or none yet."
    last = next(it for it in reversed(run.metrics.epochs) if "accuracy" in it.values)
    value = best.values["accuracy"]
    said = f"the best accuracy in validation is {value:.2%}, after epoch {best.epoch}"
    if last.values["accuracy"] != value:
        said += f"; the last is {last.values['accuracy']:.2%}"
    return sentence(said.replace("%", " %"))


def speed(paces: Sequence[TimedThroughput]) -> str:
    """Say how fast it was, and whether that changed."""
    seconds = sum(pace.seconds for pace in paces)
    if not seconds:
        return "No speed has been told yet."
    mean = sum(pace.num_samples for pace in paces) / seconds
    said = f"{mean:,.0f} samples/s on the mean of all steps"
    quarter = len(paces) // 4
    if quarter:
        parts = paces[quarter : 2 * quarter], paces[-quarter:]
        early, late = (
            sum(it.num_samples for it in part) / sum(it.seconds for it in part)
            for part in parts
        )
        change = late / early - 1
        said += (
            f"; in the last quarter {per_cent(abs(change))} "
            f"{'faster' if change > 0 else 'slower'} than in the second"
            if abs(change) > 0.05
            else "; it stayed the same"
        )
    return sentence(said)


def step_time(paces: Sequence[TimedThroughput], longest: float) -> str:
    """Say how long steps were."""
    num = sum(pace.num_steps for pace in paces)
    if not num:
        return "No step has been timed yet."
    mean = sum(pace.seconds for pace in paces) / num
    said = f"a step takes {duration(mean)} on the mean"
    if longest:
        said += f", the longest {duration(longest)}"
        if longest > 3 * mean:
            said += f": {longest / mean:,.0f} times as long"
    return sentence(said)


def stages(seconds: Mapping[str, float]) -> str:
    """Say where the time went."""
    total = sum(seconds.values())
    if total <= 0:
        return "The ranks have not told yet where their time went."
    computing = seconds["forward"] + seconds["backward"]
    parts = {
        "computing (forward and backward)": computing,
        "the start": seconds["start"],
        "waiting for samples": seconds["data"],
        "waiting for the slowest rank": seconds["waiting"],
        "letting gradients meet": seconds["communication"],
        "evaluation": seconds["evaluation"],
        "checkpoints": seconds["checkpoint"],
        "the update of the weights": seconds["update"],
        "what is none of these": seconds["other"],
    }
    largest = sorted(parts.items(), key=lambda it: -it[1])
    said = [
        f"{per_cent(value / total)} went into {name}"
        for name, value in largest[:3]
        if value / total > 0.005
    ]
    return sentence(f"Of {duration(total)}, " + ", ".join(said))


def ranks(jobs: Sequence[Job], paces: Sequence[TimedThroughput]) -> str:
    """Say whom the ranks waited for, and how it ended."""
    if not jobs:
        return "The ranks have not told yet where their time went."
    said = []
    if len(jobs) > 1:
        said.append(f"{several(len(jobs), 'job')} are side by side")
    known = [(job, found) for job in jobs if (found := lateness(job, paces))]
    if not known:
        said.append(
            "there is one rank, which waits for nobody"
            if jobs[-1].world_size == 1
            else "no step has been timed yet"
        )
    else:
        late = [(job, it) for job, it in known if it.stands_out]
        worst = max(late or known, key=lambda it: it[1].waited_share)
        said.append(waited(*worst, of_several=len(jobs) > 1, stands_out=bool(late)))
    said += [text for job in jobs if (text := ending(job, len(jobs) > 1))]
    return " ".join(sentence(text) for text in said)


def waited(job: Job, found: Lateness, *, of_several: bool, stands_out: bool) -> str:
    """Say whom the ranks of a job waited for."""
    where = f"in job {job.number} " if of_several else ""
    share = per_cent(found.waited_share)
    if not stands_out:
        return (
            f"{where}no rank stands out: the ranks waited {share} of the steps' time "
            "for one another, now for this, now for that one"
        )
    return (
        f"{where}{place(found.rank, job)} was the last in {per_cent(found.share)} of "
        f"the steps, by {duration(found.late_seconds)}: {per_cent(found.late_share)} "
        f"of the steps' time; the ranks waited {share} of it"
    )


def ending(job: Job, of_several: bool) -> str:
    """Say what ranks did when a job was ended in the middle; empty if it was not."""
    where = f"when job {job.number} was ended, " if of_several else "at the end "
    said = []
    for rank in job.culprits()[:4]:
        cut = job.ranks[rank].cut
        assert cut is not None
        said.append(
            f"{place(rank, job)} was {DOING[PHASES[cut.phase]]} for "
            f"{duration(cut.seconds)} while the others waited"
        )
    for rank in job.last_words()[:4]:
        cut = job.ranks[rank].cut
        assert cut is not None
        said.append(f"{place(rank, job)} was {DOING[PHASES[cut.phase]]}")
    unseen = job.unseen()
    if unseen:
        said.append(
            f"there is no file of ranks {in_runs(unseen)}: their nodes may not see "
            "this folder"
        )
    silent = job.silent()
    if silent:
        named = (
            place(silent[0], job) if len(silent) == 1 else f"ranks {in_runs(silent)}"
        )
        said.append(f"{named} left no last word: killed, or stopped")
    return where + "; ".join(said) if said else ""

"""`python -m mpitrain chain`: whether a training is started once more. Needs no MPI.

A training that takes several jobs is a chain of them. The job script asks twice::

    python -m mpitrain chain begin -- FLAGS              may this job have the training?
    python -m mpitrain chain next --status 75 -- FLAGS   mpirun has ended?

The second prints one word: ``here`` (start it again in this job: something failed, and
there is progress, or it is the first time), ``later`` (in another job), ``end``. Where
that is a job of another number, ``chain handed --to NUMBER`` tells it. What has to be
remembered from one to the next lies in ``runs/.NAME.chain``.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from tyro.conf import Positional

from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.checkpoint.preemption import STOP_FILE
from mpitrain.errors import LaunchError, Stopped, UsageError
from mpitrain.record.runs import LOCK_SECONDS, is_finished
from mpitrain.schedulers import Scheduler, detect
from mpitrain.schedulers.asking import is_alive
from mpitrain.train.config import TrainConfig

Word = Literal["here", "later", "end"]

MOST_IDLE = 2
"""So many starts in a row that end in a failure and bring no step end the chain."""

MOST_LOST = 5
"""So many jobs in a row that end without a word (evicted, say) and bring no step."""


@dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """Ask, in a job script, whether a training is started. Its flags follow --."""

    question: Positional[Literal["begin", "next", "handed"]]
    """begin: may this job have it? next: after mpirun; prints here, later or end.
    handed: another job has it from here on."""
    jobs: int = 20
    """Jobs that a chain may have."""
    status: int | None = None
    """Exit status of mpirun (next)."""
    out_of_time: bool = False
    """This job comes to its end: not here (next)."""
    to: str | None = None
    """The number of that job (handed)."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise UsageError(f"--jobs must be at least 1, found {self.jobs}")
        if (self.status is None) == (self.question == "next"):
            raise UsageError(
                "chain next wants --status, the exit status of mpirun; the others want "
                "none"
            )
        if (self.to is None) == (self.question == "handed"):
            raise UsageError("chain handed wants --to, a job; the others want none")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What is remembered of a chain."""

    job_id: str
    """The job that has it now."""
    num_jobs: int = 1
    """Jobs so far."""
    step: int = 0
    """Where the training stood as it was last started."""
    is_started: bool = True
    """Whether it was started, and has not ended as far as is known."""
    num_idle: int = 0
    """Failures in a row that brought no step."""
    num_lost: int = 0
    """Jobs in a row that ended without a word, and brought no step."""

    def ended(self, step: int) -> Chain:
        """Note that what was started has ended, where the training now stands."""
        chain = replace(self, step=step, is_started=False)
        return replace(chain, num_idle=0, num_lost=0) if step > self.step else chain

    def failed(self) -> Chain:
        """Count a failure, where there was no step."""
        return replace(self, num_idle=self.num_idle + 1)


def ask(config: ChainConfig, training: TrainConfig, environ: Mapping[str, str]) -> str:
    """Answer one question, and remember it.

    Args:
        config: The question.
        training: What is trained; its name and folder say which chain it is.
        environ: The environment of a job's script.

    Returns:
        The word, or nothing for ``begin``.

    Raises:
        UsageError: There is no job, or no name, or another job has the training.
        LaunchError: It has had its jobs, or too many were lost.
    """
    scheduler = detect(environ)
    if scheduler.name == "none":
        raise UsageError(
            "chain is asked in a job: neither SLURM_JOB_ID nor PBS_JOBID is set. On a "
            "machine without a scheduler start the training again by hand"
        )
    run_dir = run_dir_of(training)
    with _remembered(run_dir) as memory:
        if config.question == "begin":
            memory.chain = begin(config, memory.chain, scheduler, run_dir)
            return ""
        if config.question == "handed":
            chain = _refuse_stranger(memory.chain, scheduler, run_dir)
            memory.chain = replace(chain, job_id=config.to or "")
            return ""
        memory.chain, word = after(config, memory.chain, scheduler, run_dir)
        return word


def begin(
    config: ChainConfig, before: Chain | None, scheduler: Scheduler, run_dir: Path
) -> Chain:
    """Take the chain for this job.

    Args:
        config: The question.
        before: What is remembered.
        scheduler: Whose job this is.
        run_dir: The run folder.

    Raises:
        UsageError: Another job has it.
        LaunchError: It has had its jobs, or too many were lost.
    """
    job_id, step = scheduler.job_id or "", _step_of(run_dir)
    if before is None:
        return Chain(job_id=job_id, step=step)
    if before.job_id != job_id:
        alive = is_alive(scheduler.name, before.job_id)
        end = time.monotonic() + LOCK_SECONDS
        while alive and time.monotonic() < end:  # it may be about to end, after qdel
            time.sleep(2.0)
            alive = is_alive(scheduler.name, before.job_id)
        if alive is not False:
            waits = "waits or runs" if alive else "may wait or run: nobody answered"
            raise UsageError(
                f"job {before.job_id} has the training {run_dir.name} already, and "
                f"{waits}.\nExpected one job for a training: wait for that one, or "
                "submit this one under another name"
            )
        return Chain(job_id=job_id, step=step)
    chain = before
    if before.is_started:  # evicted, or its node was lost
        chain = before.ended(step)
        if chain.num_lost + 1 >= MOST_LOST:
            raise LaunchError(
                f"{MOST_LOST} jobs of {run_dir.name} ended without a word and without "
                f"progress, at step {step}: see their output and {run_dir}/logs, then "
                "submit again"
            )
        chain = replace(chain, num_lost=0 if step > before.step else chain.num_lost + 1)
    if chain.num_jobs >= config.jobs:
        raise LaunchError(_had_its_jobs(chain, run_dir))
    return replace(chain, num_jobs=chain.num_jobs + 1, step=step, is_started=True)


def after(
    config: ChainConfig, before: Chain | None, scheduler: Scheduler, run_dir: Path
) -> tuple[Chain | None, Word]:
    """Say what follows the end of mpirun.

    Args:
        config: The question.
        before: What is remembered.
        scheduler: Whose job this is.
        run_dir: The run folder.

    Returns:
        What is to be remembered, and the word.
    """
    before = _refuse_stranger(before, scheduler, run_dir)
    status, step = config.status, _step_of(run_dir)
    if status == 0 and is_finished(run_dir):
        return None, "end"
    if status == UsageError.exit_status and step == 0:
        _say("a mistake in the flags: no further job would mend it")
        return None, "end"
    chain = before.ended(step)
    if status != Stopped.exit_status:
        if step <= before.step:
            chain = chain.failed()
        if chain.num_idle >= MOST_IDLE:
            _say(
                f"{run_dir.name} failed {chain.num_idle} times without progress, at "
                f"step {step}, the last with status {status}. Expected that mending it "
                f"comes first: see the messages above and {run_dir}/logs, then submit "
                "again"
            )
            return None, "end"
        if not config.out_of_time:
            _say(f"ended with status {status} at step {step}: once more in this job")
            return replace(chain, is_started=True), "here"
    elif (run_dir / STOP_FILE).exists():
        _say(f"{run_dir / STOP_FILE} ended it: submit again, to go on")
        return None, "end"
    if chain.num_jobs >= config.jobs:
        _say(_had_its_jobs(chain, run_dir))
        return None, "end"
    return chain, "later"


def _refuse_stranger(chain: Chain | None, scheduler: Scheduler, run_dir: Path) -> Chain:
    """Return the chain, if this job has it."""
    if chain is None or chain.job_id != scheduler.job_id:
        raise UsageError(
            f"job {scheduler.job_id} does not have the training {run_dir.name}; "
            "expected `chain begin` before it"
        )
    return chain


def _had_its_jobs(chain: Chain, run_dir: Path) -> str:
    jobs = "1 job" if chain.num_jobs == 1 else f"{chain.num_jobs} jobs"
    return (
        f"{run_dir.name} has had {jobs} (--jobs) and is at step {chain.step}. Submit "
        "again to let it have as many more"
    )


def run_dir_of(training: TrainConfig) -> Path:
    """Return the folder that all jobs of a training share.

    Raises:
        UsageError: They would not share one, or not go on from each other.
    """
    if training.name is None:
        raise UsageError("a chain of jobs goes on with one run: expected its --name")
    flags = {
        "--new-run": training.new_run,
        "--resume never": training.resume == "never",
        "--dry-run": training.dry_run,
    }
    for flag in (flag for flag, is_given in flags.items() if is_given):
        raise UsageError(
            f"{flag} has no place in a chain of jobs, where each goes on with the run "
            "of the one before: take it out, and choose another --name"
        )
    run_dir = training.runs_dir / training.name
    resume = training.resume
    if resume != "auto" and run_dir.absolute() in Path(resume).absolute().parents:
        raise UsageError(
            f"--resume {resume} has no place in a chain of jobs: each would begin "
            "there anew. Start it by hand once, then submit without it"
        )
    return run_dir


def _step_of(run_dir: Path) -> int:
    """Return the step of the newest checkpoint; 0 where there is none."""
    with suppress(OSError):
        return max((found.step for found in list_checkpoints(run_dir)), default=0)
    return 0


def _say(text: str) -> None:
    print(f"chain: {text}", file=sys.stderr, flush=True)


class _Memory:
    """A chain in its file, for one who holds its lock."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._file.seek(0)
        self.chain: Chain | None
        try:
            self.chain = Chain(**json.loads(self._file.read()))
        except (ValueError, TypeError):
            self.chain = None  # empty, or cut off as it was written

    def keep(self) -> None:
        """Write down what there is now; where the disk is full, over what there was."""
        text = "" if self.chain is None else json.dumps(asdict(self.chain)) + "\n"
        os.pwrite(self._file.fileno(), text.encode(), 0)
        os.ftruncate(self._file.fileno(), len(text))
        os.fsync(self._file.fileno())


@contextmanager
def _remembered(run_dir: Path) -> Iterator[_Memory]:
    """Read what is remembered, and write down what it was made; one job at a time."""
    path = run_dir.with_name(f".{run_dir.name}.chain")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "r+") as file:
            with suppress(OSError):  # some file systems have no locks
                fcntl.lockf(file, fcntl.LOCK_EX)
            memory = _Memory(file)
            yield memory
            memory.keep()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}. Choose another --runs-dir"
        ) from None

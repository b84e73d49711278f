"""A training of several starts and jobs: what follows when mpirun has ended.

A chain of jobs has no file of its own. The number of this job in it is SLURM's count of
restarts, or a variable that goes to the next job of PBS. The lock of the run folder
keeps a second job away.
"""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.checkpoint.preemption import STOP_FILE
from mpitrain.config import TrainConfig
from mpitrain.errors import LaunchError, Stopped, UsageError
from mpitrain.record.run_dir import progress_of
from mpitrain.record.runs import LOCK_SECONDS, is_held, lock_host
from mpitrain.schedulers import detect, pbs, slurm

# Variable with the number of a PBS job in its chain; the first has none.
JOB_NUMBER = "MPITRAIN_JOB_NUMBER"
ENCODED_ARGS = "MPITRAIN_ARGS"  # base64, which the script decodes
# After so many failures in a row without progress no start follows: of one cause, and
# of any, since several faults may strike between two checkpoints.
MAX_OF_ONE_CAUSE, MAX_FAILURES = 2, 4
# Which rank has it is chance; another error would come back in any of them.
OF_ITS_RANK = re.compile("died without|host is lost|launcher is gone|wrongly")
SHORT_SECONDS = 30.0  # a start that ends sooner has done nothing, if nobody knows
RETRY_SECONDS = (5, 10, 20, 0)  # pauses after attempts to submit the next job
SUBMIT_SECONDS = 3.0  # for one attempt

Action = Literal["retry", "requeue", "end"]


class Chain:
    """A training of several starts and several jobs, as the present job sees it.

    ``run_dir`` is ``None`` until it is known, ``max_restarts`` where progress is the
    only limit.
    """

    def __init__(
        self,
        run_dir: Path | None,
        job_number: int = 1,
        max_jobs: int = 1,
        max_restarts: int | None = None,
    ) -> None:
        self.run_dir, self.job_number, self.max_jobs = run_dir, job_number, max_jobs
        self.max_restarts, self.num_restarts = max_restarts, 0
        self.step = _furthest_step(run_dir)
        self._causes: list[str] = []  # of failures in a row, without progress
        if job_number > max_jobs:  # evicted in its last job
            raise LaunchError(self._had_its_jobs(job_number - 1))

    @property
    def name(self) -> str:
        """What to call the training."""
        return "the training" if self.run_dir is None else self.run_dir.name

    def next_action(
        self,
        status: int,
        *,
        is_stopping: bool,
        error: str = "",
        seconds: float = math.inf,
        step: int = 0,
    ) -> Action:
        """Decide what follows when mpirun has ended, and print why.

        ``error`` is what the training says of its end, ``seconds`` how long it ran,
        ``step`` the last one that the nodes have in memory.
        """
        step_before = self.step
        # A resumed training has a shorter record.
        self.step = max(step_before, _furthest_step(self.run_dir), step)
        if self.step > step_before:
            self._causes.clear()
        if status == 0:
            return "end"
        # Later on it may be a lock that a dying rank holds, or a folder not mounted.
        if status == UsageError.exit_status and self.step == 0:
            _print("wrong flags: another start would fail, too")
            return "end"
        ended = error or f"ended with status {status}"
        if status != Stopped.exit_status:
            has_progress = self.step > step_before
            if self.run_dir is None and self.max_restarts is not None:
                has_progress = seconds >= SHORT_SECONDS  # a script shows no other
            self._causes = [] if has_progress else [*self._causes, _cause_of(error)]
            if self._has_come_back() or self.num_failures >= MAX_FAILURES:
                where = f"{self.run_dir}/logs" if self.run_dir else "its output"
                _print(
                    f"{self.name} failed {self.num_failures} times without progress, "
                    f"at step {self.step}, the last with status {status}: {ended}. See "
                    f"the messages above and {where}, correct the cause, and start it "
                    "again"
                )
                return "end"
            # In a job that ends, the next job is the restart.
            if not is_stopping:
                return self._restart(ended)
        elif self.run_dir is not None and (self.run_dir / STOP_FILE).exists():
            _print(f"{self.run_dir / STOP_FILE} ended it: submit again to resume")
            return "end"
        if self.max_jobs == 1:
            return "end"
        if self.job_number >= self.max_jobs:
            _print(self._had_its_jobs(self.job_number))
            return "end"
        return "requeue"

    @property
    def num_failures(self) -> int:
        """How often it has failed in a row without progress."""
        return len(self._causes)

    def _has_come_back(self) -> bool:
        """Whether the last failures had one cause; one that is not known may be any."""
        last = self._causes[-MAX_OF_ONE_CAUSE:]
        return len(last) == MAX_OF_ONE_CAUSE and len({*filter(None, last)}) < 2

    def _restart(self, ended: str) -> Action:
        at = f"at step {self.step}: {ended}"
        if self.num_restarts == self.max_restarts:
            times = "once" if self.num_restarts == 1 else f"{self.num_restarts} times"
            if self.num_restarts:
                _print(f"{self.name} was restarted {times} (--restarts); failed {at}")
            return "end"
        self.num_restarts += 1
        of = "" if self.max_restarts is None else f" of {self.max_restarts}"
        _print(f"restart {self.num_restarts}{of} {at}")
        return "retry"

    def _had_its_jobs(self, num_jobs: int) -> str:
        jobs = "1 job" if num_jobs == 1 else f"{num_jobs} jobs"
        return (
            f"{self.name} has had {jobs} (--jobs) and is at step {self.step}. "
            "Submit again to let it have as many more"
        )


def _cause_of(error: str) -> str:
    """Return what an error has in common with that of the same cause.

    >>> _cause_of("[rank 2/8 b] ValueError: nan at 17"), _cause_of("")
    ('ValueError: nan at ', '')
    >>> _cause_of("[rank 2/8 b] its host is lost: no word from it for 6 s")
    '[rank 2/8 b] its host is lost: no word from it for  s'
    """
    text = re.sub(r"^\[rank .*?\] ", "", error)
    label = error[: len(error) - len(text)]
    text = text.partition(" did not arrive:")[0]  # of a hang: not who waits where
    text = re.sub(r"\d+", "", text)
    return label + text if OF_ITS_RANK.search(text) else text


def run_dir_of(training: TrainConfig) -> Path:
    """Return the run folder that all jobs of a training share."""
    if training.name is None:
        raise UsageError("a chain of jobs resumes one run: expected its --name")
    flags = {
        "--new-run": training.new_run,
        "--resume never": training.resume == "never",
        "--dry-run": training.dry_run,
    }
    if given := [flag for flag, is_given in flags.items() if is_given]:
        raise UsageError(
            f"{given[0]} has no place in a chain of jobs, where each resumes the run "
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


def refuse_second_job(run_dir: Path) -> None:
    """Refuse to start where another job trains; one that ends may take a while."""
    deadline = time.monotonic() + LOCK_SECONDS
    # `None`, where no job has begun or nobody can know, lets it start.
    while is_held(run_dir):
        if time.monotonic() > deadline:
            raise UsageError(
                f"another job has the training {run_dir.name} already, on "
                f"{lock_host(run_dir) or 'another host'}.\nExpected one job for a "
                "training: wait until it has ended, or submit this one under another "
                "name"
            )
        time.sleep(1.0)


def job_number(environ: Mapping[str, str]) -> int:
    """Return the number of this job in its chain, from 1."""
    if detect(environ).name == "slurm":
        return 1 + int(environ.get("SLURM_RESTART_COUNT") or 0)
    return int(environ.get(JOB_NUMBER) or 1)


def requeue(
    environ: Mapping[str, str],
    script: str | None,
    *,
    terminated: bool,
    end: float,
    output_begin: int = 0,
) -> None:
    """Requeue the job (SLURM) or submit its script (PBS), unless it was cancelled.

    The scheduler ends this job at `end`, monotonic. The file of stderr had
    `output_begin` bytes when the job began.
    """
    scheduler = detect(environ)
    job_id = scheduler.job_id or ""
    if scheduler.name == "slurm":
        continues = not terminated or slurm.is_running(job_id)
        command = ["scontrol", "requeue", job_id]
        # The last task of an array has the array's own id, which means all tasks.
        if environ.get("SLURM_ARRAY_JOB_ID") == job_id:
            command[-1] += f"_{environ['SLURM_ARRAY_TASK_ID']}"
    else:  # after a preemption PBS runs it again by itself
        is_ended = terminated and pbs.has_ended_job(output_begin)
        continues = script is not None and (not terminated or is_ended)
        # The next job knows nothing else of qsub's command line.
        number = str(job_number(environ) + 1)
        environ = {"ARGS": "", **environ, JOB_NUMBER: number}
        if not Path(environ.get("TMPDIR", "/")).is_dir():
            del environ["TMPDIR"]  # qsub writes there, and PBS may have removed it
        name = "ARGS"
        if not re.fullmatch(r"[\w\s.,:/=+@%-]*", environ["ARGS"]):
            name = ENCODED_ARGS  # qsub changes quotes and backslashes
            environ[name] = b64encode(environ["ARGS"].encode()).decode()
        command = ["qsub", "-N", environ["PBS_JOBNAME"], "-v", f"{name},{JOB_NUMBER}"]
        # Not while this job has the lock of the run folder.
        command += ["-W", f"depend=afterany:{job_id}", script or ""]
    if not continues:
        _print("cancelled or preempted: unless it starts by itself, submit it again")
        return
    if terminated:  # KILL comes at any time
        end = time.monotonic() + RETRY_SECONDS[0] + SUBMIT_SECONDS
    # One refusal, of a scheduler that is busy, must not end the chain.
    for pause in RETRY_SECONDS:
        with suppress(OSError):
            done = subprocess.run(
                command,
                check=False,
                env=environ,
                # The signals that `Supervisor` blocks would stay blocked in it.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()),
            )
            if done.returncode == 0:
                return
        if time.monotonic() + pause + SUBMIT_SECONDS > end:
            break
        time.sleep(pause)
    _print(f"{command[0]} failed: submit again to resume")


def _furthest_step(run_dir: Path | None) -> int:
    """Return the last step that is recorded or saved; of a sweep, of all trials."""
    if run_dir is None:
        return 0
    with suppress(OSError):
        if trials := [*run_dir.glob("trial-*")]:
            return sum(map(_furthest_step, trials))
        saved = [found.step for found in list_checkpoints(run_dir)]
        return max([*saved, progress_of(run_dir / "metrics.jsonl").get("steps", 0)])
    return 0


def _print(text: str) -> None:
    print(f"supervise: {text}", file=sys.stderr, flush=True)

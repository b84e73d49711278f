"""`python -m mpitrain supervise`: run mpirun; stop it in time, and restart it.

    python -m mpitrain supervise -- mpirun ... python -m mpitrain FLAGS
    python -m mpitrain supervise --restarts 3 -- mpirun ... python -m mpitrain run X.py
    python -m mpitrain supervise --jobs 20 -- mpirun ... python -m mpitrain FLAGS

A job that is cancelled or preempted gets TERM, and KILL some seconds later (SLURM:
KillWait; PBS: kill_delay). mpirun would end the ranks at once: so TERM is blocked for
it. The ranks get TERM, or USR2, which mpirun forwards: they save a checkpoint and stop
with status 75. `run` makes it TERM for a script, once. Ranks that hang are killed with
their mpirun, in time to requeue.

    scheduler   TERM (cancelled, preempted), USR1 (SLURM, before the limit), or nothing
                (PBS, for which `supervise` has a clock)
    supervise   USR2 to mpirun, or TERM to its ranks on this host; KILL to mpirun later
    ranks       rank zero writes the run folder, the step in memory and the status into
                files beside STATUS_FILE (`record.supervised`)
    supervise   after a fault: leaves out a node, probes, or neither; starts again

mpirun prints a long message after an error; the training's own error follows it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mpitrain.checkpoint.memory_folder import remove_all
from mpitrain.errors import Stopped, UsageError
from mpitrain.launch.env_checks import STATUS_FILE, may_restart
from mpitrain.mpi.launchers import LAUNCHERS, Launcher, LauncherName
from mpitrain.record.cost import end_job
from mpitrain.record.jsonl import changed_at
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import is_finished
from mpitrain.record.supervised import (
    Restart,
    Supervision,
    begin_start,
    opened_run,
    read_memory_step,
    record_restart,
)
from mpitrain.schedulers import detect, seconds_left
from mpitrain.schedulers.signals import had_term
from mpitrain.settings import setting
from mpitrain.tools.jobs import chain
from mpitrain.tools.jobs.check_nodes import begin_without_term, launcher_of
from mpitrain.tools.jobs.jobscript import notice_seconds
from mpitrain.tools.jobs.launch_words import LaunchWords, parse_words
from mpitrain.tools.jobs.node_choice import NodeChoice
from mpitrain.tools.jobs.warm_nodes import WarmNodes
from mpitrain.watchdog.coordinator import HANG_STATUS
from mpitrain.watchdog.process import Ancestor, ranks_below, send_signal, status_of

# Blocked in this process, and taken by `sigtimedwait`.
# SIGCHLD is one of them: so the end of mpirun ends a wait.
SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
# The notice of a job script, 120 s, less 15 s for submitting the next job.
MAX_STOP_SECONDS = 105.0  # how long the ranks may take to stop
BAD_HOST = re.compile(
    r"\[rank \d+/\d+ (\S+)\] (its host is lost|.*this rank computes wrongly)"
)
# Rank zero writes its error before it reports it, which takes seconds (`ExitGuard`).
LINGER_SECONDS = 8.0  # how long mpirun may take to end after its ranks
INTERRUPT_SECONDS = 3.0  # how long mpirun may take to end after Ctrl-C
LEFT_SECONDS = 86400.0  # after which a folder is of a job that was killed


@dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """Run the mpirun that follows --: stop it in time, and restart it after a fault.

    A fault that comes back without progress ends it, too.
    """

    restarts: int | None = setting(None, minimum=0)
    """Maximum number of restarts in this job. Default: 0; with --jobs, no limit."""
    jobs: int = setting(1, minimum=1)
    """Jobs that the training may take, one after another, until it is finished."""
    nodes: int | None = setting(None, minimum=1)
    """Number of nodes to train on; the others are spare. Default: all."""
    min_nodes: int = setting(1, minimum=1)
    """Minimum number of nodes, where others fail; with fewer it ends."""
    warm: bool = False
    """Keep a fork server on each node: starts after the first take less time."""
    probe_seconds: float = setting(120.0, above=0)
    """Time limit of the search for nodes that work."""
    script: str | None = None
    """The job script, which PBS's next job runs, with --jobs."""
    launcher: Literal["auto"] | LauncherName = "auto"
    """What starts the ranks. auto: what the program after -- says of itself."""
    container: str = ""
    """With --jobs or --restarts, words that run a rank in a container, as a shell
    quotes them."""
    run_dir: Path | None = None
    """With --jobs, the run folder of a script (`run`)."""

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < self.min_nodes:
            raise UsageError(
                f"--nodes {self.nodes}: expected --min-nodes {self.min_nodes} or more"
            )
        if self.warm and (self.container or not (self.restarts or self.jobs > 1)):
            raise UsageError(
                "--warm: expected --restarts or --jobs with it, and no --container, "
                "where each rank has a place of its own"
            )


class Supervisor:
    """Runs one program after another, and stops them when the job comes to its end.

    `notice` is the number of seconds before the end at which to stop; ``None``: the
    scheduler sends USR1 then.
    """

    def __init__(
        self, seconds_left: float | None = None, notice: float | None = None
    ) -> None:
        # Not only while a program runs: what comes between two is pending for `_wait`.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.is_stopping = False
        self.is_terminated = False
        self.error = ""  # what the last training said of its end
        self.end = self._stop_at = self._kill_at = math.inf
        if seconds_left is not None:
            self.end = time.monotonic() + seconds_left
            self._stop_at = math.inf if notice is None else self.end - notice

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        send_usr2: bool,
        status_file: Path | None = None,
    ) -> int:
        """Run a program with TERM blocked, and return its exit status.

        75 if it was not started, since the job is stopping. USR2 stops it, or TERM to
        its ranks on this host, unless the scheduler has signalled them.
        Once ``status_file`` has an error, the program has `LINGER_SECONDS` to end:
        mpirun may wait for a host that is gone.
        """
        failed_at, is_told = math.inf, False
        self._wait(0.0)
        if self.is_stopping:
            return Stopped.exit_status
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                preexec_fn=partial(begin_without_term, os.getpid()),
            )
        except OSError as error:
            raise UsageError(
                f"{command[0]} cannot be started: {error.strerror}; expected an mpirun "
                "after --"
            ) from None
        try:
            while process.poll() is None:
                with contextlib.suppress(KeyError, OSError):
                    os.utime(Path(environ[STATUS_FILE]).parent)  # it is not left behind
                if self._wait(1.0 if status_file else 60.0) and not is_told:
                    is_told = True  # a second signal would end ranks that save
                    time.sleep(0.5)  # until a scheduler has signalled mpirun, too
                    if send_usr2:
                        process.send_signal(signal.SIGUSR2)
                    else:
                        _terminate_ranks(process.pid, environ)
                if failed_at == math.inf and _is_failed(_status_in(status_file)):
                    failed_at = time.monotonic()
                if time.monotonic() >= min(self._kill_at, failed_at + LINGER_SECONDS):
                    self._kill_at = math.inf
                    process.kill()
        except KeyboardInterrupt:
            # Of a terminal it came to mpirun, too: a second one would end it at once.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(INTERRUPT_SECONDS)
            raise
        self._wait(0.0)
        status = process.returncode
        return status if status >= 0 else 128 - status

    def train(
        self, command: Sequence[str], environ: Mapping[str, str], launcher: Launcher
    ) -> int:
        """Run mpirun; keep the training's error, and return the exit status.

        Some launchers end with 0 though they have lost a node, or with a status of
        their own: then it is the one that rank zero has written, or 1 instead of 0.
        """
        file, began = Path(environ[STATUS_FILE]), time.time()
        status = self.run(
            command,
            environ,
            send_usr2=launcher.forwards_usr2,
            status_file=file if may_restart(environ) else None,
        )
        opened, written = opened_run(environ), _status_in(file)
        if opened is not None:
            end_job(opened.run_dir, began)
        if status == 0 or not launcher.passes_status:
            if written is not None:
                status = written
            else:  # a script without `run` writes none; its run folder may tell
                status = status or int("-m mpitrain" in " ".join(command))
                if status == 0 and opened is not None:
                    result = read_result(opened.run_dir)
                    status = int(result.get("status") in ("running", "failed"))
        self.error = _error_of(environ) if _is_failed(status) else ""
        return status

    def _wait(self, seconds: float) -> bool:
        """Wait for a signal or a deadline; return whether the job was asked to stop."""
        deadline = min(time.monotonic() + seconds, self._stop_at, self._kill_at)
        arrived: set[int] = set()
        # One stop answers all that have come: a scheduler may send several at once.
        while info := signal.sigtimedwait(
            SIGNALS, 0.0 if arrived else max(0.0, deadline - time.monotonic())
        ):
            arrived.add(info.si_signo)
        now = time.monotonic()
        # PBS sends nothing before the end: as if USR1 had come.
        if now >= self._stop_at:
            self._stop_at = math.inf
            arrived.add(signal.SIGUSR1)
        if not arrived - {signal.SIGCHLD}:
            return False
        self.is_terminated |= signal.SIGTERM in arrived
        if not self.is_stopping:
            self.is_stopping = True
            left = self.end - now
            # Almost to the end, for a step may be long.
            stop_seconds = max(left - 15.0, left * 0.75, 1.0)
            self._kill_at = now + min(MAX_STOP_SECONDS, stop_seconds)
        return True


def supervise(
    config: SuperviseConfig,
    command: Sequence[str],
    environ: Mapping[str, str],
    folder_of: Callable[[Sequence[str]], Path],
) -> int:
    """Run mpirun, once or until the training is finished; return its exit status.

    ``folder_of`` returns the run folder, or that of a sweep, of mpitrain's words.
    """
    if not command:
        raise UsageError("supervise: missing command; expected mpirun ... after --")
    name = config.launcher
    launcher = LAUNCHERS[launcher_of(command) if name == "auto" else name]
    # Beside the runs: rank zero may be on another node, or in a container.
    here = "." if os.access(".", os.W_OK) else None
    for old in Path(here or ".").glob(".mpitrain-????????"):
        with contextlib.suppress(OSError):
            if time.time() > old.stat().st_mtime + LEFT_SECONDS:
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=".mpitrain-", dir=here) as name_of_folder:
        # Absolute, which Python 3.11's name is not: a script may change its folder.
        folder = Path(os.path.realpath(name_of_folder))
        environ = {**environ, STATUS_FILE: str(folder / "status")}
        if config.jobs == 1 and not config.restarts:
            supervisor = Supervisor()
            begin_start(environ)
            status = supervisor.train(command, environ, launcher)
        else:
            words = parse_words(command, launcher)
            warm = WarmNodes(words, environ) if config.warm else None
            try:
                supervisor, status = _train(
                    config, words, environ, folder, folder_of, warm
                )
            finally:
                if warm is not None:
                    warm.stop()
                remove_all(_token(folder))
        if supervisor.error:
            # A launcher may end its message with a zero byte, and not with a line end.
            print(f"\nfailed: {supervisor.error}", file=sys.stderr, flush=True)
        return status


def _train(
    config: SuperviseConfig,
    words: LaunchWords,
    environ: Mapping[str, str],
    folder: Path,
    folder_of: Callable[[Sequence[str]], Path],
    warm: WarmNodes | None,
) -> tuple[Supervisor, int]:
    """Start a training until it is finished, or has had its starts; requeue the job."""
    scheduler, run_dir = detect(environ).name, config.run_dir
    output_begin = os.fstat(2).st_size  # several jobs may append to one file
    restarts = config.restarts
    if config.jobs == 1:
        restarts = restarts or 0
    elif scheduler == "none":
        raise UsageError(
            "--jobs needs a job: neither SLURM_JOB_ID nor PBS_JOBID is set. On a "
            "machine without a scheduler: --restarts"
        )
    else:
        run_dir = run_dir or folder_of(words.flags)
    number = chain.job_number(environ) if config.jobs > 1 else 1
    training = chain.Chain(run_dir, number, config.jobs, restarts)
    if run_dir is not None:
        chain.refuse_second_job(run_dir)
    # After that wait: the clock of `Supervisor` begins now.
    left = seconds_left(environ)
    # SLURM sends USR1 before the time limit (--signal); PBS sends nothing.
    notice = None if left is None or scheduler == "slurm" else notice_seconds(left)
    supervisor = Supervisor(left, notice)
    container = shlex.split(config.container)
    nodes = NodeChoice(
        words,
        environ,
        folder / "hosts",
        limit=config.nodes,
        minimum=config.min_nodes,
        seconds=config.probe_seconds,
    )
    probes = config.jobs > 1 or config.nodes is not None
    began = time.monotonic()
    action: chain.Action = "retry"
    while action == "retry":
        status, started = 0, time.monotonic()
        supervisor.error = ""  # a probe that fails has not that of the start before
        if probes and nodes.probe:
            # Those without a host file find a node that does not work by themselves.
            status = supervisor.run(nodes.begin_probe(), environ, send_usr2=True)
        if supervisor.is_stopping:
            status = Stopped.exit_status  # nothing was started or has failed
        elif status == 0:
            now = Supervision(
                token=_token(folder),
                seconds=time.monotonic() - began,
                num_restarts=training.num_restarts,
            )
            begin_start(environ, now)
            # After the probe, which may have chosen other nodes.
            if warm is not None:
                warm.keep(nodes.hosts)
            start = words.on_hosts(nodes.host_file, container)
            status = supervisor.train(start, environ, words.launcher)
            # Without --name the folder is named by the date: only the start knows it.
            if run_dir is None and (opened := opened_run(environ)) is not None:
                run_dir = training.run_dir = opened.run_dir
            # mpirun may end with 0 after it has lost a node (Open MPI 5).
            if run_dir is not None and not words.is_script:
                status = status or int(not is_finished(run_dir))
        action = training.next_action(
            status,
            is_stopping=supervisor.is_stopping,
            error=supervisor.error,
            seconds=time.monotonic() - started,
            step=read_memory_step(environ),
        )
        if action == "retry" and run_dir is not None:
            error = supervisor.error or f"ended with status {status}"
            restart = Restart(time=time.time(), step=training.step, error=error)
            record_restart(run_dir, restart)
        bad = BAD_HOST.match(supervisor.error)
        is_wrong = bad is not None and "wrongly" in bad[2]
        if bad and nodes.leave_out(bad[1], is_wrong=is_wrong):
            why = "this rank computes wrongly" if is_wrong else bad[2]
            print(f"left out: {bad[1]}: {why}", file=sys.stderr, flush=True)
            probes = False
        else:
            # A process that dies, or raises, says so; a node that is gone does not.
            is_unclear = status == HANG_STATUS or not supervisor.error
            probes = is_unclear or training.num_failures > 0
    if action == "requeue":
        chain.requeue(
            environ,
            config.script,
            terminated=supervisor.is_terminated,
            end=supervisor.end,
            output_begin=output_begin,
        )
    return supervisor, status


def _terminate_ranks(launcher: int, environ: Mapping[str, str]) -> None:
    # Not those that the scheduler has signalled: a second TERM ends a rank that saves.
    if (status := status_of(launcher)) is not None:
        above = [Ancestor(launcher, status[2])]
        for rank in ranks_below(launcher):
            if not had_term(rank, above, environ):
                send_signal(rank, signal.SIGTERM)


def _token(folder: Path) -> str:
    return folder.name.lstrip(".")


def _status_in(file: Path | None) -> int | None:
    """Return the status that rank zero has written; ``None``: none yet."""
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            return int(file.read_text())
    return None


def _is_failed(status: int | None) -> bool:
    return status not in (None, 0, Stopped.exit_status)


def _error_of(environ: Mapping[str, str]) -> str:
    opened = opened_run(environ)
    if opened is None:
        return ""
    if changed_at(opened.run_dir / "result.json") == opened.result_time:
        return ""  # written by an earlier job
    result = read_result(opened.run_dir)
    error = str(result.get("error", "")) if result.get("status") == "failed" else ""
    return " ".join(error[max(error.rfind("\n[rank "), 0) :].split())  # no traceback

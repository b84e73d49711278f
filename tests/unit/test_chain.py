"""Trainings of several jobs: what follows the end of a job's mpirun."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.cli import read_config
from mpitrain.errors import LaunchError, UsageError
from mpitrain.tools.jobs import chain
from mpitrain.tools.jobs.chain import Chain, job_number, run_dir_of
from mpitrain.tools.jobs.jobscript import JobscriptConfig, text_of
from mpitrain.watchdog.process import is_gone


class Jobs:
    """A run folder, and the chain that trains in it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "mine"

    def begin(self, number: int = 1, *, jobs: int = 20) -> Chain:
        return Chain(self.run_dir, number, jobs)

    def save(self, step: int) -> None:
        """Let the training have a checkpoint."""
        (self.run_dir / "checkpoints" / f"step-{step:08}").mkdir(parents=True)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def follow(job: Chain, status: int, *, is_stopping: bool = False) -> str:
    return job.next_action(status, is_stopping=is_stopping)


def test_a_training_that_stopped_resumes_in_another_job(jobs: Jobs) -> None:
    job = jobs.begin()
    jobs.save(5)
    assert follow(job, 75) == "requeue"
    assert follow(jobs.begin(2), 0) == "end"


def test_a_failure_is_tried_again_in_the_same_job_unless_its_time_is_up(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.begin()
    jobs.save(5)
    assert follow(job, 137) == "retry"
    assert "restart 1 at step 5: ended with status 137" in capsys.readouterr().err
    jobs.save(9)
    assert follow(job, 1, is_stopping=True) == "requeue"


def test_two_failures_in_a_row_without_progress_end_it(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.begin()
    assert follow(job, 1) == "retry"
    assert follow(job, 76) == "end"
    said = capsys.readouterr().err
    assert "failed 2 times without progress, at step 0, the last with" in said
    job = jobs.begin()
    assert follow(job, 1) == "retry"
    jobs.save(3)
    assert follow(job, 1) == "retry"  # it had come to step 3: counted anew
    assert follow(job, 1) == "retry"
    assert follow(job, 1) == "end"


def test_failures_of_several_causes_may_come_before_there_is_progress(
    jobs: Jobs,
) -> None:
    job = jobs.begin()
    kinds = [
        "its host is lost",
        "ValueError: of step 7",
        "died without an error message",
    ]
    errors = [f"[rank {rank}/8 n{rank}] {it}" for rank, it in enumerate(kinds)]
    for error in errors:
        assert job.next_action(1, is_stopping=False, error=error) == "retry"
    again = "[rank 5/6 n3] ValueError: of step 8"
    assert job.next_action(1, is_stopping=False, error=again) == "end", "four causes"
    job = jobs.begin()
    for error, action in ((errors[1], "retry"), (again, "end")):
        assert job.next_action(1, is_stopping=False, error=error) == action
    job = jobs.begin()
    for error, action in (
        (errors[2], "retry"),
        ("[rank 3/8 n3] died without an error message", "retry"),
        ("[rank 3/8 n3] died without an error message", "end"),
    ):
        assert job.next_action(1, is_stopping=False, error=error) == action


def test_a_job_has_so_many_restarts_and_no_more(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Chain(jobs.run_dir, max_restarts=2)
    for step in (3, 5):
        jobs.save(step)
        assert follow(job, 1) == "retry"
    assert "restart 2 of 2 at step 5" in capsys.readouterr().err
    jobs.save(8)
    assert follow(job, 1) == "end"
    said = capsys.readouterr().err
    assert "mine was restarted 2 times (--restarts); failed at step 8" in said


def test_what_the_record_says_is_progress_although_no_checkpoint_has_it(
    jobs: Jobs,
) -> None:
    job = Chain(jobs.run_dir, max_restarts=9)
    jobs.save(3)
    record = jobs.run_dir / "metrics.jsonl"
    for step in (7, 9):
        record.write_text(f'{{"event": "step", "step": {step}}}\n')
        assert follow(job, 1) == "retry"
    record.write_text('{"event": "step", "step": 4}\n')  # it came back, and less far
    assert follow(job, 1) == "retry"
    assert follow(job, 1) == "end"


def test_a_script_without_a_run_folder_has_its_restarts() -> None:
    job = Chain(None, max_restarts=3)
    assert [follow(job, 1) for _ in range(4)] == ["retry"] * 3 + ["end"]
    job = Chain(None, max_restarts=3)
    ended = [job.next_action(1, is_stopping=False, seconds=5.0) for _ in range(2)]
    assert ended == ["retry", "end"], "it fails as soon as it starts"


def test_a_stop_without_a_step_is_no_failure(jobs: Jobs) -> None:
    for number in range(1, 5):
        assert follow(jobs.begin(number), 75) == "requeue"


def test_a_chain_has_so_many_jobs_and_no_more(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(jobs.begin(1, jobs=2), 75) == "requeue"
    jobs.save(8)
    assert follow(jobs.begin(2, jobs=2), 75) == "end"
    assert "has had 2 jobs (--jobs) and is at step 8" in capsys.readouterr().err
    assert follow(jobs.begin(1, jobs=2), 75) == "requeue"  # submitted again


def test_a_job_that_is_preempted_for_the_last_time_does_not_begin(jobs: Jobs) -> None:
    with pytest.raises(LaunchError, match=r"has had 1 job \(--jobs\)"):
        jobs.begin(2, jobs=1)


def test_a_file_named_stop_ends_it(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.begin()
    jobs.save(2)
    (jobs.run_dir / "stop").touch()
    assert follow(job, 75) == "end"
    assert "stop ended it: submit again to resume" in capsys.readouterr().err


def test_a_mistake_in_the_flags_is_not_tried_again(jobs: Jobs) -> None:
    assert follow(jobs.begin(), 2) == "end"


def test_what_looks_like_a_mistake_after_a_checkpoint_is_a_failure(jobs: Jobs) -> None:
    """The run's lock is held by a rank that does not die; a folder is not mounted."""
    jobs.save(2)
    assert follow(jobs.begin(), 2) == "retry"


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"SLURM_JOB_ID": "7"}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, 3),
        ({"PBS_JOBID": "7.head"}, 1),
        ({"PBS_JOBID": "7.head", "MPITRAIN_JOB_NUMBER": "3"}, 3),
    ],
)
def test_the_scheduler_knows_which_job_of_the_chain_this_is(
    environ: dict[str, str], number: int
) -> None:
    assert job_number(environ) == number


def test_a_second_job_waits_and_is_refused_while_the_first_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "LOCK_SECONDS", 0.1)
    lock = tmp_path / ".lock"
    lock.write_text("process 7 on node1, since today\n")
    code = f"import fcntl, time; f = open({str(lock)!r}, 'r+'); "
    code += "fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None
            job.stdout.readline()
            with pytest.raises(UsageError, match=r"has the training .* on node1"):
                chain.refuse_second_job(tmp_path)
        finally:
            job.kill()
    chain.refuse_second_job(tmp_path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--new-run",), "--new-run has no place in a chain"),
        (("--resume", "never"), "--resume never has no place in a chain"),
        (("--dry-run",), "--dry-run has no place in a chain"),
        (
            ("--resume", "runs/mine/checkpoints/step-00000003"),
            "each would begin there anew",
        ),
    ],
)
def test_flags_that_begin_anew_are_refused(more: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_dir_of(read_config(["--name", "mine", *more]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "supervise: missing command"),
        (["--jobs", "2", "--", "mpirun", "python", "train.py"], "neither SLURM_JOB_ID"),
        (["--", "nowhere/mpirun"], "nowhere/mpirun cannot be started: No such file"),
    ],
)
def test_what_cannot_be_supervised_is_refused(words: list[str], said: str) -> None:
    done = supervise(words, {})
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mpirun", "python", "train.py"], "expected mpirun ... python -m mpitrain"),
        (["mpirun", "./train"], "expected mpirun ... python ... after --, found"),
        (["mpirun", "python", "-m", "mpitrain"], "expected its --name"),
        (
            [
                "mpirun",
                "python",
                *["-m", "mpitrain", "stage", "--", "python", "train.py"],
            ],
            "expected mpirun ... python -m mpitrain",
        ),
    ],
)
def test_a_chain_is_of_trainings_with_a_name(words: list[str], said: str) -> None:
    done = supervise(["--jobs", "2", "--", *words], {"SLURM_JOB_ID": "7"})
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_program_that_does_not_stop_in_time_is_killed() -> None:
    """PBS sends no signal before the end of a job: the supervisor has a clock."""
    code = """
import os
from mpitrain.tools.jobs.supervisor import Supervisor

supervisor = Supervisor(seconds_left=2.0, notice=1.0)
hangs = ["sh", "-c", "trap '' USR2; exec sleep 60"]
print(supervisor.run(hangs, os.environ, send_usr2=True), supervisor.is_stopping)
print(supervisor.run(["false"], os.environ, send_usr2=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "137 True\n75\n", done.stderr


def test_a_full_disk_keeps_no_training_from_its_restart(tmp_path: Path) -> None:
    """As a full one does, a limit of 0 bytes lets no file be written."""
    mpirun, starts = tmp_path / "mpirun", tmp_path / "starts"
    mpirun.write_text(
        "#!/bin/sh\n"
        "ulimit -S -f unlimited\n"
        f"echo >>{starts}\n"
        f"[ $(wc -l <{starts}) = 2 ] && exit 0\n"
        "prlimit --fsize=0:unlimited --pid $PPID\n"
        "exit 137\n"
    )
    mpirun.chmod(0o755)
    words = ["--restarts", "1", "--launcher", "openmpi", "--", str(mpirun)]
    done = supervise([*words, "-np", "1", "python", "x.py"], dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert starts.read_text() == "\n\n"
    assert "status.restarts is not renewed: [Errno 27] File too large" in done.stderr


def test_a_probe_that_fails_is_not_told_as_the_error_of_the_start_before(
    tmp_path: Path,
) -> None:
    """The second start is not begun: no node answers its probe."""
    mpirun, run_dir = tmp_path / "mpirun", tmp_path / "run"
    run_dir.mkdir()
    result = json.dumps({"status": "failed", "error": "ValueError: of the first start"})
    opened = json.dumps({"run_dir": str(run_dir), "result_time": None})
    mpirun.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --hostfile ] || exit 1\n'  # as the probe starts it
        f"echo '{result}' >{run_dir}/result.json\n"
        f"echo '{opened}' >$MPITRAIN_STATUS_FILE.run\n"
        "exit 1\n"
    )
    mpirun.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost\n")
    words = ["--restarts", "5", "--probe-seconds", "2", "--launcher", "openmpi", "--"]
    words += [str(mpirun), "--hostfile", f"{tmp_path}/hosts", sys.executable, "x.py"]
    said = supervise(words, dict(os.environ)).stderr
    assert said.count("ValueError: of the first start") == 1, said
    assert "no node answers" in said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGINT])
def test_mpirun_ends_with_its_supervise(number: signal.Signals, tmp_path: Path) -> None:
    words = ["--launcher", "openmpi", "--", "sh", "-c", "echo $$; exec sleep 60"]
    with subprocess.Popen(
        [sys.executable, "-m", "mpitrain", "supervise", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        mpirun = int(job.stdout.readline())
        job.send_signal(number)
        end = time.monotonic() + 30
        while not is_gone(mpirun):
            assert time.monotonic() < end
            time.sleep(0.05)


def supervise(
    words: list[str], environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpitrain", "supervise", *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


PBS_JOB = {"PBS_JOBID": "7.head", "PBS_JOBNAME": "mine"}


def requeue(
    tmp_path: Path, submit: str, *, terminated: bool = False, left: float, **more: str
) -> tuple[str, float]:
    """Submit the next job of PBS; return what is printed, and the seconds it took."""
    (tmp_path / "qsub").write_text(f"#!/bin/bash\n{submit}\n")
    (tmp_path / "qsub").chmod(0o755)
    output = tmp_path / "output"
    code = (
        "import os, time\nfrom mpitrain.tools.jobs.chain import requeue\n"
        f"requeue(os.environ, 'job.sh', terminated={terminated}, "
        f"end=time.monotonic() + {left})\n"
    )
    begun = time.monotonic()
    with output.open("a") as file:
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            cwd=tmp_path,
            env={**os.environ, **PBS_JOB, **more}
            | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stderr=file,
            timeout=60,
        )
    return output.read_text(), time.monotonic() - begun


@pytest.mark.parametrize(
    ("message", "is_submitted"),
    [
        ("=>> PBS: job killed: node 1 (node2) requested job die, code 15009\n", True),
        ("=>> PBS: job killed: walltime 105 exceeded limit 100\n", True),
        ("=>> PBS: job killed: mem 2097152kb exceeded limit 1048576kb\n", False),
        ("", False),  # qdel
    ],
)
def test_a_job_that_pbs_has_ended_is_followed_by_another_and_a_cancelled_one_says_so(
    message: str, is_submitted: bool, tmp_path: Path
) -> None:
    (tmp_path / "output").write_text(message)
    said, _ = requeue(tmp_path, "touch submitted", terminated=True, left=60)
    assert (tmp_path / "submitted").exists() == is_submitted
    assert ("submit it again" in said) != is_submitted


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_message_of_pbs_for_an_earlier_job_in_the_same_file_is_not_of_this_one(
    is_ended: bool, tmp_path: Path
) -> None:
    message = "=>> PBS: job killed: walltime 105 exceeded limit 100"
    programs = {
        "mpiexec": "trap 'exit 75' USR2; "
        f"{f'echo {message!r} >&2; ' * is_ended}"
        "kill -TERM $PPID; for i in {1..50}; do sleep 0.1; done",
        "qsub": "touch submitted",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    output = tmp_path / "output"
    output.write_text(f"{message}\n")
    words = ["--jobs", "2", "--script", "job.sh", "--launcher", "pals", "--"]
    words += ["mpiexec", "python", "-m", "mpitrain", "--name", "mine"]
    with output.open("a") as file:
        done = subprocess.run(
            [sys.executable, "-m", "mpitrain", "supervise", *words],
            cwd=tmp_path,
            env={**os.environ, **PBS_JOB, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            stderr=file,
            timeout=60,
        )
    said = output.read_text()
    assert done.returncode == 75, said
    assert (tmp_path / "submitted").exists() == is_ended, said
    assert ("submit it again" in said) != is_ended


def test_the_task_of_an_array_alone_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM gives the last task the id of the array, which names all of them."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {**os.environ, "SLURM_JOB_ID": "17"}
    array = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "0"}
    for more, name in (({}, "17"), (array, "17_0")):
        chain.requeue(environ | more, None, terminated=False, end=math.inf)
        assert (tmp_path / "words").read_text() == f"requeue {name}\n"


def test_the_next_job_is_submitted_where_pbs_has_removed_the_folder_of_this_one(
    tmp_path: Path,
) -> None:
    """qsub writes its copy of the script to TMPDIR."""
    submit = 'touch "${TMPDIR:-.}/submitted"'
    said, _ = requeue(tmp_path, submit, left=12, TMPDIR=f"{tmp_path}/gone")
    assert (tmp_path / "submitted").exists(), said


def test_what_to_do_where_no_job_can_be_submitted_is_told_before_the_job_ends(
    tmp_path: Path,
) -> None:
    said, seconds = requeue(tmp_path, "echo no >>tries; exit 1", left=12)
    assert "qsub failed: submit again to resume" in said
    assert seconds < 12
    assert len((tmp_path / "tries").read_text().split()) == 2


@pytest.mark.parametrize("args", ["--lr 0.5", "--x=\"q,r\" --y=a\\b 'c'", ""])
def test_args_reach_the_next_job_whole(args: str, tmp_path: Path) -> None:
    """Through qsub, which changes quotes and backslashes, and the next job's script."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/bash\nprintf %s "$ARGS" >got\n')
    python.chmod(0o755)
    config = JobscriptConfig(scheduler="pbs", jobs=3, nodes=1)
    (tmp_path / "job.sh").write_text(text_of(config, []))
    (tmp_path / "nodes").write_text("node1\n")
    submit = (
        'for name in ${4//,/ }; do set -- "$@" "$name=$(tr -d \'"\\\\\' '
        '<<<"${!name}")"; done\n'
        'exec env -u ARGS -u MPITRAIN_ARGS "${@:8}" bash job.sh'
    )
    more = {"PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes")}
    said, _ = requeue(tmp_path, submit, left=60, ARGS=args, **more)
    assert (tmp_path / "got").read_text() == args, said

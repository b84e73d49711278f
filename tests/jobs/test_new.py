"""`new` writes projects that train, that resume, and whose own tests pass."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import Mpi, environment, mpirun, slow

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.tools.new.new import NewConfig, new

pytestmark = pytest.mark.usefixtures("warm_starts")

KINDS = ("trainer", "task", "loop")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_trains(
    openmpi: Mpi,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-flow", "--kind", kind]) == 0
    project = tmp_path / "my-flow"
    (start,) = re.findall(
        r"cd my-flow && mpirun -np 4 --oversubscribe python (.*)",
        capsys.readouterr().out,
    )
    readme = (project / "README.md").read_text()
    assert start in readme
    done = mpirun(openmpi, 2, *shlex.split(start), cwd=project)
    assert done.status == 0, done.out + done.err
    assert "warning" not in done.err
    monkeypatch.chdir(project)
    for command in re.findall(r"python -m mpitrain (watch|report) runs/first", readme):
        assert main([command, "runs/first"]) == 0
    (jobscript,) = re.findall(r"^    python (-m mpitrain jobscript .*)$", readme, re.M)
    before = (project / "job.sh").read_text()
    (project / "job.sh").unlink()
    assert main(shlex.split(jobscript)[2:]) == 0
    assert (project / "job.sh").read_text() == before


# In CI trainings of the other kinds resume in tests/jobs/test_own_task.py and
# tests/mpi/test_own_loops.py.
@pytest.mark.parametrize("kind", ["trainer", slow("task"), slow("loop")])
def test_the_tests_of_a_new_project_pass(
    openmpi: Mpi, kind: Any, tmp_path: Path
) -> None:
    new(NewConfig(name=str(tmp_path / "my-flow"), kind=kind))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "my-flow",
        env=environment(openmpi),
        check=False,
        capture_output=True,
        text=True,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_the_job_script_is_of_the_scheduler(scheduler: str, tmp_path: Path) -> None:
    new(NewConfig(name=str(tmp_path / "a"), kind="loop", scheduler=scheduler))  # type: ignore[arg-type]
    text = (tmp_path / "a/job.sh").read_text()
    assert {"slurm": "#SBATCH", "pbs": "#PBS"}[scheduler] in text
    assert "run train.py runs/a" in text
    subprocess.run(["bash", "-n", tmp_path / "a/job.sh"], check=True)


def test_what_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="there exists; expected the name of a new"):
        new(NewConfig(name=str(tmp_path / "there")))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        new(NewConfig(name=str(tmp_path / "file/a")))
    for name in ("1st", "a b", ""):
        with pytest.raises(UsageError, match="expected a letter, then letters"):
            new(NewConfig(name=name))
    assert (tmp_path / "file").read_text() == "mine"

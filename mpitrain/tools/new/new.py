"""A project that trains at once: a training, its test, a job script."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.settings import setting
from mpitrain.tools.jobs.jobscript import NAME, JobscriptConfig, SchedulerName, text_of

Kind = Literal["trainer", "task", "loop"]

WHAT = {
    "trainer": "the loss of a `Trainer`",
    "task": "the steps of a `Task`",
    "loop": "the loop",
}
OF_TASK = "-m mpitrain --task train:build"
JOBS = 3  # of the chain in the job script


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """Write a small project that trains, with a test and a job script."""

    name: str = setting(metavar="NAME", is_positional=True)
    """Folder to make."""
    kind: Kind = "trainer"
    """trainer: a loss and metrics for a Trainer. task: methods for its steps. loop: a
    loop of your own."""
    scheduler: SchedulerName = "slurm"
    """Of the job script."""


def new(config: NewConfig) -> str:
    """Write the project; return what to type next."""
    path, is_loop = Path(config.name), config.kind == "loop"
    if not re.fullmatch(NAME[0], path.name):
        raise UsageError(f"found the name {path.name!r}; expected {NAME[1]}")
    command = (
        "python train.py runs/first" if is_loop else f"python {OF_TASK} --name first"
    )
    venv = Path(sys.prefix) if sys.prefix != sys.base_prefix else Path(".venv")
    flags, words = [config.scheduler, "--name", path.name], OF_TASK.split()[2:]
    flags += ["--jobs", str(JOBS), "--venv", str(venv), "--output", "job.sh"]
    if is_loop:
        words = ["train.py", f"runs/{path.name}"]
        flags += ["--run-dir", words[1]]
    job = read_flags(JobscriptConfig, flags, program=PROGRAM, files=False)
    kind = "run" if is_loop else "train"
    typed = shlex.join([*flags, "--", *([kind] if is_loop else []), *words])
    files = {
        "train.py": _template(f"{config.kind}.py"),
        "test_train.py": _template("test_train.txt").format(
            words=TEST_OF_LOOP if is_loop else TEST_OF_TASK,
            tolerance="1e-5" if is_loop else "1e-9",
        ),
        "job.sh": text_of(job, words, kind),
        "README.md": _template("README.txt").format(
            name=path.name,
            as_script="" if is_loop else AS_SCRIPT,
            what=WHAT[config.kind],
            command=command,
            submit={"slurm": "sbatch", "pbs": "qsub"}[config.scheduler],
            jobscript=f"{PROGRAM} jobscript {typed}",
        ),
    }
    try:
        path.mkdir(parents=True)
        for name, text in files.items():
            (path / name).write_text(text)
    except FileExistsError:
        raise UsageError(f"{path} exists; expected the name of a new folder") from None
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"{path} cannot be written: {reason}") from None
    start = f"cd {shlex.quote(str(path))} && mpirun -np 4 --oversubscribe {command}"
    return f"{path}: {', '.join(files)}. Type:\n  {start}"


TEST_OF_LOOP = '"train.py", str(run_dir), "--epochs=3"'
TEST_OF_TASK = (
    '*"-m mpitrain --task train:build --precision fp64 --epochs 3".split(), '
    '"--checkpoint-every-steps=1", f"--runs-dir={run_dir.parent}", '
    'f"--name={run_dir.name}"'
)
AS_SCRIPT = (
    " As a script, without flags:\n`mpirun ... python train.py` (`runs/script`)."
)


def _template(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text()

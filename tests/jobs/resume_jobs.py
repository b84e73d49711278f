"""Trainings that are cut and gone on with, beside one that never was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from launcher import Mpi, environment, mpirun, send_signal, survivors

FLAGS = (
    *("--data", "custom:numbered", "--model", "custom:Learner", "--device", "cpu"),
    *("--global-batch-size", "16", "--lr", "0.05", "--epochs", "4"),
)
"""6 steps an epoch, 24 in all."""

NUM_STEPS = 24
TIMES = ("time", "epoch_seconds", "samples_per_second")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """What steps and epochs came to, without what is of time."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in row.items() if key not in TIMES}
        for row in map(json.loads, lines)
        if row["event"] in ("step", "epoch", "test")
    ]


@dataclass(kw_only=True)
class Runs:
    """Starts trainings in a folder, all with the same flags and variables."""

    mpi: Mpi
    folder: Path
    flags: tuple[str, ...] = FLAGS
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, num_ranks: int, *more: str, **variables: str) -> Any:
        """Train to the end of the job."""
        words = ("-m", "mpitrain", "--name", name, *self.flags, *more)
        notes = self.folder / f"notes-{name}"
        notes.mkdir(exist_ok=True)
        given = {"NOTES": str(notes), **self.variables, **variables}
        return mpirun(self.mpi, num_ranks, *words, cwd=self.folder, **given)

    def start(self, name: str, num_ranks: int, *more: str, **variables: str) -> Job:
        """Begin to train."""
        notes = self.folder / f"notes-{name}"
        notes.mkdir(exist_ok=True)
        given = {"NOTES": str(notes), **self.variables, **variables}
        out = self.folder / f"out-{name}"
        with out.open("a") as file:
            process = subprocess.Popen(
                [
                    *(str(self.mpi.mpirun), "-np", str(num_ranks), *self.mpi.flags),
                    *(sys.executable, "-m", "mpitrain", "--name", name),
                    *(*self.flags, *more),
                ],
                cwd=self.folder,
                env=environment(self.mpi, **given),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return Job(process=process, run_dir=self.folder / "runs" / name, out=out)

    def dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def record(self, name: str) -> Path:
        return self.dir(name) / "metrics.jsonl"

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What steps and epochs came to, without what is of time."""
        return rows_of(self.dir(name))

    def resumed_at(self, name: str) -> list[int]:
        """The steps from which it went on, along the way to the last weights."""
        lines = self.record(name).read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row["step"] for row in rows if row["event"] == "resume"]

    def checkpoints(self, name: str) -> list[Path]:
        """Its checkpoints, the newest first."""
        folder = self.dir(name) / "checkpoints"
        return sorted(folder.glob("step-*"), reverse=True)

    def newest(self, name: str) -> int:
        """The step of its newest checkpoint; 0 if there is none."""
        found = self.checkpoints(name)
        return max((int(path.name.split("-")[1]) for path in found), default=0)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self.dir(name) / "model.pt")
        return state

    def assert_same_bits(self, name: str, other: str) -> None:
        assert self.rows(name) == self.rows(other)
        mine, its = self.weights(name), self.weights(other)
        assert mine.keys() == its.keys()
        for key, tensor in mine.items():
            assert torch.equal(tensor, its[key]), key

    def assert_close(self, name: str, other: str, tolerance: float = 1e-9) -> None:
        mine, its = self.rows(name), self.rows(other)
        assert len(mine) == len(its)
        for row, its_row in zip(mine, its, strict=True):
            assert row.keys() == its_row.keys()
            for key, value in row.items():
                if isinstance(value, float):
                    assert abs(value - its_row[key]) <= tolerance, (row, its_row)
                else:
                    assert value == its_row[key], (row, its_row)


@dataclass(kw_only=True)
class Job:
    """A training under way."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    out: Path

    def said(self) -> str:
        return self.out.read_text()

    def wait_for_checkpoint(self) -> None:
        """Wait until one has its name."""
        self.wait_until(lambda: any((self.run_dir / "checkpoints").glob("step-*")))

    def wait_until(self, condition: Any) -> None:
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, self.said()
            assert self.process.poll() is None or condition(), self.said()
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """The ranks' process ids."""
        logs = sorted((self.run_dir / "logs").glob("rank-*.log"))
        heads = [
            [line for line in log.read_text().splitlines() if line.startswith("pid ")]
            for log in logs
        ]
        pids = [int(lines[-1].split()[1]) for lines in heads if lines]
        return [pid for pid in pids if self._is_rank(pid)]

    def _is_rank(self, pid: int) -> bool:
        """Whether it is not somebody else's, with an old job's process id."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        # A warm rank has the words of its fork server.
        return self.run_dir.name.encode() in words or b"serve" in words

    def end(self, seconds: float = 60) -> int:
        """Wait for its end, and for that of all its processes."""
        pids = self.ranks()
        try:
            status = self.process.wait(seconds)
            end = time.monotonic() + 15
            while alive := survivors(pids):
                assert time.monotonic() < end, (alive, self.said())
                time.sleep(0.05)
        finally:
            self.process.kill()
            send_signal(survivors(pids))
        return status


def steps_of(notes: Path, job: str) -> list[list[int]]:
    """The samples of each step of a job, over all its ranks, sorted."""
    files = sorted(notes.glob(f"{job}-*"))
    of_ranks = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in files
    ]
    num = min(len(steps) for steps in of_ranks)
    return [
        sorted(chain.from_iterable(steps[at] for steps in of_ranks))
        for at in range(num)
    ]


def jobs_of(notes: Path) -> list[str]:
    """The jobs that took notes, in their order."""
    first = {}
    for file in notes.iterdir():
        job = file.name.split("-")[0]
        began = file.stat().st_mtime
        first[job] = min(began, first.get(job, began))
    return sorted(first, key=first.__getitem__)

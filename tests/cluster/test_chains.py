"""Trainings that take several jobs: submitted once, finished in the end."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT
from .hosts import LOGIN, PREFIX, VirtualHosts, ip
from .slurm import Slurm

TRAINING = (
    *("--data", "slow_training:data", "--model", "slow_training:model"),
    *("--epochs", "4", "--global-batch-size", "8", "--precision", "fp64"),
    *("--device", "cpu", "--num-workers", "0", "--lr", "0.1"),
)
"""12 steps an epoch, 48 in all."""

PAUSE = "0.5"
"""Seconds for a sample; a rank has four in a step: 96 s in all."""

NODES = ("--nodes", "2", "--slots-per-node", "1", "--gpus-per-node", "0")
FEW = ("--cpus-per-slot", "1", "--mem", "1G", "--jobs", "9")
PYTHON = ".venv/bin/python"
STILL_SECONDS = 240
"""Longer than from a job's last step to the next job's first one."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A training that was submitted once."""

    name: str
    folder: Path
    hosts: VirtualHosts
    place: str = "runs"  # or "sweeps"
    pending: dict[str, float] = field(default_factory=dict)
    """Since when jobs have been seen to wait, by their numbers."""

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / self.name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in lines.splitlines()]

    def result(self) -> dict[str, Any]:
        file = self.folder / self.place / self.name / "result.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def said(self) -> str:
        """What its jobs printed, in their order."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.[oe][0-9]*")]
        logs = [log for log in logs if self.name in log.name]
        logs.sort(key=lambda log: log.stat().st_mtime)
        return "".join(log.read_text(errors="replace") for log in logs)

    def script(
        self,
        scheduler: str,
        *words: str,
        more: tuple[str, ...] = (),
        training: Sequence[str] = TRAINING,
    ) -> str:
        """Write the job script, as a user does; return its name."""
        name = f"{scheduler}-{self.name}.sh"
        words = ("jobscript", scheduler, "--name", self.name, *words, *FEW)
        made = self.hosts.run(
            LOGIN,
            [
                PYTHON,
                "-m",
                "mpitrain",
                *words,
                "--output",
                name,
                "--",
                *training,
                *more,
            ],
            cwd=self.folder,
        )
        assert made.returncode == 0, made.stdout
        return name

    def submit(self, *command: str, **environ: str) -> None:
        sent = self.hosts.run(LOGIN, [*command], cwd=self.folder, environ=environ)
        assert sent.returncode == 0, sent.stdout

    def jobs(self) -> list[str]:
        """The jobs of its name that wait or run; the waiting ones may start now."""
        words = ["squeue", "-h", "-n", self.name, "-o", "%i %T"]
        listed = self.hosts.run(LOGIN, words).stdout.splitlines()
        for line in listed:
            number, state = line.split()
            if state != "PENDING":
                self.pending.pop(number, None)
            elif time.monotonic() > 3 + self.pending.setdefault(
                number, time.monotonic()
            ):
                # A requeued job waits two minutes by itself. Started in the second in
                # which it has ended, slurmd takes it for the one that it has ended.
                update = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
                self.hosts.run(LOGIN, update)
        return listed

    def wait(self) -> None:
        """Wait for the last job's end; how many there are depends on the machine."""
        record = "metrics.jsonl" if self.place == "runs" else "study.journal"
        metrics = self.folder / self.place / self.name / record
        size, moved_at = 0, time.monotonic()
        while self.jobs():
            before, size = size, metrics.stat().st_size if metrics.exists() else 0
            if size != before:
                moved_at = time.monotonic()
            is_moving = time.monotonic() - moved_at < STILL_SECONDS
            assert is_moving, self.said() + self.hosts.logs()
            time.sleep(1)


@pytest.fixture
def home(folder: Path) -> Path:
    (folder / "pause").write_text(PAUSE)
    shutil.copy(Path(__file__).with_name("slow_training.py"), folder)
    return folder


def wait_until(condition: Callable[[], bool], chain: Chain) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, chain.said() + chain.hosts.logs()
        time.sleep(0.5)


def train_without_a_break(
    hosts: VirtualHosts, folder: Path, name: str, *more: str, num_ranks: int = 2
) -> list[dict[str, Any]]:
    (folder / "pause").write_text("0")
    command = [".venv/bin/mpirun", "-np", str(num_ranks), "--oversubscribe", PYTHON]
    words = ["-m", "mpitrain", "--name", name, *TRAINING, *more]
    done = hosts.run("node1", [*command, *words], cwd=folder, timeout_seconds=120)
    (folder / "pause").write_text(PAUSE)
    assert done.returncode == 0, done.stdout
    return Chain(name=name, folder=folder, hosts=hosts).rows()


def assert_same_numbers(
    found: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    both = [
        [row for row in rows if row["event"] in ("step", "epoch", "test")]
        for rows in (found, expected)
    ]
    assert len(both[0]) == len(both[1])
    for row, other in zip(*both, strict=True):
        for key, value in other.items():
            if key in ("loss", "train_loss", "val_loss"):
                assert abs(row[key] - value) <= 1e-9, (row, other)
            elif key in ("event", "step", "epoch", "val_accuracy"):
                assert row[key] == value, (row, other)


def assert_nothing_was_lost(chain: Chain) -> None:
    """Each job stopped by itself, and the next went on from that very step."""
    stopped = re.findall(r"stopped at step (\d+): ", chain.said())
    went_on = [row["step"] for row in chain.rows() if row["event"] == "resume"]
    assert [int(step) for step in stopped] == went_on


@pytest.mark.slow
def test_a_training_goes_through_several_jobs_of_slurm_and_of_pbs(
    hosts: VirtualHosts, slurm: Slurm, home: Path
) -> None:
    """Both at once: they wait most of the time."""
    # SLURM's limits are in minutes, and its signal may come half a minute early.
    twice = ("--epochs", "8")
    expected = train_without_a_break(hosts, home, "whole-twice", *twice)
    by_slurm = Chain(name="by-slurm", folder=home, hosts=hosts)
    by_qsub = Chain(name="by-qsub", folder=home, hosts=hosts)
    script = by_slurm.script("slurm", *NODES, "--time", "2:00", more=twice)
    by_slurm.submit("sbatch", script)
    script = by_qsub.script("pbs", *NODES, "--time", "2:00", more=twice)
    by_qsub.submit("qsub", script, FACE="pbs")
    for chain in (by_slurm, by_qsub):
        chain.wait()
        assert chain.result()["status"] == "finished", chain.said()
        assert chain.said().count("resuming from") >= 2, chain.said()
        assert_nothing_was_lost(chain)
        assert_same_numbers(chain.rows(), expected)
    log = (home / "runs" / by_slurm.name / "logs" / "rank-0.log").read_text()
    left = [float(it) for it in re.findall(r"the scheduler leaves (\S+) s", log)]
    assert len(left) >= 3, log
    assert all(60 < seconds <= 120 for seconds in left), left


TASKS = (
    *("language_model:build", "segmentation:build", "surrogate:build", "graphs:build"),
    *("imbalance:build", "imbalance:build_multilabel", "detection:build"),
    *("text_classification:build", "finetuning:build", "gan:build"),
    *("contrastive:build", "stream:build"),
)


SLOWER = """
import functools, time
import mpitrain
from examples.trainings.MODULE import FUNCTION

class Pause(mpitrain.Callback):
    def on_step_end(self, trainer):
        time.sleep(0.1)

@functools.wraps(FUNCTION)
def slow(*args, **values):
    trainer = FUNCTION(*args, **values)
    trainer.callbacks.append(Pause())
    return trainer
"""
"""A task that takes long enough to be stopped in the middle."""


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_own_task_goes_through_a_chain_that_is_cut(
    task: str, hosts: VirtualHosts, slurm: Slurm, folder: Path
) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    module, _, function = task.partition(":")
    slower = SLOWER.replace("MODULE", module).replace("FUNCTION", function)
    (folder / "slower.py").write_text(slower)
    chain = Chain(name=task.replace(":", "-"), folder=folder, hosts=hosts)
    training = ["--task", "slower:slow", "--device", "cpu"]
    training += ["--precision", "fp64", "--checkpoint-every-steps", "1"]
    script = chain.script("slurm", *NODES, "--time", "9:00", training=training)
    chain.submit("sbatch", script)
    checkpoints = folder / "runs" / chain.name / "checkpoints"
    wait_until(lambda: bool(chain.jobs() and [*checkpoints.glob("step-*")]), chain)
    (job,) = chain.jobs()
    hosts.run(LOGIN, ["scancel", "--full", "--signal=TERM", job.split()[0]])
    chain.wait()
    assert chain.result()["status"] == "finished", chain.said()
    assert chain.said().count("resuming from") == 1, chain.said()
    assert_nothing_was_lost(chain)
    command = [".venv/bin/mpirun", "-np", "1", PYTHON, "-m", "mpitrain"]
    command += ["--name", "whole", *training]
    done = hosts.run("node1", command, cwd=folder, timeout_seconds=200)
    assert done.returncode == 0, done.stdout
    whole = Chain(name="whole", folder=folder, hosts=hosts)
    assert_same_numbers(chain.rows(), whole.rows())


@pytest.mark.slow
def test_nothing_is_lost_at_term_and_a_chain_goes_on_unless_it_was_cancelled(
    hosts: VirtualHosts, slurm: Slurm, home: Path
) -> None:
    (home / "pause").write_text("0.2")
    chain = Chain(name="termed", folder=home, hosts=hosts)
    chain.submit("sbatch", chain.script("slurm", *NODES, "--time", "9:00"))
    for num_stops, words in ((1, ["--full", "--signal=TERM"]), (2, [])):
        begun = ("resuming from", "run folder")[num_stops == 1]
        wait_until(lambda: bool(chain.jobs()) and begun in chain.said(), chain)  # noqa: B023
        time.sleep(4)
        (job,) = chain.jobs()
        hosts.run(LOGIN, ["scancel", *words, job.split()[0]])
        stopped = re.compile(r"stopped at step \d+: SIG(USR2|TERM) arrived")
        wait_until(lambda: len(stopped.findall(chain.said())) == num_stops, chain)  # noqa: B023
    wait_until(lambda: not chain.jobs(), chain)
    steps = [row["step"] for row in chain.rows() if row["event"] == "step"]
    assert steps == sorted(set(steps)), "no step was done twice"
    assert chain.result()["status"] == "stopped", chain.said()


@pytest.mark.slow
def test_a_second_submission_of_a_training_is_refused(
    hosts: VirtualHosts, slurm: Slurm, home: Path
) -> None:
    chain = Chain(name="once", folder=home, hosts=hosts)
    script = chain.script("slurm", *NODES, "--time", "5:00")
    chain.submit("sbatch", "--begin=now+1hour", script)
    (first,) = chain.jobs()
    chain.submit("sbatch", script)  # it begins at once, and has the training
    wait_until(lambda: (home / "runs" / "once").is_dir(), chain)
    hosts.run(
        LOGIN, ["scontrol", "update", f"JobId={first.split()[0]}", "StartTime=now"]
    )
    wait_until(lambda: "has the training once already" in chain.said(), chain)
    (home / "runs" / "once" / "stop").touch()
    chain.wait()
    assert chain.said().count("node 0: node1") == 1
    assert "stop ended it: submit again to resume" in chain.said()
    assert chain.result()["status"] == "stopped", chain.said()


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_left_out_and_a_spare_one_used(
    hosts: VirtualHosts, slurm: Slurm, home: Path
) -> None:
    expected = train_without_a_break(hosts, home, "whole")
    (home / "pause").write_text("0.25")
    chain = Chain(name="hit", folder=home, hosts=hosts)
    words = ("--hang-timeout", "8", "--checkpoint-every-steps", "3")
    script = chain.script(
        "slurm", *NODES, "--spare-nodes", "1", "--time", "8:00", more=words
    )
    text = (home / script).read_text()
    assert " --jobs 9 --nodes 2 " in text
    (home / script).write_text(
        text.replace(" --jobs 9 ", " --jobs 9 --probe-seconds 80 ")
    )
    chain.submit("sbatch", script)
    try:
        checkpoints = home / "runs" / "hit" / "checkpoints"
        wait_until(lambda: any(checkpoints.glob("step-*")), chain)
        ip("-n", PREFIX + LOGIN, "link", "set", "node2", "down")
        wait_until(lambda: "resuming from" in chain.said(), chain)
        why = r"its host is lost|no answer within 40 s|mpirun ended with \d+: \w"
        assert re.search(f"left out: node2: ({why})", chain.said()), chain.said()
        wait_until(lambda: chain.result().get("status") == "finished", chain)
    finally:
        ip("-n", PREFIX + LOGIN, "link", "set", "node2", "up")
    chain.wait()  # SLURM does not let the job end before its nodes have said so
    assert chain.result()["status"] == "finished", chain.said()
    assert "node 1: node3" in chain.said()
    assert_same_numbers(chain.rows(), expected)

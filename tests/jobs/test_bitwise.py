"""With --bitwise the weights have the same bits on any number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bitwise_jobs import MODELS, Alone, digest, killed_and_resumed, runs_of, trained
from launcher import MPIS, find, slow
from resume_jobs import Runs

from mpitrain.cli import main

pytestmark = pytest.mark.usefixtures("warm_starts")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    ("model", "strategy", "mpi", "sizes", "cut_sizes"),
    [
        # Also the steps before a kill are compared: in CI no other training is needed.
        # Strategies and models are those of tests/mpi/test_bitwise.py there.
        ("convnet", "ddp", "openmpi-5", (), (3, 4)),
        ("convnet", "ddp", "mpich", (3,), ()),  # another MPI, the same bits
        *(
            slow(model, strategy, mpi, (2, 3, 4, 8), (2, 4, 3, 1))
            for model in MODELS
            for strategy in ("ddp", "fsdp")
            for mpi in MPIS
            if (model, strategy) != ("channels-last", "fsdp")
        ),
    ],
)
def test_the_weights_have_the_same_bits_on_any_number_of_ranks(
    model: str,
    strategy: str,
    mpi: str,
    sizes: tuple[int, ...],
    cut_sizes: tuple[int, ...],
    alone: Alone,
    tmp_path: Path,
) -> None:
    runs, flags = runs_of(model, find(mpi), tmp_path), ("--strategy", strategy)
    if (model, strategy) == ("bf16", "fsdp"):
        # Casts all of the model, as ddp's autocast does not: other bits than ddp's.
        expected = trained(runs, "on-1", 1, *flags)
    else:
        expected = alone(model)
    for size in sizes:
        assert trained(runs, f"on-{size}", size, *flags) == expected, size
    if cut_sizes:
        parts = [(runs, size) for size in cut_sizes]
        assert killed_and_resumed(parts, *flags) == expected


QUOTA_MICROS, PERIOD_MICROS = 4_000, 10_000  # of a fast rank: two fifths of a core


@pytest.fixture
def cpu_groups() -> Iterator[Path]:
    """A cgroup with limited processor time for each of four ranks."""
    first = Path("/sys/fs/cgroup/cpu")  # version 1
    is_old = first.is_dir()
    top = (first if is_old else Path("/sys/fs/cgroup")) / f"mpitrain-{os.getpid()}"
    groups = [top / str(rank) for rank in range(4)]
    for group in (top, *groups):
        if not is_old:
            (group.parent / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
    yield top
    for group in (*groups, top):
        for _ in range(50):  # a rank's sidecar may still be in it
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def limit(groups: Path, quotas: list[int]) -> None:
    for rank, quota in enumerate(quotas):
        group = groups / str(rank)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROS}")
        else:
            (group / "cpu.cfs_period_us").write_text(f"{PERIOD_MICROS}")
            (group / "cpu.cfs_quota_us").write_text(f"{quota}")


@pytest.mark.slow
def test_a_slow_rank_takes_fewer_micro_batches_and_the_bits_are_the_same(
    cpu_groups: Path, tmp_path: Path
) -> None:
    flags = ("--bitwise", "--model", "custom:Limited", "--micro-batch-size", "1")
    flags += ("--epochs", "6")
    runs = Runs(mpi=find("openmpi-5"), folder=tmp_path, flags=flags)
    half = [QUOTA_MICROS, QUOTA_MICROS // 2, QUOTA_MICROS, QUOTA_MICROS]
    cases: dict[str, tuple[list[int], tuple[str, ...]]] = {
        "even": ([QUOTA_MICROS] * 4, ("--balance", "off")),
        "auto": (half, ()),
        "off": (half, ("--balance", "off")),
    }
    seconds = {}
    for name, (quotas, more) in cases.items():
        limit(cpu_groups, quotas)
        done = runs.run(name, 4, *more, CPU_GROUPS=str(cpu_groups))
        assert done.status == 0, done.out + done.err
        rows = rows_of_events(runs, name)
        epochs = [row for row in rows if row["event"] == "epoch"]
        rates = [row["train_samples"] / row["samples_per_second"] for row in epochs]
        seconds[name] = statistics.median(rates[-3:])
        found = [row for row in rows if row["event"] == "balance"]
        assert bool(found) == (name == "auto")
        for row in found:
            assert sum(row["num_micro_batches"]) == 64
    assert found_counts(runs, "auto")[1] < 14
    assert digest(runs, "auto") == digest(runs, "off") == digest(runs, "even")
    assert runs.rows("auto") == runs.rows("off") == runs.rows("even")
    ideal = seconds["even"] * 4 / 3.5
    print(f"{seconds}, {seconds['auto'] / ideal:.2f} of the ideal")
    assert seconds["auto"] < 0.85 * seconds["off"]


def found_counts(runs: Runs, name: str) -> list[int]:
    rows = [row for row in rows_of_events(runs, name) if row["event"] == "balance"]
    counts: list[int] = rows[-1]["num_micro_batches"]
    return counts


def rows_of_events(runs: Runs, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in runs.record(name).read_text().splitlines()]


def test_diff_names_the_first_step_and_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diff(*names: str) -> tuple[int, str]:
        status = main(["diff", *(f"runs/{name}" for name in names)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    runs = runs_of("convnet", find("openmpi-5"), tmp_path)
    # One checkpoint of each epoch, no more: of several that wait for the disk only the
    # newest is written, and which those are depends on the time.
    rarely = ("--checkpoint-every-steps", "1000")
    flags = ("--fingerprint", "3", "--epochs", "2", *rarely)
    for name, size, more in (("a", 1, ()), ("b", 2, ()), ("c", 2, ("--seed", "2"))):
        done = runs.run(name, size, *flags, *more)
        assert done.status == 0, done.err
        assert "32 per step = 8 micro-batches of 4, on " in done.out
    monkeypatch.chdir(tmp_path)
    status, same = diff("a", "b")
    assert status == 0, same
    assert same.count("the same (") == 6
    changes = r"^environment: ranks: 1 -> 2(; threads: \d+ -> \d+)?$"  # with more cores
    assert re.search(changes, same, re.MULTILINE)
    assert "the same (30, up to step 90)" in same  # losses and weights
    status, other = diff("a", "c")
    assert status == 1
    assert "configuration: seed: 1 -> 2\n" in other
    assert "steps: step 1 differs: train_loss 2.3" in other
    assert "losses: step 3 differs: micro-batch 0 " in other
    assert "weights: step 3 differs: conv1.weight, " in other
    assert "model.pt: step 90 differs: SHA-256" in other
    newest = runs.checkpoints("b")[0] / "rank-0.bin"
    newest.write_bytes(newest.read_bytes()[:-1])
    status, broken = diff("a", "b")
    assert status == 0
    path = newest.parent.relative_to(tmp_path)
    assert f"warning: checkpoint {path} is broken: " in broken
    assert "up to step 45)\nmodel.pt: the same (" in broken
    (runs.dir("b") / "config.yaml").unlink()  # as after a script with a Trainer
    assert "configuration: not recorded\n" in diff("a", "b")[1]
    status, alone = diff("a", "nothing")
    assert status == 2
    assert "nothing is not a run folder" in alone

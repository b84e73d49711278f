"""The facts at the top of a report: losses, restarts and goodput."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import START_SECONDS, Part, make_run

from mpitrain.record.reading import Run
from mpitrain.record.supervised import Restart, record_restart
from mpitrain.tools.report.analysis import RestartCost, goodput, jobs_of, restart_costs
from mpitrain.tools.report.summary import summary


def test_a_later_job_does_not_change_what_a_restart_has_cost(tmp_path: Path) -> None:
    """The third job of the chain has waited ten hours in the queue."""
    queue = Part(world_size=2, first=391, last=500, pause_seconds=36_000)
    parts = Part(world_size=2, last=120), Part(world_size=2, first=101, last=400), queue
    costs, shares = [], []
    for num in (2, 3):
        path = make_run(tmp_path / f"{num}", parts[:num])
        fault = Restart(time=jobs_of(Run(path))[0].ended + 1.0, step=120, error="x")
        record_restart(path, fault)
        run = Run(path)
        costs += restart_costs(run, jobs_of(run))
        shares.append(goodput(run, jobs_of(run)))
    check_costs(run, costs, shares[1])
    # A restart that begins at step 0 is none of the job that resumes after it.
    rows = rows_of(path)
    first = next(i for i, row in enumerate(rows) if row["event"] == "resume")
    del rows[first]
    write_rows(path, rows)
    run = Run(path)
    (cost,) = restart_costs(run, jobs_of(run))
    assert cost == replace(costs[1], steps=120, step_seconds=cost.step_seconds)


def test_a_restart_whose_lines_a_resume_has_cut_has_not_cost_the_queue(
    tmp_path: Path,
) -> None:
    """Its job was evicted before a checkpoint; the next one has waited ten hours."""
    first = Part(world_size=2, last=120)
    begins = Part(world_size=2, first=101, last=110)
    queue = Part(world_size=2, first=101, last=400, pause_seconds=36_000)
    costs, shares = [], []
    for num in (2, 3):
        path = make_run(tmp_path / f"{num}", (first, begins, queue)[:num])
        fault = Restart(time=jobs_of(Run(path))[0].ended + 1.0, step=120, error="x")
        record_restart(path, fault)
        if num == 3:
            cut_resume(path, 1)
        run = Run(path)
        assert len(run.metrics.began) == 2
        costs += restart_costs(run, jobs_of(run))
        shares.append(goodput(run, jobs_of(run)))
    check_costs(run, costs, shares[1])


def test_a_restart_that_failed_before_its_first_checkpoint_costs_no_steps(
    tmp_path: Path,
) -> None:
    """They are counted once, at the restart that trained them again."""
    first = Part(world_size=2, last=120)
    begins = Part(world_size=2, first=101, last=110)
    path = make_run(tmp_path / "run", (first, begins, begins))
    for job in jobs_of(Run(path))[:2]:
        record_restart(path, Restart(time=job.ended + 1.0, step=120, error="x"))
    cut_resume(path, 1)
    run = Run(path)
    assert [it.steps for it in restart_costs(run, jobs_of(run))] == [0, 20]


def check_costs(run: Run, costs: list[RestartCost], share: float) -> None:
    """The restart has cost the same without the third job, and that no time of it."""
    assert [it.steps for it in costs] == [20, 20]
    assert costs[0].down_seconds == pytest.approx(costs[1].down_seconds)
    jobs = jobs_of(run)
    total = sum(job.seconds for job in jobs) + jobs[1].began - jobs[0].ended
    lost = 2 * START_SECONDS + costs[1].step_seconds + costs[1].down_seconds
    assert share == pytest.approx(1 - lost / total)


def rows_of(path: Path) -> list[dict[str, Any]]:
    text = (path / "metrics.jsonl").read_text()
    return [json.loads(it) for it in text.splitlines()]


def cut_resume(path: Path, number: int) -> None:
    """Remove the line of a job's resume, as a later resume does."""
    resumed = jobs_of(Run(path))[number].began + START_SECONDS
    rows = rows_of(path)
    write_rows(path, [it for it in rows if abs(it.get("time", 0.0) - resumed) > 1.0])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)


def facts_of(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    write_rows(path, rows)
    run = Run(path)
    return {name: it for name, it in summary(run, jobs_of(run)).items() if it}


def test_a_loss_is_of_a_validation_only_where_there_is_one(tmp_path: Path) -> None:
    path = make_run(tmp_path / "r", (Part(world_size=1, last=60),))
    rows = rows_of(path)
    steps = [row for row in rows if row["event"] == "step"]
    (epoch,) = [row for row in rows if row["event"] == "epoch"]
    facts = facts_of(path, steps)
    assert "in 1 job" in facts
    assert "last validation loss" not in facts
    assert facts["last training loss"] == f"{steps[-1]['train_loss']:.4g}"
    # Within an epoch; and a metric that no epoch has yet.
    within = epoch | {"event": "validation", "val_loss": 0.75, "val_accuracy": 0.25}
    facts = facts_of(path, [*steps[:20], within | {"step": 20}])
    assert facts["last validation loss"] == "0.75"
    assert facts["best validation accuracy"] == "25.00 %"
    facts = facts_of(path, [*steps[:50], epoch, *steps[50:], within | {"step": 60}])
    assert facts["last validation loss"] == "0.75"
    # Of a validation without a loss: that of the training.
    del epoch["val_loss"]
    facts = facts_of(path, [*steps[:50], epoch, *steps[50:]])
    assert facts["last training loss"] == "0.5"


def test_a_run_without_times_of_ranks_has_no_duration(tmp_path: Path) -> None:
    """As of a custom loop."""
    path = make_run(tmp_path / "r", (Part(world_size=1, last=60),))
    shutil.rmtree(path / "times")
    run = Run(path)
    facts = summary(run, jobs_of(run))
    assert facts["steps"] == "60"
    assert not facts["in 1 job"]

"""A user's own training by the command: every command of a training works on it."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
from pathlib import Path

import logger_files
import pytest
import torch
from example_files import own_task
from launcher import ROOT, Mpi, mpirun
from resume_jobs import Runs

from mpitrain import cli

pytestmark = pytest.mark.usefixtures("warm_starts")

TRAININGS = (
    *("language_model", "segmentation", "surrogate", "graphs", "imbalance"),
    "imbalance:build_multilabel",
    *("detection", "text_classification", "finetuning", "gan", "contrastive", "stream"),
)
OWN = ("-m", "mpitrain", "--task", "own_tasks:build", "--device", "cpu")


def of_example(name: str) -> tuple[str, ...]:
    module, _, function = name.partition(":")
    return "--task", f"examples.trainings.{module}:{function or 'build'}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_an_example_is_cut_and_resumed_on_other_ranks(
    openmpi: Mpi, name: str, tmp_path: Path
) -> None:
    flags = (
        *of_example(name),
        *("--precision", "fp64", "--checkpoint-every-steps", "1", "--device", "cpu"),
        *("--log", "csv", "tensorboard", "--keep-checkpoints", "2"),
    )
    runs = Runs(mpi=openmpi, folder=tmp_path, flags=flags)
    done = runs.run("whole", 1)
    assert done.status == 0, done.out + done.err
    job = runs.start("cut", 3)
    job.wait_until(lambda: runs.newest("cut") >= 3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.end() != 0
    done = runs.run("cut", 2)
    assert done.status == 0, done.out + done.err
    assert runs.resumed_at("cut")
    runs.assert_close("cut", "whole", 1e-9)
    assert (runs.dir("cut") / "metrics.csv").exists()
    assert runs.weights("cut").keys() == runs.weights("whole").keys()


OBJECTIVES = {"detection": "max:map", "segmentation": "max:miou", "gan": "min:distance"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_an_example_is_swept_logged_and_reported(
    openmpi: Mpi, name: str, tmp_path: Path
) -> None:
    metric = OBJECTIVES.get(name, "min:loss")
    space = f"metric: {metric}\nsampler: grid\nspace:\n  seed: {{int: [1, 6]}}\n"
    (tmp_path / "space.yaml").write_text(space)
    flags = (*of_example(name), "--device", "cpu")
    log = ("--log", "csv", "tensorboard", "mlflow", "--log-every-steps", "1")
    words = ("-m", "mpitrain", "sweep", "space.yaml", "--", *flags, *log)
    done = mpirun(openmpi, 3, *words, cwd=tmp_path, timeout_seconds=500)
    assert done.status == 0, done.out + done.err
    assert "6/6 trials: 6 finished" in done.out
    sweep = tmp_path / "sweeps/space"
    runs = logger_files.from_mlflow(tmp_path)
    assert sorted(run["name"] for run in runs) == sorted(
        it.name for it in sweep.glob("trial-*")
    )
    for run in runs:
        folder, points = sweep / run["name"], logger_files.from_csv(sweep / run["name"])
        assert run["status"] == "FINISHED"
        assert run["points"].keys() == points.keys()
        for known, values in points.items():
            shown = run["points"][known]
            assert len(shown) == len(values)
            assert known.startswith("throughput") or shown == values
        assert logger_files.from_tensorboard(folder).keys() == points.keys()
    for folder in (sweep, sweep / "trial-0000"):
        words = ("-m", "mpitrain", "report", str(folder))
        done = mpirun(openmpi, 1, *words, cwd=tmp_path)
        assert done.status == 0, done.err
    words = ("-m", "mpitrain", *flags, "--name", "alone", "--seed", "1")
    done = mpirun(openmpi, 1, *words, cwd=tmp_path, OMP_NUM_THREADS="1")  # as a trial
    assert done.status == 0, done.out + done.err
    for trial, status in (("trial-0000", 0), ("trial-0001", 1)):
        words = ("-m", "mpitrain", "diff", "runs/alone", str(sweep / trial))
        done = mpirun(openmpi, 1, *words, cwd=tmp_path)
        assert done.status == status, done.out + done.err
    page = (sweep / "report.html").read_text()
    assert metric.partition(":")[2] in page
    page = (sweep / "trial-0000/report.html").read_text()
    for known in points:
        kind, _, last = known.partition("/")
        if kind == "val" and last != "loss":
            assert f"Validation {last}" in page


@pytest.mark.slow
def test_arguments_are_recorded_and_may_not_change_on_resume(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = (*OWN, "--name", "a", "--task.hidden-size", "5")
    done = mpirun(openmpi, 2, *words, "--dry-run", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "--task own_tasks:build: 50 samples to train, 13 to validate" in done.out
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    state = torch.load(tmp_path / "runs/a/model.pt")
    assert state["0.weight"].shape == (5, 4)
    words = (*OWN, "--name", "a", "--task.hidden-size", "6")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 2
    assert "task.hidden_size: 5 -> 6" in done.err
    done = mpirun(openmpi, 1, "-m", "mpitrain", "report", "runs/a", cwd=tmp_path)
    assert done.status == 0, done.err


def test_an_import_that_trains_is_an_error_at_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("-m", "mpitrain", "--task", "own_script:build", "--device", "cpu")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path, timeout_seconds=60)
    assert done.status == 2
    assert done.err.count("was called while the module of --task was imported") == 1


def test_callbacks_of_the_user_are_kept(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("-m", "mpitrain", "--task", "own_tasks:with_lines", "--device", "cpu")
    done = mpirun(openmpi, 1, *words, cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("an epoch of mine") == 3
    assert done.out.count("| train_loss") == 3


def test_a_task_has_the_model_and_the_data_of_the_command(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = (
        "-m",
        "mpitrain",
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--precision",
        "fp64",
    )
    task = ("--task", "own_tasks:Smooth", "--task.smoothing", "0.1")
    done = mpirun(openmpi, 2, *words, *task, "--name", "task", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "convnet on digits: 1437 samples" in done.out
    flag = ("--label-smoothing", "0.1", "--name", "flag")
    assert mpirun(openmpi, 2, *words, *flag, cwd=tmp_path).status == 0
    mine, its = (torch.load(tmp_path / f"runs/{n}/model.pt") for n in ("task", "flag"))
    for name, weight in mine.items():
        torch.testing.assert_close(weight, its[name], rtol=1e-9, atol=1e-12)


def test_the_page_trains_and_exports(
    openmpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/howto/own-task.md").read_text()
    (tmp_path / "mine.py").write_text(own_task())
    commands = re.findall(r"^    (?:mpirun.*|python) -m mpitrain (.*)$", page, re.M)
    first = next(it for it in commands if it.startswith("--task"))
    for expected in ("finished: val_mae", "Nothing to do"):
        done = mpirun(openmpi, 2, "-m", "mpitrain", *first.split(), cwd=tmp_path)
        assert done.status == 0, done.out + done.err
        assert expected in done.out
        assert "has no effect" not in done.out + done.err
    export = next(it for it in commands if it.startswith("export"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(export.split()) == 0
    model = runpy.run_path("mine.py")["build"](width=64).model
    model.load_state_dict(torch.load("best.pt"))


@pytest.mark.slow
def test_a_sweep_varies_the_arguments(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(
        "metric: min:loss\nsampler: grid\nspace:\n"
        "  task.hidden_size: [2, 4, 8]\n  lr: [0.01, 0.05]\n"
    )
    words = ("sweep", "space.yaml", "--", *OWN[2:], "--epochs", "1")
    done = mpirun(openmpi, 2, "-m", "mpitrain", *words, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "6/6 trials: 6 finished" in done.out
    shapes = set()
    for run in (tmp_path / "sweeps/space").glob("trial-*"):
        shapes.add(len(torch.load(run / "model.pt")["0.weight"]))
        assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert shapes == {2, 4, 8}
    words = ("-m", "mpitrain", "sweep", "--best", "space")
    done = mpirun(openmpi, 1, *words, cwd=tmp_path)
    assert "--task own_tasks:build" in done.out
    assert "--task.hidden-size" in done.out
    (tmp_path / "wrong.yaml").write_text("space:\n  task.hiden_size: [2, 4]\n")
    words = ("-m", "mpitrain", "sweep", "wrong.yaml", "--", *OWN[2:])
    done = mpirun(openmpi, 1, *words, cwd=tmp_path)
    assert done.status == 2
    assert "Did you mean 'task.hidden_size'" in done.err
    (tmp_path / "wrong.yaml").write_text("space:\n  hidden_size: [2, 4]\n")
    done = mpirun(openmpi, 1, *words, cwd=tmp_path)
    assert "Did you mean 'task.hidden_size'" in done.err

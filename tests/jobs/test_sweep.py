"""Sweeps in whole jobs: what the trials come to, and how they and the job end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from launcher import Done, Mpi, environment, mpirun, slow, supervise
from resume_jobs import rows_of

from mpitrain.cli import main

pytestmark = pytest.mark.usefixtures("warm_starts")

FLAGS = ("--model", "sweep_models:Net", "--epochs", "2", "--global-batch-size", "144")


def write_space(folder: Path, text: str) -> str:
    (folder / "space.yaml").write_text(text)
    return "space.yaml"


def sweep(
    mpi: Mpi,
    num_ranks: int,
    folder: Path,
    *words: str,
    flags: Sequence[str] = FLAGS,
    **variables: str,
) -> Done:
    words = ("-m", "mpitrain", "sweep", *words, "--", "--device", "cpu", *flags)
    return mpirun(mpi, num_ranks, *words, cwd=folder, timeout_seconds=120, **variables)


def models(*names: str) -> str:
    listed = ", ".join(f"'sweep_models:{name}'" for name in names)
    return f"sampler: grid\nspace:\n  model: [{listed}]\n"


def trials_of(folder: Path, name: str = "space") -> list[Any]:
    """As Optuna itself loads them."""
    backend = optuna.storages.journal.JournalFileBackend(
        str(folder / "sweeps" / name / "study.journal")
    )
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name="sweep", storage=storage).trials


def result_of(folder: Path, name: str = "space") -> dict[str, Any]:
    found = json.loads((folder / "sweeps" / name / "result.json").read_text())
    assert isinstance(found, dict)
    return found


def alone(mpi: Mpi, folder: Path, trial: str, num_ranks: int, *flags: str) -> Path:
    """Train what a trial has trained, by the command line."""
    words = ("-m", "mpitrain", "--device", "cpu", "--name", trial, *FLAGS, *flags)
    # On fewer ranks each would have more threads, which changes the last bits.
    done = mpirun(mpi, num_ranks, *words, cwd=folder, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err
    return folder / "runs" / trial


def test_each_trial_is_the_run_that_its_command_makes(
    openmpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    space = write_space(
        tmp_path, "sampler: grid\nspace:\n  lr: [0.05, 0.2]\n  ranks: [1, 2]\n"
    )
    done = sweep(openmpi, 3, tmp_path, space, OMP_NUM_THREADS="1")
    assert done.status == 0, done.out + done.err
    assert "finished: 4/4 trials: 4 finished | best trial-000" in done.out
    assert "samples/s" not in done.out  # what a trial prints is in its log
    trials = trials_of(tmp_path)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4
    for number in (0, 3):  # of one rank, and of two
        values = trials[number].user_attrs["values"]
        flags = ("--lr", str(values["lr"]))
        name = f"trial-{number:04}"
        run_dir = alone(openmpi, tmp_path, name, values["ranks"], *flags)
        trial_dir = tmp_path / "sweeps" / "space" / name
        assert rows_of(trial_dir) == rows_of(run_dir)
        assert len(rows_of(run_dir)) == 2 * (10 + 1)
        log = (trial_dir / "logs" / "rank-0.log").read_text()
        assert "samples/s" in log
        (last,) = trials[number].values
        assert last == rows_of(run_dir)[-1]["val_accuracy"]
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--best", "space"]) == 0
    said = capsys.readouterr().out
    assert re.match(r"mpirun -np \d python -m mpitrain --device cpu .* --lr 0", said)
    assert main(["watch", "sweeps/space"]) == 0
    assert "4/4 trials: 4 finished | best trial-000" in capsys.readouterr().out
    assert main(["report", "sweeps/space"]) == 0
    page = (tmp_path / "sweeps" / "space" / "report.html").read_text()
    assert page.count("<img ") == 3
    assert "trial-0003" in page


def test_a_trial_that_fails_costs_itself_alone(mpi: Mpi, tmp_path: Path) -> None:
    """And no restart of the sweep."""
    failing = ("Raises", "Exits", "NotFinite", "RaisesInValidation")
    space = write_space(tmp_path, models("Net", *failing))
    words = ("-m", "mpitrain", "sweep", space, "--ranks-per-trial", "2")
    words = (*words, "--", "--device", "cpu", *FLAGS)
    done = supervise(mpi, tmp_path, ["--restarts", "2"], *words, num_ranks=4)
    assert done.status == 0, done.out + done.err
    assert "supervise: restart" not in done.err
    trials = trials_of(tmp_path)
    said = {
        "Raises": r"\[rank \d/4 \S+\] ArithmeticError: this is the fault$",
        "Exits": r"\[rank \d/4 \S+\] SystemExit: no more$",
        "NotFinite": r"NonFiniteError: ",
        "RaisesInValidation": r"ArithmeticError: this is the fault in the validation$",
    }
    assert len(trials) == 5
    for trial in trials:
        name = trial.params["model"].removeprefix("sweep_models:")
        if name == "Net":
            assert trial.state.name == "COMPLETE"
            continue
        assert trial.state.name == "FAIL"
        assert re.search(said[name], trial.user_attrs["error"]), trial.user_attrs
        folder = tmp_path / "sweeps" / "space" / f"trial-{trial.number:04}"
        assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    assert done.out.count(" failed: ") == 4


def test_a_killed_rank_ends_the_job_and_the_next_goes_on(
    openmpi: Mpi, tmp_path: Path
) -> None:
    space = write_space(tmp_path, models("Net", "KillsOnce") + "  lr: [0.1, 0.2]\n")
    words = (space, "--ranks-per-trial", "2")
    done = sweep(openmpi, 2, tmp_path, *words)
    assert done.status != 0
    assert "died without an error message (killed" in done.err
    finished = [t.number for t in trials_of(tmp_path) if t.state.name == "COMPLETE"]
    assert finished == [0, 1]
    done = sweep(openmpi, 2, tmp_path, *words)
    assert done.status == 0, done.out + done.err
    assert "2/4 trials: 2 finished" in done.out
    assert "1 begun before" in done.out
    assert [t.state.name for t in trials_of(tmp_path)] == ["COMPLETE"] * 4
    # Both models train alike, and only the second was killed.
    whole, cut = (tmp_path / "sweeps/space" / f"trial-000{it}" for it in (0, 2))
    assert rows_of(cut) == rows_of(whole)


@pytest.mark.slow
def test_a_trial_that_ends_each_job_is_given_up(openmpi: Mpi, tmp_path: Path) -> None:
    space = write_space(tmp_path, models("Kills", "Net"))
    statuses = [sweep(openmpi, 1, tmp_path, space).status for _ in range(4)]
    assert [status != 0 for status in statuses] == [True, True, True, False]
    failed, finished = trials_of(tmp_path)
    assert failed.user_attrs["error"] == "3 jobs have died in its first epoch"
    assert finished.state.name == "COMPLETE"


@pytest.mark.parametrize(
    "how", ["USR2", slow("TERM"), slow("idle"), slow("file"), slow("hours")]
)
def test_a_sweep_that_is_stopped_resumes(
    openmpi: Mpi, tmp_path: Path, how: str
) -> None:
    """Also the trials that run, which write checkpoints."""
    space = write_space(tmp_path, "sampler: grid\nspace:\n  lr: [0.05, 0.1, 0.2]\n")
    more = ("--hours", "0.006") if how == "hours" else ()
    words = ("-m", "mpitrain", "sweep", space, "--ranks-per-trial", "2", *more, "--")
    flags = ("--device", "cpu", *FLAGS, "--global-batch-size", "36", "--epochs", "3")
    num_ranks = "5" if how == "idle" else "4"
    command = [str(openmpi.mpirun), "-np", num_ranks, *openmpi.flags, sys.executable]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [*command, *words, *flags],
            cwd=tmp_path,
            env=environment(openmpi, PACE="0.1"),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        record = tmp_path / "sweeps" / "space" / "trial-0000" / "metrics.jsonl"
        end = time.monotonic() + 60
        while not record.exists() or '"epoch": 1' not in record.read_text():
            assert time.monotonic() < end, (tmp_path / "out").read_text()
            time.sleep(0.1)
        if how == "file":
            (tmp_path / "sweeps" / "space" / "stop").write_text("")
        elif how == "TERM":
            lock = (tmp_path / "sweeps" / "space" / ".lock").read_text()
            os.kill(int(lock.split()[1]), signal.SIGTERM)
        elif how == "idle":
            log = tmp_path / "sweeps" / "space" / "logs" / "rank-4.log"
            os.kill(int(log.read_text().split()[1]), signal.SIGTERM)
        elif how == "USR2":
            process.send_signal(signal.SIGUSR2)
        status = process.wait(60)
    said = (tmp_path / "out").read_text()
    assert status == 75, said
    assert "the same command resumes from here" in said
    assert result_of(tmp_path)["status"] == "stopped"
    done = sweep(openmpi, 4, tmp_path, *words[3:-1], flags=flags[2:])
    assert done.status == 0, done.out + done.err
    assert re.search("[123] begun before", done.out)  # by the speed of the machine
    assert [t.state.name for t in trials_of(tmp_path)] == ["COMPLETE"] * 3
    more = ("--lr", "0.05", *flags[-4:])
    run_dir = alone(openmpi, tmp_path, "trial-0000", 2, *more)
    assert rows_of(record.parent) == rows_of(run_dir)


def test_bad_trials_are_pruned(openmpi: Mpi, tmp_path: Path) -> None:
    space = write_space(
        tmp_path,
        "metric: max:accuracy\nsampler: grid\n"
        "pruner: {name: median, n_startup_trials: 2}\n"
        "space:\n  lr: [0.1, 0.08, 1e-6, 1e-7, 0.09]\n",
    )
    flags = ("--data", "synthetic", "--image-size", "8", "--model", "convnet")
    flags = (*flags, "--epochs", "6", "--synthetic-samples", "512")
    done = sweep(openmpi, 2, tmp_path, space, flags=(*flags, "--optimizer", "adam"))
    assert done.status == 0, done.out + done.err
    trials = trials_of(tmp_path)
    states = {trial.params["lr"]: trial.state.name for trial in trials}
    assert states[1e-7] == "PRUNED"
    assert states[0.1] == states[0.08] == "COMPLETE"
    (pruned,) = (trial for trial in trials if trial.params["lr"] == 1e-7)
    assert 1 <= len(pruned.intermediate_values) < 6
    run_dir = tmp_path / "sweeps" / "space" / f"trial-{pruned.number:04}"
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "stopped"
    assert "pruned after epoch" in result["stopped"]


@pytest.mark.slow
def test_trials_share_the_data_set(openmpi: Mpi, tmp_path: Path) -> None:
    """Held once per node: by all ranks, in all trials."""
    space = write_space(tmp_path, "sampler: grid\nspace:\n  seed: [1, 2]\n")
    flags = ("--data", "synthetic", "--image-size", "8", "--epochs", "1")
    flags += ("--model", "sweep_models:Mapped")
    done = sweep(openmpi, 2, tmp_path, space, "--ranks-per-trial", "2", flags=flags)
    assert done.status == 0, done.out + done.err
    logs = (tmp_path / "sweeps" / "space").glob("trial-*/logs/rank-*.log")
    said = [re.findall(r"^inodes (.+)$", log.read_text(), re.M) for log in logs]
    assert len(said) == 4
    assert all(found == said[0] for found in said)
    assert len(said[0][0].split()) == 4  # inputs and labels, to train and to validate


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_a_function_is_a_space_and_its_error_ends_the_job(
    openmpi: Mpi, tmp_path: Path, num_ranks: int
) -> None:
    if num_ranks == 2:
        done = sweep(openmpi, 2, tmp_path, "sweep_models:space", "--trials", "3")
        assert done.status == 0, done.out + done.err
        assert len(trials_of(tmp_path)) == 3
    done = sweep(
        openmpi, num_ranks, tmp_path, "sweep_models:broken_space", "--trials", "3"
    )
    assert done.status == 1
    assert done.err.count("ZeroDivisionError: the space is broken") == 2  # and a trace


def test_a_mistake_in_the_flags_is_said_by_the_first_trial(
    openmpi: Mpi, tmp_path: Path
) -> None:
    space = write_space(tmp_path, "space:\n  lr: {uniform: [-2, -1]}\n")
    done = sweep(openmpi, 2, tmp_path, space)
    assert done.status == 2
    assert done.err.count("trial-000") == 1
    assert "--lr must be at least 0, found -1." in done.err


@pytest.mark.slow
def test_a_metric_that_no_validation_has_is_said_after_the_first(
    openmpi: Mpi, tmp_path: Path
) -> None:
    space = write_space(tmp_path, "metric: max:f2\nspace:\n  lr: [0.1, 0.2]\n")
    done = sweep(openmpi, 2, tmp_path, space)
    assert done.status == 2
    expected = "names the metric 'f2'; expected one of the validation: loss, accuracy"
    assert done.err.count(expected) == 1
    rows = (tmp_path / "sweeps/space/trial-0000/metrics.jsonl").read_text()
    assert rows.count('"event": "epoch"') <= 1


@pytest.mark.slow
def test_an_idle_rank_sleeps_and_a_hang_is_reported(
    openmpi: Mpi, tmp_path: Path
) -> None:
    space = write_space(tmp_path, models("Hangs"))
    flags = (*FLAGS, "--hang-timeout", "8")
    words = (space, "--ranks-per-trial", "2")
    done = sweep(openmpi, 3, tmp_path, *words, flags=flags)
    assert done.status == 76, done.err
    stack = r"did not arrive:\s+rank 1 .*(time\.sleep|sweep_models\.py)"
    assert re.search(stack, done.err), done.err
    assert re.search(r"rank 2 \S+: asleep until others have done their", done.err)

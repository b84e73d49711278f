"""Sweeps whose trials are runs of a script of the user's."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launcher import Done, Mpi, environment, mpirun
from resume_jobs import rows_of
from test_sweep import result_of, trials_of, write_space

pytestmark = pytest.mark.usefixtures("warm_starts")

SCRIPT = str(Path(__file__).with_name("sweep_script.py"))
RUN = ("--", "run", "--device", "cpu", SCRIPT, "--out", "{dir}")


# Beside others each rank would have fewer threads, which changes the last bits.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def sweep(
    mpi: Mpi, num_ranks: int, folder: Path, *words: str, **variables: str
) -> Done:
    words = ("-m", "mpitrain", "sweep", "space.yaml", *words)
    return mpirun(mpi, num_ranks, *words, cwd=folder, **variables)


def alone(mpi: Mpi, folder: Path, num_ranks: int, *flags: str) -> Path:
    """Run the script as a trial has run it, by `run`."""
    run_dir = folder / "runs" / "alone"
    words = ("-m", "mpitrain", "run", "--device", "cpu", SCRIPT, "--out", str(run_dir))
    done = mpirun(mpi, num_ranks, *words, *flags, cwd=folder, **ONE_THREAD)
    assert done.status == 0, done.err
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_each_trial_is_the_run_of_its_script(
    openmpi: Mpi, tmp_path: Path, num_ranks: int
) -> None:
    ranks = min(num_ranks, 2)
    write_space(
        tmp_path,
        "metric: min:loss\nsampler: grid\nspace:\n  lr: [0.01, 0.05, 0.1]\n"
        f"  hidden_size: 3\n  ranks: {ranks}\n",
    )
    done = sweep(openmpi, num_ranks, tmp_path, *RUN, **ONE_THREAD)
    assert done.status == 0, done.out + done.err
    assert "finished: 3/3 trials: 3 finished | best trial-000" in done.out
    assert "--hidden_size 3" in done.out
    assert "the script trains" not in done.out
    assert "val_loss" not in done.out
    trial = trials_of(tmp_path)[-1]
    flags = ("--lr", str(trial.params["lr"]), "--hidden_size", "3")
    run_dir = alone(openmpi, tmp_path, ranks, *flags)
    trial_dir = tmp_path / "sweeps" / "space" / f"trial-{trial.number:04}"
    assert rows_of(trial_dir) == rows_of(run_dir)
    assert trial.values == [rows_of(run_dir)[-1]["val_loss"]]
    model, expected = (torch.load(it / "model.pt") for it in (trial_dir, run_dir))
    assert (trial_dir / "whole.pt").exists()  # pickled
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    log = (trial_dir / "logs" / "rank-0.log").read_text()
    assert f"the script trains well {ranks}" in log
    for command in ("sweep --best space", "watch sweeps/space", "report sweeps/space"):
        words = [sys.executable, "-m", "mpitrain", *command.split()]
        said = subprocess.check_output(
            words, cwd=tmp_path, env=environment(), text=True
        )
        if "--best" in command:
            start, lr = f"mpirun -np {ranks} python -m mpitrain run ", r"--lr 0\.\d+"
            script = re.escape(shlex.quote(SCRIPT))
            out = r"--out runs/space-trial-000\d"
            best = f"{start}--device cpu {script} {out} {lr} --hidden_size 3\n"
            assert re.fullmatch(best, said), said
        elif "watch" in command:
            assert "3/3 trials: 3 finished | best trial-000" in said
    assert (tmp_path / "sweeps" / "space" / "report.html").exists()


def test_a_script_that_fails_costs_its_trial_alone(
    openmpi: Mpi, tmp_path: Path
) -> None:
    expected = {
        "raises": r"\[rank \d/4 \S+\] ArithmeticError: this is the fault$",
        "exits": r"\[rank \d/4 \S+\] SystemExit: no more$",
        "not_finite": "NonFiniteError: ",
        "twice": r"the script trains a second time; expected one Trainer\.fit",
        "no_trainer": r"sweep_script\.py has ended without a training by an mpitrain",
        "no_validation": "ended without a validation of an mpitrain|expected one of",
    }
    hows = ["''", *expected, "no_record", "checkpointer", "recorder", "no_init"]
    write_space(
        tmp_path,
        f"metric: min:loss\nsampler: grid\nspace:\n  how: [{', '.join(hows)}]\n",
    )
    done = sweep(openmpi, 4, tmp_path, "--ranks-per-trial", "2", *RUN)
    assert done.status == 0, done.out + done.err
    trials = {trial.params["how"]: trial for trial in trials_of(tmp_path)}
    assert len(trials) == len(hows)
    for how, trial in trials.items():
        if how in expected:
            assert trial.state.name == "FAIL", how
            assert re.search(expected[how], trial.user_attrs["error"]), trial.user_attrs
        else:
            assert trial.state.name == "COMPLETE", trial.user_attrs
            assert trial.values == trials[""].values
        folder = tmp_path / "sweeps" / "space" / f"trial-{trial.number:04}"
        status = json.loads((folder / "result.json").read_text())["status"]
        finished = how not in expected or how == "twice"
        assert status == ("finished" if finished else "failed"), how


@pytest.mark.slow
def test_bad_scripts_are_pruned(openmpi: Mpi, tmp_path: Path) -> None:
    write_space(
        tmp_path,
        "metric: min:loss\nsampler: grid\n"
        "pruner: {name: median, n_startup_trials: 2}\n"
        "space:\n  how: [recorder, no_record]\n  lr: [0.05, 0.04, 1e-6, 1e-7]\n",
    )
    done = sweep(openmpi, 2, tmp_path, *RUN, "--epochs", "6")
    assert done.status == 0, done.out + done.err
    trials = trials_of(tmp_path)
    pruned = [trial for trial in trials if trial.state.name == "PRUNED"]
    assert {trial.params["how"] for trial in pruned} == {"recorder", "no_record"}
    assert all(trial.params["lr"] < 1e-3 for trial in pruned)
    for trial in pruned:
        folder = tmp_path / "sweeps" / "space" / f"trial-{trial.number:04}"
        result = json.loads((folder / "result.json").read_text())
        assert result["status"] == "stopped"
        assert "pruned after epoch" in result["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"), [("''", "USR2"), ("no_record", "USR2"), ("''", "hours")]
)
def test_scripts_that_are_stopped_resume(
    openmpi: Mpi, tmp_path: Path, how: str, reason: str
) -> None:
    """From their checkpoints; without a Checkpointer they begin again."""
    write_space(
        tmp_path,
        f"metric: min:loss\nsampler: grid\nspace:\n  how: {how}\n"
        "  lr: [0.01, 0.05, 0.1]\n",
    )
    hours = ("--hours", "0.007") * (reason == "hours")
    words = ("--ranks-per-trial", "2", *RUN)
    command = [str(openmpi.mpirun), "-np", "4", *openmpi.flags, sys.executable]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [*command, "-m", "mpitrain", "sweep", "space.yaml", *hours, *words],
            cwd=tmp_path,
            env=environment(openmpi, PACE="1", **ONE_THREAD),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        progress = tmp_path / "sweeps" / "space" / "progress.json"
        end = time.monotonic() + 60
        while reason == "USR2":
            if progress.exists() and "epoch 1 done" in progress.read_text():
                process.send_signal(signal.SIGUSR2)
                break
            assert time.monotonic() < end, (tmp_path / "out").read_text()
            time.sleep(0.1)
        status = process.wait(60)
    said = (tmp_path / "out").read_text()
    assert status == 75, said
    assert "the same command resumes from here" in said
    assert result_of(tmp_path)["status"] == "stopped"
    trial_dir = tmp_path / "sweeps" / "space" / "trial-0000"
    result = json.loads((trial_dir / "result.json").read_text())
    assert result["status"] == "stopped", result
    done = sweep(openmpi, 4, tmp_path, *words, **ONE_THREAD)
    assert done.status == 0, done.out + done.err
    assert re.search("[123] begun before", done.out)
    trials = trials_of(tmp_path)
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
    run_dir = alone(openmpi, tmp_path, 2, "--lr", "0.01")
    assert trials[0].values == [rows_of(run_dir)[-1]["val_loss"]]
    result = json.loads((trial_dir / "result.json").read_text())
    assert (result["status"], result.get("stopped")) == ("finished", None)
    if how != "no_record":
        assert rows_of(trial_dir) == rows_of(run_dir)
        assert '"event": "resume"' in (trial_dir / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_script_whose_rank_was_killed_resumes(openmpi: Mpi, tmp_path: Path) -> None:
    write_space(
        tmp_path, "metric: min:loss\nsampler: grid\nspace:\n  how: kills_once\n"
    )
    words = ("--ranks-per-trial", "2", *RUN)
    done = sweep(openmpi, 2, tmp_path, *words, **ONE_THREAD)
    assert done.status != 0
    assert "died without an error message (killed" in done.err
    failed = result_of(tmp_path)
    assert failed["status"] == "failed", failed
    done = sweep(openmpi, 2, tmp_path, *words, **ONE_THREAD)
    assert done.status == 0, done.out + done.err
    (trial,) = trials_of(tmp_path)
    run_dir = alone(openmpi, tmp_path, 2)
    assert trial.values == [rows_of(run_dir)[-1]["val_loss"]]
    trial_dir = tmp_path / "sweeps" / "space" / "trial-0000"
    assert rows_of(trial_dir) == rows_of(run_dir)


def test_a_wrong_flag_of_a_script_ends_the_sweep(openmpi: Mpi, tmp_path: Path) -> None:
    write_space(tmp_path, "metric: min:loss\nspace:\n  hidden-size: [1, 2]\n")
    done = sweep(openmpi, 1, tmp_path, *RUN)
    assert done.status == 2
    assert "unrecognized arguments: --hidden-size" in done.err
    assert done.err.count("sweep_script.py ended with status 2, as argparse") == 1
    assert "died without" not in done.err

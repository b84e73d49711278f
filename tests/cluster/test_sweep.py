"""Sweeps over two hosts, and through several jobs of SLURM and of PBS."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import optuna
import pytest
from resume_jobs import rows_of

from .hostfile import mpirun
from .hosts import VirtualHosts
from .slurm import Slurm
from .test_chains import NODES, PAUSE, TRAINING, Chain, train_without_a_break
from .test_data_files import OWN

SPACE = """
sampler: grid
space:
  model: ["sweep_models:KillsOnce", "sweep_models:Raises", "sweep_models:Net"]
  ranks: {choices: [2, 4], if: {model: "sweep_models:Net"}}
  seed: {int: [1, 14], if: {model: "sweep_models:Net"}}
"""

FLAGS = ("--device", "cpu", "--global-batch-size", "144", "--epochs", "2")


def sweep(hosts: VirtualHosts, folder: Path, *words: str) -> tuple[int, str]:
    """Run on four ranks of each of the first two hosts."""
    done = mpirun(
        hosts,
        folder,
        hosts.names[:2],
        slots=4,
        words=["sweep", *words],
        flags=["--bind-to", "none", "-x", f"PYTHONPATH={OWN}", "-x", "PACE=0.1"],
        timeout_seconds=400,
    )
    return done.returncode, done.stdout


def trials_of(path: Path) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(str(path / "study.journal"))
    storage = optuna.storages.JournalStorage(backend)
    return optuna.load_study(study_name="sweep", storage=storage).trials


@pytest.mark.slow
def test_thirty_trials_of_two_and_four_ranks_keep_two_hosts_busy(
    hosts: VirtualHosts, folder: Path
) -> None:
    (folder / "space.yaml").write_text(SPACE)
    words = ("space.yaml", "--ranks-per-trial", "2", "--", *FLAGS)
    status, said = sweep(hosts, folder, *words)
    assert status != 0
    assert "died without an error message (killed" in said
    status, said = sweep(hosts, folder, *words)
    assert status == 0, said
    assert "begun before" in said
    path = folder / "sweeps" / "space"
    trials = trials_of(path)
    assert [trial.state.name for trial in trials].count("COMPLETE") == 29
    (failed,) = (trial for trial in trials if trial.state.name == "FAIL")
    assert "ArithmeticError: this is the fault" in failed.user_attrs["error"]
    progress = json.loads((path / "progress.json").read_text())
    assert progress["busy_share"] >= 0.95, progress
    chosen = [trials[0], trials[5], trials[29]]
    assert sorted(t.params.get("ranks", 2) for t in chosen) == [2, 2, 4]
    for trial in chosen:
        values = trial.user_attrs["values"]
        flags = ["--model", values["model"], "--seed", str(values.get("seed", 1))]
        name = f"trial-{trial.number:04}"
        done = mpirun(
            hosts,
            folder,
            hosts.names[:1],
            slots=values.get("ranks", 2),
            words=["--name", name, *FLAGS, *flags],
            flags=["--bind-to", "none", "-x", f"PYTHONPATH={OWN}"],
        )
        assert done.returncode == 0, done.stdout
        assert rows_of(path / name) == rows_of(folder / "runs" / name)


@pytest.mark.slow
def test_a_sweep_goes_through_several_jobs_of_slurm_and_of_pbs(
    hosts: VirtualHosts, slurm: Slurm, folder: Path
) -> None:
    """Both at once; eight trials of some 45 s, on two ranks."""
    (folder / "pause").write_text(PAUSE)
    shutil.copy(Path(__file__).with_name("slow_training.py"), folder)
    space = "sampler: grid\nspace:\n  seed: {int: [1, 8]}\n"
    (folder / "space.yaml").write_text(space)
    few = ("--epochs", "1")
    chains = [
        Chain(name=name, folder=folder, hosts=hosts, place="sweeps")
        for name in ("by-slurm", "by-qsub")
    ]
    for chain, kind in zip(chains, ("slurm", "pbs"), strict=True):
        training = ["sweep", "space.yaml", "--", *TRAINING, *few]
        script = chain.script(kind, *NODES, "--time", "2:00", training=training)
        if kind == "slurm":
            chain.submit("sbatch", script)
        else:
            chain.submit("qsub", script, FACE="pbs")
    for chain in chains:
        chain.wait()
        path = folder / "sweeps" / chain.name
        assert chain.result()["status"] == "finished", chain.said()
        assert chain.said().count("the same command resumes from here") >= 1
        assert [it.state.name for it in trials_of(path)] == ["COMPLETE"] * 8
        cut = [
            trial
            for trial in sorted(path.glob("trial-*"))
            if '"event": "resume"' in (trial / "metrics.jsonl").read_text()
        ]
        assert cut, chain.said()
        seed = str(int(cut[0].name[-4:]) + 1)
        name = f"{chain.name}-{seed}"
        train_without_a_break(hosts, folder, name, *few, "--seed", seed, num_ranks=1)
        assert rows_of(cut[0]) == rows_of(folder / "runs" / name)

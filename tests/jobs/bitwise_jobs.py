"""Trainings with --bitwise, and what shall be the same in all of them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from launcher import Mpi, find
from resume_jobs import Runs

SMALL = ("--data", "synthetic", "--image-size", "32", "--synthetic-samples", "72")
# Instead of OFTEN: three kills, each after a new checkpoint, leave a step to train.
SMALL += ("--epochs", "3", "--checkpoint-every-steps", "1")
MODELS: dict[str, tuple[str, ...]] = {
    "convnet": ("--epochs", "2"),
    "transformer": ("--model", "custom:Attention", "--epochs", "1"),
    "resnet": (*SMALL, "--model", "resnet18"),
    "channels-last": (
        *(*SMALL, "--model", "resnet18"),
        *("--channels-last", "always", "--clip-grad-norm", "0.1"),
    ),
    "bf16": ("--model", "custom:Attention", "--precision", "bf16", "--epochs", "1"),
}
OFTEN = ("--checkpoint-every-steps", "3", "--global-batch-size", "32")

Found: TypeAlias = tuple[str, list[dict[str, Any]]]


class Alone:
    """Trainings on one rank with ddp and Open MPI 5, each model once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Found] = {}

    def __call__(self, model: str) -> Found:
        if model not in self._found:
            runs = runs_of(model, find("openmpi-5"), self._folder)
            self._found[model] = trained(runs, model, 1)
        return self._found[model]


def runs_of(model: str, mpi: Mpi, folder: Path, **variables: str) -> Runs:
    flags = ("--bitwise", "--device", "cpu", *OFTEN, *MODELS[model])
    return Runs(mpi=mpi, folder=folder, flags=flags, variables=variables)


def found_in(runs: Runs, name: str) -> Found:
    """The SHA-256 of the weights, and each step's and epoch's numbers."""
    return digest(runs, name), runs.rows(name)


def digest(runs: Runs, name: str) -> str:
    return hashlib.sha256((runs.dir(name) / "model.pt").read_bytes()).hexdigest()


def trained(runs: Runs, name: str, size: int, *flags: str) -> Found:
    """Train to the end."""
    done = runs.run(name, size, *flags)
    assert done.status == 0, done.out + done.err
    return found_in(runs, name)


def killed_and_resumed(parts: Sequence[tuple[Runs, int]], *flags: str) -> Found:
    """Train with each of some ways to start, and sizes, in turn, in one folder.

    In all but the last a rank is killed, soon after a checkpoint.
    """
    *cut, (last, last_size) = parts
    for runs, size in cut:
        before = runs.newest("cut")
        job = runs.start("cut", size, *flags)
        job.wait_until(lambda before=before: last.newest("cut") > before)
        time.sleep(random.uniform(0, 0.2))
        os.kill(random.choice(job.ranks()), signal.SIGKILL)
        job.end()
        result = json.loads((runs.dir("cut") / "result.json").read_text())
        assert result["status"] != "finished", job.said()
    found = trained(last, "cut", last_size, *flags)
    assert len(last.resumed_at("cut")) == len(cut)
    return found

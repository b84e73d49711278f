"""Trainings that one process begins, all ranks go on with, and one process ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_optimizers as optimizers
import test_stages as stages
from reference_training import Net, Stops

import mpitrain
from mpitrain import Callback, Checkpointer, World
from mpitrain.mpi.shared_arrays import communicator

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step()"),
]

DDP: dict[str, Any] = {}
FSDP = {"strategy": "fsdp"}
BITWISE = {"bitwise": True}
EMA = {"ema_decay": 0.9, "clip_grad_norm": 0.3}
LISTED = {"optimizer": optimizers.adamw, "scheduler": optimizers.sequential}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "groups": (DDP, {"optimizer": optimizers.adamw, "scheduler": optimizers.one_cycle}),
    "groups, sharded": (FSDP | EMA, LISTED),
    "own": (DDP, {"optimizer": optimizers.momentum, "scheduler": optimizers.plateau}),
    "listed": (DDP, {"optimizer": optimizers.muon_and_adamw}),
    "gan": (DDP | EMA, {"task": optimizers.Adversarial}),
    "gan, sharded": (FSDP | EMA, {"task": optimizers.Adversarial}),
    "gan, bitwise": (BITWISE | EMA, {"task": optimizers.Adversarial}),
    "stages": (DDP | EMA, {"stages": stages.STAGES}),
    "stages, sharded": (FSDP | EMA, {"stages": stages.STAGES}),
    "stages, bitwise": (BITWISE, {"stages": stages.STAGES}),
}
CUTS = {"stages": (3, 12), "": (1, 4)}  # in an epoch, of another stage


def run(world: World, case: str, *callbacks: Callback) -> list[float]:
    """Losses of the steps, then of the validations."""
    settings, kinds = CASES[case]
    more = {name: it() if name == "task" else it for name, it in kinds.items()}
    if "stages" in kinds:
        history, _ = stages.trained(world, *callbacks, **settings, **more)
    else:
        model = optimizers.Gan() if "task" in kinds else Net()
        history, _ = optimizers.trained(
            world, settings, model=model, callbacks=callbacks, **more
        )
    return history.losses


def cuts_of(case: str) -> tuple[int, int]:
    return CUTS["stages" if case.startswith("stages") else ""]


def alone(folder: str, part: str) -> None:
    """Run the first part of all cases, or the last, and print the losses."""
    with mpitrain.init(device="cpu") as world:
        found = {}
        for case in CASES:
            stops = [Stops(cuts_of(case)[0])] * (part == "first")
            found[case] = run(world, case, *stops, Checkpointer(Path(folder, case)))
        print("\n" + json.dumps(found))


def in_one_process(run_dir: Path, part: str) -> dict[str, list[float]]:
    if part == "last":  # this process keeps the run folders locked until it ends
        run_dir = Path(shutil.copytree(run_dir, run_dir.with_name("copy")))
    code = f"import test_other_ranks as it; it.alone({str(run_dir)!r}, {part!r})"
    launched = "OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA", "MPI_LOCAL"
    environ = {k: it for k, it in os.environ.items() if not k.startswith(launched)}
    # This module's imports need the folders that pytest put there (`pythonpath`).
    environ["PYTHONPATH"] = os.pathsep.join(it for it in sys.path if it)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_training_resumes_on_other_ranks(world: World, run_dir: Path) -> None:
    """With optimizers and schedulers of one's own, stages and averages."""
    ranks = communicator(world)

    def in_one(part: str) -> dict[str, list[float]]:
        return ranks.on_rank_zero(lambda: in_one_process(run_dir, part), part)

    first = in_one("first")
    middle = {
        case: run(world, case, Stops(cuts_of(case)[1]), Checkpointer(run_dir / case))
        for case in CASES
    }
    last = in_one("last")
    for case in CASES:
        found = sorted(first[case] + middle[case] + last[case])
        tolerance = 1e-3 if case == "listed" else 1e-9  # Muon rounds to bfloat16
        assert found == pytest.approx(sorted(run(world, case)), rel=tolerance), case

"""Golden results: a refactoring must not change a single bit of a training.

    python tests/golden/golden.py record     # before the first change
    python tests/golden/golden.py compare    # after each step; status 1 on a difference

The losses, learning rates and gradient norms of every step and the metrics of every
epoch are stored in `results.json`, and for each strategy one checkpoint from the middle
of an epoch, in `checkpoints/`. `compare` runs the same trainings and compares every
float bit for bit; then it resumes from the stored checkpoints, and the rest of these
trainings must be bit-equal, too.

Bits depend on the processor's vector instructions and on the version of torch. Both
are stored; `compare` says so if they differ, and then it is no proof: check out the
commit that recorded `results.json` and run `record` there first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
CHECKPOINTS = HERE / "checkpoints"
RANKS = (1, 3)
STRATEGIES = ("ddp", "fsdp")

COMMON = ("--lr", "0.1", "--clip-grad-norm", "2", "--warmup-epochs", "1")
CASES: dict[str, tuple[str, ...]] = {
    "digits": ("--precision", "fp64", "--epochs", "2", "--ema-decay", "0.9"),
    "folder": (
        *("--precision", "fp64", "--epochs", "2", "--data", "folder"),
        *("--data-dir", "images", "--image-size", "16", "--global-batch-size", "12"),
        *("--random-crop", "2", "--random-flip"),
    ),
    "probe": ("--precision", "fp64", "--probe-epochs", "1", "--epochs", "1"),
    "accumulation": (
        *("--precision", "fp64", "--epochs", "1", "--micro-batch-size", "7"),
    ),
    "fp16": (  # the first steps are skipped
        *("--precision", "fp16", "--epochs", "1"),
        *("--model", "small_model:LargeOutputs"),
    ),
    "mixup": ("--precision", "fp64", "--epochs", "1", "--mixup", "0.4"),
}
RESUMED = (
    *("--precision", "fp64", "--epochs", "2", "--model", "small_model:SmallModel"),
    *("--checkpoint-every-steps", "15", "--keep-checkpoints", "None"),
)
"""Of the trainings that are resumed in the middle of their first epoch."""
RESUME_RANKS = 2

STEP_FIELDS = ("epoch", "step", "train_loss", "lr", "gradient_norm")
EPOCH_FIELDS = (
    *("epoch", "step", "train_loss", "val_loss", "val_accuracy"),
    *("train_samples", "val_samples"),
)


def train(folder: Path, num_ranks: int, strategy: str, *flags: str) -> None:
    """Run one training in `folder`, with the run folder `runs/golden`."""
    command = [
        *(str(Path(sys.executable).with_name("mpirun")), "-np", str(num_ranks)),
        *("--oversubscribe", sys.executable, "-m", "mpitrain"),
        *("--name", "golden", "--strategy", strategy, *COMMON, *flags),
    ]
    variables = os.environ | {
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "OMP_NUM_THREADS": "1",  # sums of several threads differ in their last bits
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


def metrics_of(folder: Path) -> dict[str, list[list[Any]]]:
    """Return what `metrics.jsonl` has of each step and epoch."""
    lines = (folder / "runs/golden/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        event: [
            [row.get(name) for name in names] for row in rows if row["event"] == event
        ]
        for event, names in (("step", STEP_FIELDS), ("epoch", EPOCH_FIELDS))
    }


def make_images(folder: Path) -> None:
    """Write a folder of 3 classes, 15 images to train on and 6 to validate each."""
    rng = np.random.default_rng(7)
    for part, num in (("train", 15), ("val", 6)):
        for label in range(3):
            there = folder / "images" / part / f"class-{label}"
            there.mkdir(parents=True)
            for i in range(num):
                pixels = rng.integers(0, 128, (16, 16, 3), np.uint8)
                pixels[:, :, label] += 100
                Image.fromarray(pixels).save(there / f"{i}.png")


def run_cases() -> dict[str, Any]:
    """Run every case on every number of ranks with every strategy."""
    found = {}
    for case, flags in CASES.items():
        for num_ranks in RANKS:
            for strategy in STRATEGIES:
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    make_images(folder)
                    train(folder, num_ranks, strategy, *flags)
                    key = f"{case} np={num_ranks} {strategy}"
                    found[key] = metrics_of(folder)
                    print("ran", key, flush=True)
    return found


def run_whole(strategy: str, keep: Path | None) -> dict[str, Any]:
    """Run the training that is resumed, uncut; keep its first checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(folder, RESUME_RANKS, strategy, *RESUMED)
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            run = folder / "runs/golden"
            first = min(path.name for path in (run / "checkpoints").iterdir())
            shutil.copytree(run / "checkpoints" / first, keep / "checkpoints" / first)
            for file in ("config.yaml", "run.json"):
                shutil.copy(run / file, keep)
        return metrics_of(folder)


def resume(strategy: str) -> dict[str, Any]:
    """Resume from the stored checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(CHECKPOINTS / strategy, folder / "runs/golden")
        train(folder, RESUME_RANKS, strategy, *RESUMED)
        return metrics_of(folder)


def machine() -> dict[str, str]:
    """Return what bits depend on."""
    return {
        "torch": torch.__version__,
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
    }


def record() -> None:
    """Store the results of this checkout."""
    found = {
        "machine": machine(),
        "cases": run_cases(),
        "whole": {s: run_whole(s, CHECKPOINTS / s) for s in STRATEGIES},
    }
    lines = ",\n".join(
        f'"{key}": ' + json.dumps(value, separators=(",", ":"))
        for key, value in found.items()
    )
    RESULTS.write_text("{" + lines + "}\n")
    print(f"recorded {len(found['cases'])} cases")


def compare() -> int:
    """Compare this checkout with the stored results; return the exit status."""
    stored = json.loads(RESULTS.read_text())
    is_proof = stored["machine"] == machine()
    if not is_proof:
        print(
            f"recorded with {stored['machine']}, this is {machine()}: bits may differ"
        )
    differences = []
    for key, now in run_cases().items():
        differences += compare_rows(key, stored["cases"][key], now)
    for strategy in STRATEGIES:
        whole = stored["whole"][strategy]
        differences += compare_rows(
            f"whole {strategy}", whole, run_whole(strategy, keep=None)
        )
        resumed = resume(strategy)
        first = resumed["step"][0][1]
        rest = {
            "step": [row for row in whole["step"] if row[1] >= first],
            "epoch": whole["epoch"],
        }
        if first == 1:
            differences.append(f"resumed {strategy}: it began anew")
        differences += compare_rows(f"resumed {strategy}", rest, resumed)
    print("\n".join(differences) or f"{len(stored['cases'])} cases: bit-equal")
    return 1 if differences else 0


def compare_rows(key: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one line for the first difference of each event."""
    found = []
    for event in ("step", "epoch"):
        old, new = before[event], now[event]
        if not old or len(old) != len(new):
            found.append(f"{key}: {len(new)} rows of {event}, expected {len(old)}")
        for one, other in zip(old, new, strict=False):
            if repr(one) != repr(other):  # as text: a NaN equals a NaN
                found.append(f"{key}: {event} {other}, expected {one}")
                break
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    if parser.parse_args().what == "record":
        record()
    else:
        sys.exit(compare())

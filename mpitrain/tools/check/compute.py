"""``check --compute``: whether each device computes the same bits, and how fast."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpitrain.launch.device_name import device_name
from mpitrain.mpi.world import World
from mpitrain.tools.check.report import Finding
from mpitrain.train.precision import configure_torch
from mpitrain.train.verification import Sums, checksum, gradient_sums

if TYPE_CHECKING:
    from mpitrain.launch.job import Job

SECONDS = 20.0  # of computing, on all devices at once
SLOW = 1.5  # times the median of its kind
REMEDY = "leave the node out, and let its device, memory and cooling be tested"


def check_compute(job: Job, world: World) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Compute one micro-batch again and again on each rank; collective.

    Returns:
        A row for each rank, and what was found: a device that has other bits than most
        of its kind, or than it had before, or that is slow.
    """
    # Threads, and algorithms chosen by their speed, would change the bits, too.
    configure_torch(tf32=False, is_deterministic=True, num_threads=1)
    first, times, num_wrong = compute(world.device), [], 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        began = time.perf_counter()
        num_wrong += compute(world.device) != first
        times.append(time.perf_counter() - began)
        job.progress("check: compute")
    mine = {
        "rank": world.rank,
        "hostname": world.hostname,
        "kind": device_name(world.device),
        "seconds": statistics.median(times),
        "num_runs": len(times),
        "num_wrong": num_wrong,
    }
    found: list[tuple[dict[str, Any], Sums]] = job.comm.allgather((mine, first))
    return [row for row, _ in found], _findings(found)


def compute(device: str) -> Sums:
    """Train a known network for a step; return checksums of what it computes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU()),
        *(nn.Conv2d(32, 64, 3, stride=2), nn.Flatten(), nn.Linear(64 * 49, 256)),
        *(nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 10)),
    )
    inputs, labels = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
    model, inputs, labels = model.to(device), inputs.to(device), labels.to(device)
    sums: Sums = {}
    for number, module in enumerate(model):
        inputs = module(inputs)
        sums[f"the output of {number} ({type(module).__name__})"] = checksum(inputs)
    loss: Tensor = nn.functional.cross_entropy(inputs, labels)
    torch.autograd.backward(loss)
    return sums | gradient_sums(dict(model.named_parameters()))


def _findings(of_ranks: list[tuple[dict[str, Any], Sums]]) -> list[Finding]:
    found = []
    for row, _ in of_ranks:
        if row["num_wrong"]:
            times = f"{row['num_wrong']} of {row['num_runs']} times"
            text = f"{_place(row)} had other bits {times} than at first"
            found.append(Finding("error", "unstable-compute", text, REMEDY))
    for kind in dict.fromkeys(row["kind"] for row, _ in of_ranks):
        alike = [(row, sums) for row, sums in of_ranks if row["kind"] == kind]
        counts = Counter(tuple(sums.items()) for _, sums in alike)
        most, count = counts.most_common(1)[0]
        for row, sums in alike:
            if 2 * count <= len(alike):
                text = f"{_place(row)} is one of unlike ones, without a majority"
                found.append(Finding("error", "wrong-compute", text, REMEDY))
            elif tuple(sums.items()) != most:
                what = next(name for name, it in most if sums[name] != it)
                text = f"{_place(row)} has other bits than most in {what}"
                found.append(Finding("error", "wrong-compute", text, REMEDY))
        usual = statistics.median(row["seconds"] for row, _ in alike)
        for row, _ in alike:
            if row["seconds"] > SLOW * usual:
                factor = row["seconds"] / usual
                text = f"{_place(row)} took {factor:.1f} times as long as most"
                found.append(Finding("warning", "slow-device", text, REMEDY))
    return found


def _place(row: dict[str, Any]) -> str:
    return f"rank {row['rank']} on {row['hostname']}"

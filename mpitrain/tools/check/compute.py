"""``check --compute``: whether each device computes the same bits, and how fast."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpitrain.launch.device_name import device_name
from mpitrain.mpi.world import World, format_ranges
from mpitrain.tools.check.report import Finding, Severity
from mpitrain.train.precision import configure_torch
from mpitrain.train.verification import checksum

if TYPE_CHECKING:
    from mpitrain.launch.job import Job

SECONDS = 20.0  # of computing, on all devices at once
SLOW = 1.5  # times the median of its kind
REMEDY = "leave the node out, and let its device, memory and cooling be tested"

Sums = dict[str, str]


def check_compute(
    job: Job, world: World, seconds: float = SECONDS
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Compute one micro-batch again and again on each rank; collective.

    Returns:
        A row for each rank, and what was found: a device that has other bits than most
        of its kind, or than it had before, or that is slow.
    """
    configure_torch(tf32=False, is_deterministic=True, num_threads=1)
    first, times, num_wrong = compute(world.device), [], 0
    end = time.monotonic() + seconds
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
    for name, weight in reversed([*model.named_parameters()]):
        assert weight.grad is not None
        sums[f"the gradient of {name}"] = checksum(weight.grad)
    return sums


def _findings(of_ranks: list[tuple[dict[str, Any], Sums]]) -> list[Finding]:
    found = []

    def add(
        severity: Severity, name: str, rows: list[dict[str, Any]], reason: str
    ) -> None:
        ranks = format_ranges([row["rank"] for row in rows])
        hosts = ", ".join(dict.fromkeys(row["hostname"] for row in rows))
        text = f"rank{'s' * (len(rows) > 1)} {ranks} on {hosts} {reason}"
        found.append(Finding(severity, name, text, REMEDY))

    for row, _ in of_ranks:
        if row["num_wrong"]:
            times = f"{row['num_wrong']} of {row['num_runs']} times"
            add(
                "error",
                "unstable-compute",
                [row],
                f"had other bits {times} than at first",
            )
    for kind in dict.fromkeys(row["kind"] for row, _ in of_ranks):
        alike = [(row, sums) for row, sums in of_ranks if row["kind"] == kind]
        counts = Counter(tuple(sums.items()) for _, sums in alike)
        most, count = counts.most_common(1)[0]
        if 2 * count <= len(alike):
            rows = [row for row, _ in alike]
            add(
                "error",
                "wrong-compute",
                rows,
                "have unlike bits, and no majority has the same",
            )
        for row, sums in alike if 2 * count > len(alike) else ():
            if tuple(sums.items()) != most:
                what = next(name for name, it in most if sums[name] != it)
                add(
                    "error",
                    "wrong-compute",
                    [row],
                    f"has other bits than most in {what}",
                )
        usual = statistics.median(row["seconds"] for row, _ in alike)
        slow = [row for row, _ in alike if row["seconds"] > SLOW * usual]
        if slow:
            factor = max(row["seconds"] for row in slow) / usual
            add(
                "warning",
                "slow-device",
                slow,
                f"took {factor:.1f} times as long as most",
            )
    return found

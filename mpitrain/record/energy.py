"""Counters of the energy that a node and a rank's GPU have used. Imports no torch.

    cray/pm_counters/energy                       the whole node; no other is read
    class/powercap/intel-rapl:*/energy_uj         CPUs, AMD's too, and memory
    class/hwmon/*/energy1_input                   Intel's GPUs
    class/hwmon/*/power1_average, power1_input    AMD's GPUs: power, summed over time
    NVML, by the package nvidia-ml-py             NVIDIA's GPU of this rank

The files are in ``/sys``. They count what other jobs on the node use, too.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpitrain.mpi.world import World

SYSFS = Path("/sys")
CRAY = "cray/pm_counters/energy"
FILES = (  # of one folder the last is read
    *("hwmon/*/power1_input", "hwmon/*/power1_average", "hwmon/*/energy1_input"),
    "powercap/intel-rapl:*/energy_uj",
)
PARTS = {"package": "cpu", "dram": "memory"}  # "core" and "psys" overlap with these
PARTS |= dict.fromkeys(("amdgpu", "i915", "xe"), "gpu")
MICRO, MILLI = 1e-6, 1e-3


class EnergyMeter:
    """Adds up what counters say, from now to the last `update`.

    One that cannot be read is no error. ``sysfs``: where the counters of the node are;
    ``None``: another rank reads them.
    """

    def __init__(self, sysfs: Path | None = SYSFS) -> None:
        self.joules, self.parts = 0.0, set[str]()  # "node", or "cpu", "memory", "gpu"
        self.missing = ""  # why it counts less than it could
        self._percents: list[float] = []  # utilization of the GPU, at each `update`
        self._counters: list[Callable[[float], float]] = []
        self._read_percent: Callable[[], float] | None = None
        self._lock, self._at = threading.Lock(), time.monotonic()
        if sysfs is not None and (sysfs / CRAY).exists():
            self._add_file(sysfs / CRAY, "node", 1.0)
        elif sysfs is not None:
            # By folder: a GPU that has a counter of energy has its power, too.
            files = {p.parent: p for name in FILES for p in sysfs.glob(f"class/{name}")}
            for path in files.values():
                with self._errors_are_noted():
                    name = path.with_name("name").read_text().strip()
                    if part := PARTS.get(name.partition("-")[0]):
                        self._add_file(path, part, MICRO)
            if not self.parts and not self.missing:
                self.missing = f"no counters of energy in {sysfs}"

    def _add_file(self, path: Path, part: str, unit: float) -> None:
        def read(file: Path = path) -> float:
            return int(file.read_text().split()[0]) * unit

        # Read at once: since Linux 5.10 only root may read RAPL's (CVE-2020-8694).
        with self._errors_are_noted():
            limit = path.with_name("max_energy_range_uj")
            wraps_at = read(limit) if limit.exists() else 0.0
            counter = _counter(read, wraps_at)
            if path.name.startswith("power"):
                counter = lambda seconds: read() * seconds  # noqa: E731
            self._counters.append(counter)
            self.parts.add(part)

    def add_nvml(self, world: World) -> None:
        """Read the utilization of this rank's GPU, and its energy if no other does."""
        with self._errors_are_noted():  # not NVIDIA's, not installed, a part of a GPU
            import torch

            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            # By UUID: NVML counts all GPUs of the node, torch those that are visible.
            uuid = torch.cuda.get_device_properties(world.device).uuid
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._read_percent = lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
            energy = nvml.nvmlDeviceGetTotalEnergyConsumption
            gpus = world.nodes[world.node_rank].gpus
            # Of ranks that share a GPU the first one counts its energy.
            is_first = gpus.index(gpus[world.local_rank]) == world.local_rank
            if is_first and not (SYSFS / CRAY).exists():
                self._counters.append(_counter(lambda: energy(gpu) * MILLI))
                self.parts.add("gpu")

    @contextlib.contextmanager
    def _errors_are_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.missing = str(error)

    def update(self) -> None:
        """Read all; every minute, before a counter wraps twice. In any thread."""
        with self._lock:
            seconds = time.monotonic() - self._at
            self._at += seconds
            for counter in self._counters:
                with contextlib.suppress(Exception):
                    self.joules += counter(seconds)
            if self._read_percent is not None:
                with contextlib.suppress(Exception):
                    self._percents.append(self._read_percent())

    @property
    def has_counters(self) -> bool:
        """Whether this rank has something to read."""
        return bool(self._counters) or self._read_percent is not None

    def counted(self) -> dict[str, Any]:
        """Return what was counted, as in ``costs.json``; empty: nothing can be."""
        found: dict[str, Any] = {}
        if self.parts:
            found = {"energy_joules": self.joules, "energy_parts": sorted(self.parts)}
        if self._percents:
            found["gpu_percent"] = sum(self._percents) / len(self._percents)
        return found


def _counter(read: Callable[[], float], wraps_at: float = 0.0) -> Callable[..., float]:
    last = read()

    def used(_: float) -> float:
        nonlocal last
        before, last = last, read()
        # One that falls without a known limit was reset: nothing is taken away.
        return max(0.0, last - before + wraps_at * (last < before))

    return used


def open_meter(world: World) -> EnergyMeter:
    """Return the meter of this rank: its GPU's, and its node's on one rank of each."""
    meter = EnergyMeter(SYSFS if world.local_rank == 0 else None)
    if world.device.startswith("cuda"):
        meter.add_nvml(world)
    return meter

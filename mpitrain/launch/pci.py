"""GPUs as the kernel shows them, whether torch sees them or not.

https://docs.kernel.org/PCI/sysfs-pci.html; ids: https://pci-ids.ucw.cz
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from mpitrain.launch.rendezvous.interfaces import sysfs_text

ROOT = Path("/")

# Variables by which a user, or a scheduler, hides GPUs from a process.
VISIBLE = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "ZE_AFFINITY_MASK",
)

# How a value begins that hides all GPUs. Others that show none, such as "all" or
# "cuda:0", are mistakes.
HIDES = re.compile(r"\s*($|-1|none|void|nodevfiles)", re.IGNORECASE)

# What a job of SLURM has that was given GPUs.
GPUS_OF_SLURM = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")

# Ids of devices for computing, as in pci.ids: Instinct; Data Center GPU Max and Flex.
COMPUTE_IDS = {
    "AMD": ("0x1002", r"0x(738[ce]|740\w|74[ab]\w|75[ab]\w)"),
    "Intel": ("0x8086", r"0x(0bd\w|56c[01])"),
}


def hidden_gpus(environ: Mapping[str, str], root: Path = ROOT) -> str:
    """Describe the GPUs that this process may open; ``""`` for none.

    For a process in which torch sees none. ``""``, too, where a variable hides them, or
    a job of SLURM has not been given any.
    """
    values = [environ[name] for name in VISIBLE if name in environ]
    if any(map(HIDES.match, values)):
        return ""
    if "SLURM_JOB_ID" in environ and not any(it in environ for it in GPUS_OF_SLURM):
        return ""
    dev = root / "dev"
    if num := _num_open(dev.glob("nvidia[0-9]*")):
        return f"{num} of NVIDIA ({dev}/nvidia*)"
    files = {"AMD": [dev / "kfd"], "Intel": [*(dev / "dri").glob("render*")]}
    for name in COMPUTE_IDS:
        if (num := _num_devices(name, root)) and _num_open(files[name]):
            return f"{num} of {name}"
    return ""


def has_gpus(root: Path = ROOT) -> bool:
    """Whether this machine has GPUs that this process may be forbidden to open."""
    # Of CUDA and ROCm; their drivers may have been told which ones a rank may use.
    if any((root / "dev" / name).exists() for name in ("nvidiactl", "kfd")):
        return True
    # Any graphics has such files: that of a board's controller, too.
    return any((root / "dev/dri").glob("render*")) and _num_devices("Intel", root) > 0


def numa_node_of(address: str, root: Path = ROOT) -> int:
    """Return the NUMA node of a PCI device, as ``0000:3b:00.0``; -1: unknown."""
    text = sysfs_text(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text else -1


def numa_nodes_of(cores: Collection[int], root: Path = ROOT) -> frozenset[int]:
    """Return the NUMA nodes of some cores."""
    found = set()
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", sysfs_text(node / "cpulist"))
        for first, last in ranges:
            if any(core in cores for core in range(int(first), int(last or first) + 1)):
                found.add(int(node.name[4:]))
    return frozenset(found)


def _num_devices(name: str, root: Path) -> int:
    """Count devices for computing, by the name of their vendor."""
    vendor, ids = COMPUTE_IDS[name]
    return sum(
        sysfs_text(device / "vendor") == vendor
        and bool(re.fullmatch(ids, sysfs_text(device / "device")))
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def _num_open(files: Iterable[Path]) -> int:
    """Count device files that this process may open: a job's cgroup may forbid it."""
    found = 0
    for file in files:
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
            found += 1
    return found

"""GPUs as the kernel shows them, whether torch sees them or not.

https://docs.kernel.org/PCI/sysfs-pci.html; classes: https://pci-ids.ucw.cz/read/PD
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

ROOT = Path("/")

VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
"""Variables by which a user, or a scheduler, hides GPUs from a process."""

NO_DEVICES = ("", "-1", "NoDevFiles")  # the last one: SLURM without GPUs

# 3D controllers, other display controllers, processing accelerators. Not VGA
# controllers: AMD's and Intel's in a laptop compute nothing.
COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")


def hidden_gpus(environ: Mapping[str, str], root: Path = ROOT) -> str:
    """Describe the GPUs that this process may open; ``""`` for none.

    For a process in which torch sees none. ``""``, too, where a variable hides them.
    """
    if any(environ.get(name) in NO_DEVICES for name in VISIBLE):
        return ""
    dev = root / "dev"
    if num := _num_open(dev.glob("nvidia[0-9]*")):
        return f"{num} of NVIDIA ({dev}/nvidia*)"
    for vendor, name, files in (
        ("0x1002", "AMD", [dev / "kfd"]),
        ("0x8086", "Intel", (dev / "dri").glob("render*")),
    ):
        num = sum(
            _text(device / "vendor") == vendor
            and _text(device / "class").startswith(COMPUTE_CLASSES)
            for device in (root / "sys/bus/pci/devices").glob("*")
        )
        if num and _num_open(files):
            return f"{num} of {name}"
    return ""


def numa_node_of(address: str, root: Path = ROOT) -> int:
    """Return the NUMA node of a PCI device, as ``0000:3b:00.0``; -1: unknown."""
    text = _text(root / "sys/bus/pci/devices" / address / "numa_node")
    return int(text) if text else -1


def numa_nodes_of(cores: Collection[int], root: Path = ROOT) -> frozenset[int]:
    """Return the NUMA nodes of some cores."""
    found = set()
    for node in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", _text(node / "cpulist")):
            if any(core in cores for core in range(int(first), int(last or first) + 1)):
                found.add(int(node.name[4:]))
    return frozenset(found)


def _num_open(files: Iterable[Path]) -> int:
    """Count device files that this process may open: a job's cgroup may forbid it."""
    found = 0
    for file in files:
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            continue
        found += 1
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

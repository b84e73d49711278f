"""What a rank computes on: the name of a processor or GPU. Imports no torch."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path


def device_name(device: str) -> str:
    """Return the name of a rank's device, such as ``NVIDIA H100`` or ``AMD EPYC``."""
    return gpu(device) or processor()


def processor() -> str:
    """Return the name of this machine's processor; the architecture if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):  # not on ARM
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu(device: str) -> str | None:
    """Return the name of a GPU, such as ``NVIDIA H100``; ``None`` for a CPU."""
    if device == "cpu":
        return None
    import torch

    return str(torch.get_device_module(device).get_device_name(device))

"""A stand-in for the NVIDIA driver's library, for machines without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mpitrain.launch.nvml import LIBRARY


def build_nvml(folder: Path) -> Path:
    """Build a library with NVML's interface and the GPUs that FAKE_GPUS names."""
    library = folder / LIBRARY
    source = Path(__file__).with_name("fake_nvml.c")
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
        )
    except FileNotFoundError:
        pytest.skip("no C compiler here to build a stand-in for the driver's library")
    return library

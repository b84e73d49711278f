"""What NCCL can do in this process, and what it needs where ranks share a GPU.

Up to 2.29 NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). Newer ones
allow it, experimentally, behind NCCL_MULTI_RANK_GPU_ENABLE: every rank has channels of
its own on the GPU, and where it has no room for all of them NCCL hangs
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SHARED_SINCE = (2, 30, 3)
"""The first version in which ranks may share a GPU."""

MAX_CTAS_OF_A_GPU = 32
"""CTAs of NCCL that all ranks of a GPU have together, at most. NCCL promises two ranks
with its default of up to 32 each; ours leaves room for the model's own kernels, and for
small GPUs."""

PIPE_DIRECTORY = "/tmp/nvidia-mps"
"""Where MPS listens unless CUDA_MPS_PIPE_DIRECTORY says otherwise."""


def why_not_shared(
    version: tuple[int, ...], environ: Mapping[str, str], *, is_rocm: bool = False
) -> str:
    """Tell why ranks of NCCL cannot share a GPU here.

    Args:
        version: NCCL's; empty without it.
        environ: This process's environment.
        is_rocm: Whether it is AMD's RCCL.

    Returns:
        The reason in words; ``""``: they can.

    >>> why_not_shared((2, 28, 9), {})
    'NCCL 2.28.9 refuses it, 2.30.3 would not'
    >>> why_not_shared((2, 30, 7), {})
    ''
    """
    if not version:
        return "torch has no NCCL here"
    if is_rocm:
        return "RCCL is not known to allow it"
    if version < SHARED_SINCE:
        found, needed = (".".join(map(str, v)) for v in (version, SHARED_SINCE))
        return f"NCCL {found} refuses it, {needed} would not"
    if environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "1") != "1":
        value = environ["NCCL_MULTI_RANK_GPU_ENABLE"]
        return f"NCCL_MULTI_RANK_GPU_ENABLE={value} forbids it"
    if environ.get("NCCL_NVLS_ENABLE") == "1":
        return "NCCL_NVLS_ENABLE=1 does not go with it"
    return ""


def shared_variables(ranks_per_gpu: int) -> dict[str, str]:
    """Return the variables that NCCL needs where ranks share a GPU.

    NVLS is switched off by name: NCCL 2.30 does it by itself, but looks at the last two
    ranks only (``hasMultiRankNvml`` in its ``init.cc``).

    Args:
        ranks_per_gpu: Ranks on the GPU that has most.

    Returns:
        Variables and values.

    >>> shared_variables(8)["NCCL_MAX_CTAS"], shared_variables(64)["NCCL_MAX_CTAS"]
    ('4', '1')
    """
    return {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(max(1, MAX_CTAS_OF_A_GPU // ranks_per_gpu)),
    }


def mps_is_running(environ: Mapping[str, str]) -> bool:
    """Tell whether CUDA MPS, which lets kernels of several processes run at once, runs.

    Its control daemon has a pipe in a folder that clients must find by the same
    variable (https://docs.nvidia.com/deploy/mps/).

    >>> mps_is_running({"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})
    False
    """
    folder = environ.get("CUDA_MPS_PIPE_DIRECTORY") or PIPE_DIRECTORY
    try:
        return (Path(folder) / "control").exists()
    except OSError:
        return False

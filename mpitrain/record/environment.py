"""Where a run ran: what ``environment.json`` holds."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from mpitrain import __version__
from mpitrain.mpi.world import World
from mpitrain.schedulers import Scheduler

PACKAGES = ("torch", "torchvision", "numpy", "mpi4py")

VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HIP_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI4PY_LIBMPI",
    "NCCL_DEBUG",
    "NCCL_MAX_CTAS",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl",
    "OMP_NUM_THREADS",
    "PBS_JOBNAME",
    "PBS_QUEUE",
    "RANK",
    "ROCR_VISIBLE_DEVICES",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "WORLD_SIZE",
)
"""The variables that are recorded. Never all: others hold keys and passwords."""


def describe(
    world: World, scheduler: Scheduler, mpi_library: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of ``environment.json``; ``environ`` is rank zero's."""
    versions = {"mpitrain": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed by pip"
    return {
        "world": {
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "backend": world.backend,
            "master_addr": world.master_addr,
            "master_port": world.master_port,
            "num_threads": world.num_threads,
        },
        "hosts": [asdict(node) for node in world.nodes],
        "versions": versions,
        "mpi_library": mpi_library,
        "platform": platform.platform(),
        "scheduler": asdict(scheduler),
        "git_commit": git_commit(),
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }


def git_commit() -> str | None:
    """Return the commit of the current folder, with ``+`` if it is changed."""
    # No danger to MPI: Python starts this by vfork, which copies no pages.
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

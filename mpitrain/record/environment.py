"""Where a run ran: ``environment.json``, and lines for the screen. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from mpitrain._version import __version__
from mpitrain.launch.device_name import gpu, processor
from mpitrain.mpi.implementation import mpi_library_version
from mpitrain.mpi.launchers import ON_ONE_NODE
from mpitrain.mpi.world import Node, World, format_ranges
from mpitrain.schedulers import detect
from mpitrain.schedulers.allocation import query

PACKAGES = ("torch", "torchvision", "numpy", "mpi4py")
NOT_INSTALLED = "not installed by pip"

OF_WORLD = (
    *("world_size", "num_nodes", "backend", "master_addr", "master_port"),
    "num_threads",
)

# The variables that are recorded. Never all: others hold keys and passwords.
VARIABLES = (
    *("CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "MPI4PY_LIBMPI", *ON_ONE_NODE),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "PBS_JOBNAME"),
    *("PBS_QUEUE", "SLURM_CLUSTER_NAME", "SLURM_JOB_NAME"),
    *("SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION"),
)


def describe(world: World) -> dict[str, Any]:
    """Return the content of ``environment.json``, of this rank's environment."""
    return {
        "world": {name: getattr(world, name) for name in OF_WORLD},
        "hosts": [asdict(node) for node in world.nodes],
        "versions": versions(),
        "mpi_library": mpi_library_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "gpu": gpu(world.device),
        "scheduler": asdict(detect(os.environ)),
        "git_commit": git_commit(),
        "variables": {k: v for k, v in os.environ.items() if k in VARIABLES},
    }


def facts_for_bits(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the last bits may depend on, of the content of the file."""
    if not found:  # of a script's own loop
        return {}
    world, versions = found.get("world") or {}, found.get("versions") or {}
    return {
        "ranks": world.get("world_size"),
        "backend": world.get("backend"),
        "threads": world.get("num_threads"),
        "torch": versions.get("torch"),
        **{name: found.get(name) for name in ("platform", "processor", "gpu")},
        "commit": found.get("git_commit"),
    }


def versions() -> dict[str, str]:
    """Return the versions of mpitrain, Python and the main packages, from metadata."""
    found = dict.fromkeys(PACKAGES, NOT_INSTALLED)
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {"mpitrain": __version__, "python": platform.python_version(), **found}


def git_commit() -> str | None:
    """Return the commit of the current folder, with ``+`` if it is changed."""
    # No danger to MPI: Python starts this by vfork, which copies no pages.
    words = ("describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*")
    found = query("git", *words, timeout=5).strip()
    return found if re.fullmatch(r"[0-9a-f]+\+?", found) else None


def node_lines(nodes: Sequence[Node]) -> list[str]:
    """Return a line per node."""
    return [
        f"node {node_rank}: {node.hostname}, "
        f"rank{'s' * (len(node.ranks) > 1)} {format_ranges(node.ranks)} on "
        f"{devices_in_words(node.devices, node.gpus)}, "
        f"{node.num_cores} core{'s' * (node.num_cores != 1)}"
        for node_rank, node in enumerate(nodes)
    ]


def devices_in_words(devices: Sequence[str], gpus: Sequence[str] = ()) -> str:
    """Describe the devices of a node's ranks, whose GPUs are given by name.

    >>> devices_in_words(["cuda:0", "cuda:1", "cuda:0"], ["a", "b", "a"])
    'cuda:0 (shared by 2 ranks), cuda:1'
    >>> devices_in_words(["cuda:0", "cuda:0"], ["a", "b"])  # each rank sees one
    '2 GPUs, each as cuda:0'
    """
    if set(devices) == {"cpu"}:
        return "cpu"
    names: dict[str, list[str]] = {}
    for device, of in zip(devices, gpus or devices, strict=True):
        names.setdefault(of, []).append(device)
    counts = Counter(
        " or ".join(dict.fromkeys(found))
        + (f" (shared by {len(found)} ranks)" if len(found) > 1 else "")
        for found in names.values()
    )
    return ", ".join(
        name if count == 1 else f"{count} GPUs, each as {name}"
        for name, count in counts.items()
    )

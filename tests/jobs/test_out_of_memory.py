"""A rank that the kernel kills for lack of memory is named, with the reason."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import Mpi, mpirun

LIMIT_BYTES = 1 << 30  # torch alone takes half of it

SCRIPT = """
import os, sys
from pathlib import Path

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
import mpitrain

with mpitrain.init(device="cpu") as world:
    import torch, torch.distributed as dist
    if world.rank == 1:
        held = [torch.ones(1 << 26) for _ in range(100)]
    dist.barrier()
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with little memory."""
    first = Path("/sys/fs/cgroup/memory")
    root = first if first.is_dir() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    folder = root / f"mpitrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    for _ in range(50):  # the rank's sidecar may still be in it
        with contextlib.suppress(OSError):
            folder.rmdir()
            break
        time.sleep(0.1)


def test_a_rank_that_was_killed_for_memory_is_named(
    openmpi: Mpi, cgroup: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = mpirun(openmpi, 2, "script.py", str(cgroup), cwd=tmp_path)
    assert done.status != 0
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert (
        "killed by the kernel for lack of memory (OOM); the limit of its cgroup is "
        "1.0 GiB" in line
    )

"""`mpirun --hostfile` over ssh, as in hostfiles/README.md."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from .hosts import VirtualHosts

TIMEOUT_SECONDS = 240


def mpirun(
    hosts: VirtualHosts,
    folder: Path,
    names: list[str],
    *,
    slots: int | list[int],
    words: list[str],
    flags: Sequence[str] = (),
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Start the training from the first of some hosts, on all of them.

    ``slots`` are of each host.
    """
    of_hosts = [slots] * len(names) if isinstance(slots, int) else slots
    command = ["mpirun", "--prefix", f"{folder}/.venv"]
    if not (folder / ".venv/bin/mpirun").exists():
        command = ["mpirun"]
    path = f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    if "Open MPI" not in version_of(shutil.which("mpirun", path=path)):
        give_up("these words are Open MPI's; the mpirun here is another")
    lines = (f"{n} slots={num}\n" for n, num in zip(names, of_hosts, strict=True))
    (folder / "hosts").write_text("".join(lines))
    command += [*flags, "--hostfile", "hosts", "-x", "PATH"]
    command += ["python", "-m", "mpitrain", *words]
    return hosts.run(
        names[0],
        command,
        cwd=folder,
        timeout_seconds=timeout_seconds,
        environ={"PATH": path},
    )


def give_up(reason: str) -> None:
    """Skip with a reason, which with CI=true is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def version_of(program: str | None) -> str:
    """Return what a program says to `--version`, or nothing."""
    if program is None:
        return ""
    asked = [program, "--version"]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout

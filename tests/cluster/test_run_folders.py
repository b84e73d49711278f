"""A run folder that is another one on every host."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .hosts import VirtualHosts

OWN_FOLDER = "/etc/ssh"
"""Of each host's own, under one name."""

LATE_SECONDS = 30


@pytest.mark.slow
def test_where_no_checkpoint_can_be_written_a_signal_ends_the_job_as_ever(
    hosts: VirtualHosts, folder: Path
) -> None:
    first, second, _ = hosts.names
    (folder / "hosts").write_text(f"{first} slots=1\n{second} slots=1\n")
    words = ["mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    words += ["-x", "PATH", "-x", "PYTHONPATH", "python", "-m", "mpitrain"]
    words += ["--runs-dir", f"{OWN_FOLDER}/runs", "--epochs", "1000000"]
    path = f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    started = time.monotonic()
    done = hosts.run(
        first,
        ["timeout", "-s", "USR2", str(LATE_SECONDS), *words],
        cwd=folder,
        environ={"PATH": path, "PYTHONPATH": str(folder)},
        timeout_seconds=120,
    )
    assert done.returncode == 124, done.stdout
    assert time.monotonic() - started < LATE_SECONDS + 20
    assert "no checkpoints are written, and a signal" in done.stdout
    assert f"{second} cannot see {OWN_FOLDER}/runs/" in done.stdout
    assert "epoch " in done.stdout
    assert "resumes from here" not in done.stdout

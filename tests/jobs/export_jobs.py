"""`mpitrain export` where there is no MPI at all."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from launcher import environment


def export(
    folder: Path, *words: str, max_bytes: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """Run it; each file that it writes may have so many bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))

    return subprocess.run(
        [sys.executable, "-m", "mpitrain", "export", *words],
        cwd=folder,
        env={**environment(), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        preexec_fn=limit,
        check=False,
        capture_output=True,
        text=True,
    )

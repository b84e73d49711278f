"""Start ``python -m mpitrain run`` under mpirun, for the tests of `run`."""

from __future__ import annotations

import re
from pathlib import Path

from launcher import Done, Mpi, mpirun

SCRIPTS = Path(__file__).parent / "torchrun_scripts"


def run(mpi: Mpi, num_ranks: int, *words: str, cwd: Path, **variables: str) -> Done:
    """Run ``mpirun -np N python -m mpitrain run WORDS``."""
    words = ("-m", "mpitrain", "run", *words)
    return mpirun(mpi, num_ranks, *words, cwd=cwd, timeout_seconds=120, **variables)


def write(tmp_path: Path, body: str) -> str:
    (tmp_path / "script.py").write_text(body)
    return "script.py"


def check_all_done(done: Done, num_ranks: int) -> None:
    assert done.status == 0, done.out + done.err
    # Not whole lines: with PYTHONUNBUFFERED the ends of lines come apart.
    said = sorted(re.findall(r"done (\d)/(\d)", done.out))
    assert said == [(str(rank), str(num_ranks)) for rank in range(num_ranks)]
    assert "Traceback" not in done.err

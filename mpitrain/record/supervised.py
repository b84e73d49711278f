"""What a training and `supervise` tell each other, by files beside the status file.

    .run        rank zero: the run folder that it has opened
    .before     `supervise`: `.run` of the start before
    .restarts   `supervise`: its token, and how often it has restarted
    .step       rank zero: the step that the nodes have in memory; and if they have
                removed it

A training that is started again finds the folder of before: it resumes, although the
command line asks for a new run. See docs/decisions/0017.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.files import read_json, write_json
from mpitrain.launch.env_checks import STATUS_FILE, beside_status
from mpitrain.record.jsonl import changed_at

logger = logging.getLogger("mpitrain")

RESTARTS = "restarts.jsonl"

_REMOVED = "removed"


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run folder that a start of this job has opened."""

    run_dir: Path  # absolute
    result_time: float | None  # of its result.json, when it was opened
    has_resumed: bool  # or has found that there is nothing to resume


def opened_run(environ: Mapping[str, str], *, before: bool = False) -> OpenedRun | None:
    """Return the run folder that this start, or one before, has opened last."""
    found = _read(environ, "before" if before else "run")
    if "run_dir" not in found:
        return None
    # By name: the ranks may be of another version of mpitrain than `supervise`.
    return OpenedRun(
        run_dir=Path(found["run_dir"]),
        result_time=found["result_time"],
        has_resumed=found.get("has_resumed", False),
    )


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The `supervise` that may start this training again."""

    token: str  # of it alone
    seconds: float  # since it began, when it started this training
    num_restarts: int  # until now


def supervision(environ: Mapping[str, str]) -> Supervision | None:
    """Return the `supervise` of this process, if it restarts; on rank zero."""
    found = _read(environ, "restarts")
    return Supervision(**found) if found else None


def _read(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    file = beside_status(environ, name)
    return read_json(file) if file else {}


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A fault after which `supervise` has started the training again."""

    time: float  # when mpirun had ended, in seconds since 1970
    step: int  # how far the training had come, by its record and checkpoints
    error: str  # why it ended


def record_restart(run_dir: Path, restart: Restart) -> None:
    """Add a line to ``restarts.jsonl``; a disk that takes none ends nothing."""
    with contextlib.suppress(OSError), (run_dir / RESTARTS).open("a") as file:
        file.write(json.dumps(vars(restart)) + "\n")


def read_restarts(run_dir: Path) -> list[Restart]:
    """Read ``restarts.jsonl``; lines that cannot be read are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (run_dir / RESTARTS).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # of a cut line
                found.append(Restart(**json.loads(line)))
    return found


def tell_supervisor(run_dir: Path, *, has_resumed: bool = False) -> None:
    """Write which run folder this start has opened; on rank zero."""
    if (file := beside_status(os.environ, "run")) is None:
        return
    run_dir = run_dir.resolve()
    time = changed_at(run_dir / "result.json")
    opened = OpenedRun(run_dir=run_dir, result_time=time, has_resumed=has_resumed)
    with contextlib.suppress(OSError):
        write_json(file, vars(opened) | {"run_dir": str(run_dir)})


def write_memory_step(step: int) -> None:
    """Write which step the nodes have in memory; on rank zero."""
    if (file := beside_status(os.environ, "step")) is not None:
        with contextlib.suppress(OSError):
            file.write_text(f"{step}\n")


def tell_memory_removed() -> None:
    """Write that mpitrain itself has removed what was in memory; on rank zero."""
    if (file := beside_status(os.environ, "step")) is not None:
        with contextlib.suppress(OSError), file.open("a") as lines:
            lines.write(f"{_REMOVED}\n")


def read_memory_step(environ: Mapping[str, str], *, is_there: bool = False) -> int:
    """Return the step that the nodes have had in memory last; 0: none.

    With ``is_there`` also 0 if mpitrain has removed it.
    """
    if (file := beside_status(environ, "step")) is not None:
        with contextlib.suppress(OSError, ValueError):
            step, *rest = file.read_text().split()
            return 0 if is_there and _REMOVED in rest else int(step)
    return 0


def begin_start(
    environ: Mapping[str, str], supervision: Supervision | None = None
) -> None:
    """Take what was opened as that of a start before; in `supervise`."""
    status = environ[STATUS_FILE]
    Path(status).unlink(missing_ok=True)
    restarts = Path(f"{status}.restarts")
    if supervision is not None:
        try:
            write_json(restarts, vars(supervision))
        except OSError as error:  # a full disk
            if not restarts.exists():
                raise
            # That of the start before differs in the time and the count of restarts.
            logger.warning("supervise: %s is not renewed: %s", restarts, error)
    # A start that has opened no folder leaves that of the start before it.
    with contextlib.suppress(FileNotFoundError):
        os.replace(f"{status}.run", f"{status}.before")

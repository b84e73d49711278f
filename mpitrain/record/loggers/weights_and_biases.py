"""Weights & Biases, in a process of its own beside the rank.

Imported here, wandb would put itself between this rank and its end: it replaces
`sys.exit` and `sys.excepthook`, waits in `atexit` for all to be sent, sends SIGINT to
the main thread at a button in the browser, and works under the rank's lock (0.31). In
`wandb_process` it can do none of that, and a process can be ended in time.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.record.config import LogConfig
from mpitrain.record.loggers.protocol import Images, Logger, RunFacts, Status

PROGRAM = Path(__file__).with_name("wandb_process.py")

FINISH_SECONDS = 14.0
"""How long its process may take to end: a little less than all loggers have."""

EXIT_STATUS: Mapping[Status, int] = {"finished": 0, "stopped": 75}


class WeightsAndBiases(Logger):
    """Hands all on to a process that has wandb.

    Args:
        facts: Of the run.
        config: What was asked of wandb.
    """

    def __init__(self, facts: RunFacts, config: LogConfig) -> None:
        self._facts = facts
        self._sync_dir = ""
        self._error = ""
        log = facts.run_dir / "logs" / f"wandb-{facts.rank}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            # -P: its folder is not where wandb's imports shall be looked for.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=_environment(),
                start_new_session=True,  # signals to this rank's group are not for it
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._send(("begin", _asked(facts, config)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Hand them on."""
        self._send(("scalars", step, dict(values)))

    def images(self, step: int, name: str, images: Images) -> None:
        """Hand them on."""
        self._send(("images", step, name, images))

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Let it end; where it does not, end it.

        Raises:
            TimeoutError: It did not.
        """
        self._send(("finish", EXIT_STATUS[status], dict(summary)))
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(FINISH_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*_children(self._process.pid), self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            later = f"; `wandb sync {self._sync_dir}` does" if self._sync_dir else ""
            raise TimeoutError(
                f"it could not send all within {FINISH_SECONDS:.0f} s{later}"
            ) from None
        self._reader.join(1.0)
        if self._error:
            raise RuntimeError(self._error)

    def _send(self, message: tuple[Any, ...]) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            with suppress(OSError):
                self._process.stdin.close()
            self._process.wait(FINISH_SECONDS)
            self._reader.join(1.0)
            raise RuntimeError(
                self._error or f"its process ended with {self._process.returncode}"
            ) from None

    def _read(self) -> None:
        """Hear what the process says."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                said = json.loads(line)
                self._sync_dir = said.get("sync_dir") or self._sync_dir
                self._error = said.get("error") or self._error
                if "say" in said:
                    self._facts.say(f"wandb: {said['say']}")


def _asked(facts: RunFacts, config: LogConfig) -> dict[str, Any]:
    """Return what the process must know. Keys are none of it: wandb finds those."""
    rank = f"-rank-{facts.rank}"
    group = config.wandb_group
    if config.wandb_all_ranks:
        group = group or facts.run_name
    return {
        "dir": str(facts.run_dir),
        "project": config.wandb_project,
        "group": group,
        "tags": list(config.wandb_tags),
        "id": facts.run_id + rank * (facts.rank > 0),
        "name": facts.run_name + rank * config.wandb_all_ranks,
        "config": dict(facts.config),
        "rank_pid": os.getpid(),
    }


def _environment() -> dict[str, str]:
    """Return the rank's environment, without what is MPI's.

    And wandb sends nothing about itself, unless one says so.
    """
    mpi = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(mpi)}
    return {"WANDB_ERROR_REPORTING": "false", **kept}


def _children(pid: int) -> list[int]:
    """Name the processes that one has started: wandb has one."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found

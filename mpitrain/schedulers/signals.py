"""Whom a scheduler signals when it ends a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress

from mpitrain.schedulers import detect
from mpitrain.watchdog.process import Ancestor, has_signal


def had_term(
    pid: int, launchers: Iterable[Ancestor], environ: Mapping[str, str]
) -> bool:
    """Whether a process gets a scheduler's TERM by itself, since its launcher did.

    SLURM signals all processes of a job, PBS those of a session. `supervise` blocks
    TERM for the launcher, where it is pending from then on.
    """
    for it in launchers:
        if has_signal(it.pid, "ShdPnd", signal.SIGTERM):
            if detect(environ).name == "slurm":
                return True
            with suppress(ProcessLookupError):  # it ends now
                return os.getsid(pid) == os.getsid(it.pid)
    return False

"""No test finds the job of another one: files run in any order in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpitrain.launch.env_checks import RANK_PID
from mpitrain.launch.job import Job

_ended = []  # kept: their sockets would be reported as not closed in a later test


@pytest.fixture(autouse=True)
def end_job() -> Iterator[None]:
    """End the job that a test started through ``main``, as its process would."""
    yield
    if Job.current is not None:
        Job.current.watchdog.close()
        _ended.append(Job.current)
        Job.current = None
    # A process that a later test starts would take itself for a child of a rank, and
    # forget the variables of a launcher that the test gives it.
    os.environ.pop(RANK_PID, None)

"""No test finds the job of another one: files run in any order in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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

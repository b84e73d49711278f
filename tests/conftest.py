"""How tests are shared out where several run at once (``pytest -n 3``)."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Threads of OpenMP wait asleep, also in the jobs that tests start: else they take the
# cores from the tests beside them. It changes no bit. A training of one rank on two
# busy cores took 3.5 s of processor time in place of 15.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Leave a file's tests to one process, and to one all that want virtual hosts."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "hosts" if "cluster/" in file else file

    return ByFile(config, log)

"""What a finished run leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path


def assert_finished(
    folder: Path, output: str, *, hosts: list[str], world_size: int
) -> None:
    """Check the one run of a folder: it ended well, on these hosts.

    Args:
        folder: Where the job was started; the run is in `runs/` there.
        output: What the job printed, for the message of a failure.
        hosts: Names of all hosts that took part.
        world_size: Number of ranks that took part.
    """
    (run,) = (folder / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    found = {name: result.get(name) for name in ("status", "num_nodes", "world_size")}
    expected = {"status": "finished", "num_nodes": len(hosts), "world_size": world_size}
    assert found == expected, output
    environment = (run / "environment.json").read_text()
    assert [name for name in hosts if name not in environment] == [], environment

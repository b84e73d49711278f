"""The pure parts of the start, as tables."""

from __future__ import annotations

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.ending import exit_status, message


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SystemExit(7), 7, "[rank 1/2 h] sys.exit(7)"),
        (SystemExit(256), 1, "sys.exit(256)"),
        (SystemExit(-1), 255, "sys.exit(-1)"),
        (SystemExit("no"), 1, "sys.exit('no')"),
        (KeyboardInterrupt(), 130, "interrupted by Ctrl-C"),
        (ValueError("bad"), 1, "[rank 1/2 h] ValueError: bad"),
        (LaunchError("worse"), 1, "[rank 1/2 h] LaunchError: worse"),
    ],
)
def test_every_way_out_has_a_status_and_words(
    error: BaseException, status: int, words: str
) -> None:
    assert exit_status(error) == status
    assert words in message(error, "rank 1/2 h")


def test_leaving_well_is_no_failure() -> None:
    assert exit_status(SystemExit()) == 0
    assert exit_status(SystemExit(0)) == 0

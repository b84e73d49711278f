"""Watchdogs that report through others: real sidecars, without MPI."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

NUM_RANKS = 4

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
from mpitrain.watchdog.client import Watchdog
rank, size, num_steps, *ports = map(int, sys.argv[1:])

def obey(status, text):  # called in a thread
    print("told", status, flush=True)
    if status is not None:
        os._exit(status)

client = Watchdog(
    rank=rank, world_size=size, launcher_sockets=(), start_timeout_seconds=60,
)
client.on_command = obey
if rank < size - 1:
    print(client.listen("127.0.0.1", "secret", rank, size), flush=True)
if rank:
    # That before, and rank zero; the last one's first place is closed.
    known = [*[1] * (rank == size - 1), ports[-1], ports[0]]
    places = [("127.0.0.1", port) for port in dict.fromkeys(known)]
    client.connect(places, "secret", rank, size)
client.hang_timeout_seconds = 8.0
step = 0
try:
    while True:
        if step < num_steps:
            client.step_done()
            step += 1
        time.sleep(0.1)
except KeyboardInterrupt:
    client.close()
"""


@contextmanager
def chain(num_steps: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks of which each but the first reports through the one before."""
    ports, ranks = list[int](), list[subprocess.Popen[str]]()
    with ExitStack() as stack:
        for rank in range(NUM_RANKS):
            words = [rank, NUM_RANKS, num_steps, *ports]
            made = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, *map(str, words)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(made.kill)
            ranks.append(made)
            if rank < NUM_RANKS - 1:
                assert made.stdout is not None
                ports.append(int(made.stdout.readline()))
        yield ranks


def test_a_hang_ends_all_that_report_through_relays() -> None:
    with chain(num_steps=10) as ranks:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        statuses = [rank.returncode for rank in ranks]
    assert statuses == [76] * NUM_RANKS, said
    assert "hang: no rank has made progress for" in said[0]
    assert not any("hang:" in text for text in said[1:])


def test_a_rank_that_is_killed_behind_relays_is_named() -> None:
    with chain(num_steps=10**6) as ranks:
        await_links(ranks)
        ranks[3].kill()
        said = [rank.communicate(timeout=60)[0] for rank in ranks[:3]]
    assert "[rank 3/4 " in said[0], said
    assert "died without an error message" in said[0]
    assert not any("rank 3/4" in text for text in said[1:])


def test_a_relay_that_is_terminated_ends_the_job() -> None:
    with chain(num_steps=10**6) as ranks:
        await_links(ranks)
        ranks[1].terminate()
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [1, -signal.SIGTERM, 1, 1], said
    assert "[rank 1/4 " in said[0]


def test_those_behind_a_relay_that_is_done_report_to_rank_zero() -> None:
    with chain(num_steps=10**6) as ranks:
        await_links(ranks)
        ranks[1].send_signal(signal.SIGINT)
        assert ranks[1].wait(30) == 0
        await_links(ranks[:1] + ranks[2:], [1, 2, 1])
        ranks[3].kill()
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert "[rank 3/4 " in said[0], said
    assert "died without an error message" in said[0]


def test_rank_zero_that_is_done_leaves_the_others_alone() -> None:
    with chain(num_steps=10**6) as ranks:
        await_links(ranks)
        ranks[0].send_signal(signal.SIGINT)
        assert ranks[0].wait(30) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[3].wait(4)
        for rank in ranks[1:]:
            rank.send_signal(signal.SIGINT)
        said = [rank.communicate(timeout=30)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, said
    assert not any("Traceback" in text for text in said)


def await_links(
    ranks: list[subprocess.Popen[str]], expected: Sequence[int] = (1, 2, 2, 1)
) -> None:
    """Wait until the ranks have so many connections each."""
    end = time.monotonic() + 30
    while (found := [num_links(rank.pid) for rank in ranks]) != [*expected]:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    time.sleep(2.0)  # until a first report has passed all


def num_links(pid: int) -> int:
    """Return the number of TCP connections of a rank's sidecar."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        return 0
    (sidecar,) = children
    opened = set()
    for file in Path(f"/proc/{sidecar}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            opened.add(str(file.readlink()))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in opened for row in rows)

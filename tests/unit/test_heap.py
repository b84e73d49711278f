"""Freed memory stays with a rank, unless its environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
import mpitrain

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with mpitrain.init(device="cpu"):
    for size in (10, 80):  # MiB; glibc by itself keeps what is below 32
        for _ in range(10):
            torch.ones(size << 18)
        before = faults()
        for _ in range(10):
            torch.ones(size << 18)
        print("faults", size, faults() - before)
"""


def faults(**variables: str) -> list[tuple[int, int]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    return [(int(size), int(number)) for _, size, number in words]


def pages(size: int) -> int:
    """Return the pages of ten blocks of so many MiB."""
    return 10 * (size << 20) // os.sysconf("SC_PAGESIZE")


def test_a_block_that_was_freed_costs_no_faults_when_it_is_wanted_again() -> None:
    # A few there may be, as long as others' blocks move to new places.
    assert all(found < 0.4 * pages(size) for size, found in faults())


@pytest.mark.parametrize(
    "variables",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"},
    ],
)
def test_who_has_settled_it_is_obeyed(variables: dict[str, str]) -> None:
    assert all(found > 0.8 * pages(size) for size, found in faults(**variables))

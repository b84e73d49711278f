"""The processes that read ahead: what they must not disturb, and what not them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from mpitrain.data.workers import build_loader, iterate_loader

READS = """
import multiprocessing, sys, torch
from mpitrain.data.workers import worker_context, build_loader
if __name__ == "__main__":
    samples = [torch.full((3,), float(i)) for i in range(8)]
    context = worker_context(sys.argv[1])
    loader = build_loader(
        samples, batch_size=2, num_workers=2, multiprocessing_context=context
    )
    total = sum(float(batch.sum()) for batch in loader)
    sockets = multiprocessing.current_process()._config["tempdir"]
    print(total, sockets)
"""


@pytest.mark.parametrize(
    ("num_bytes", "method"),
    [
        *((76, "forkserver"), (77, "forkserver")),
        *(pytest.param(it, "forkserver", marks=pytest.mark.slow) for it in (20, 200)),
        *(pytest.param(it, "fork", marks=pytest.mark.slow) for it in (20, 76, 77, 200)),
    ],
)
def test_workers_hand_over_what_they_read_however_long_tmpdir_is(
    method: str, num_bytes: int, tmp_path: Path
) -> None:
    folder = Path("/tmp") / f"t{os.getpid()}{'x' * 200}"[: num_bytes - 5]
    folder.mkdir()
    script = tmp_path / "reads.py"
    script.write_text(READS)
    try:
        done = subprocess.run(
            ["timeout", "-k", "5", "60", sys.executable, str(script), method],
            env={**os.environ, "TMPDIR": str(folder)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert not list(folder.iterdir())
    finally:
        folder.rmdir()
    total, sockets = done.stdout.split() or [done.stderr, "/"]
    assert total == "84.0", done.stderr
    assert not Path(sockets).exists()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_to_read_draws_no_random_number_of_the_rank(num_workers: int) -> None:
    before = torch.get_rng_state()
    assert len(list(build_loader(list(range(3)), num_workers=num_workers))) == 3
    assert torch.equal(torch.get_rng_state(), before)


IS_TOLD = """
import os, signal, sys, time, torch
from mpitrain.data.workers import worker_context, build_loader
if __name__ == "__main__":
    heard = []
    sent = {2: signal.SIGUSR2, 10: signal.SIGUSR1, 20: signal.SIGTERM}
    for number in sent.values():
        signal.signal(number, lambda number, _: heard.append(number))
    samples = torch.arange(4000.0)[:, None].expand(4000, 3).contiguous()
    loader = build_loader(
        samples,
        batch_size=2,
        num_workers=2,
        multiprocessing_context=worker_context(sys.argv[1]),
    )
    total, num = 0.0, 0
    for batch in loader:
        total, num = total + float(batch.sum()), num + 1
        if num in sent:  # as mpirun does, and a scheduler
            os.killpg(0, sent[num])
            time.sleep(1)
    print(total, heard)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_signal_to_all_of_a_rank_leaves_its_workers_at_work(
    method: str, tmp_path: Path
) -> None:
    script = tmp_path / "is_told.py"
    script.write_text(IS_TOLD)
    done = subprocess.run(
        [sys.executable, str(script), method],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert done.stdout.strip() == "23994000.0 [12, 10, 15]", done.stderr


def test_a_loader_leaves_the_users_warnings_as_they_are() -> None:
    before = list(warnings.filters)
    loader = build_loader([1, 2], num_workers=9)  # torch warns of more than the cores
    for _ in iterate_loader(loader):
        assert list(warnings.filters) == before
    assert list(warnings.filters) == before

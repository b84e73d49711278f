"""Sub-worlds in whole jobs: what they train, how the others sleep, how they end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launcher import Done, Mpi, mpirun

HEAD = """
import os, signal, sys, threading, time
import torch
import torch.distributed as dist
import mpitrain
from mpitrain.data.sources import digits
from mpitrain.launch.exit_guard import abort_on_error
from mpitrain.launch.init import init
from mpitrain.launch.subworld import SubWorlds
from mpitrain.models.build import build_model
from mpitrain.train.callbacks import Callback
from mpitrain.config import TrainConfig


def train(part):
    data, heard = digits(), Heard()
    model = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)
    config = TrainConfig(epochs=1, global_batch_size=200, precision="fp64")
    trainer = mpitrain.Trainer(model, data.train, data.val, config, world=part)
    trainer.callbacks.append(heard)
    trainer.fit()
    return heard.losses


class Heard(Callback):
    def __init__(self):
        self.losses = []

    def on_metrics(self, trainer, steps):
        self.losses += [step.loss for step in steps]


def cpu_ticks():
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


with abort_on_error() as guard, init(guard=guard, hang_timeout_seconds=8) as world:
    rank = world.rank
"""

PARTS = """
    with SubWorlds(guard, world, 60.0) as parts:
        found = parts.run(int(sys.argv[1]), work, "the work")
"""


def run(
    mpi: Mpi, num_ranks: int, body: str, folder: Path, *words: str, tail: str = PARTS
) -> Done:
    (folder / "script.py").write_text(HEAD + body + tail)
    return mpirun(mpi, num_ranks, "script.py", *words, cwd=folder)


def test_a_part_of_two_trains_like_a_job_of_two(mpi: Mpi, tmp_path: Path) -> None:
    tell = "    if rank == 0: print('losses', *map(repr, found))\n"
    plain = run(mpi, 2, "    found = train(world)\n", tmp_path, tail=tell)
    part = run(mpi, 4, "    work = train\n", tmp_path, "2", tail=PARTS + tell)
    for done in (plain, part):
        assert done.status == 0, done.out + done.err
    (expected,) = re.findall(r"^losses (.*)$", plain.out, re.M)
    (found,) = re.findall(r"^losses (.*)$", part.out, re.M)
    assert found == expected  # to the last bit
    assert len(found.split()) == 8


@pytest.mark.slow
def test_parts_meet_anew_over_gloo_too(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
    def work(part):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        time.sleep(0.2 * part.rank)  # they leave, and come, one after another
        return int(ones)
"""
    tail = """
    with SubWorlds(guard, world, 20.0) as parts:
        for num in (2, 3, 3, 2, 3):
            assert parts.run(num, work, "the work") in (num, None)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("met", int(ones), dist.get_backend(), flush=True)
"""
    head = HEAD.replace("init(guard=guard,", 'init(guard=guard, backend="gloo",')
    (tmp_path / "script.py").write_text(head + body + tail)
    done = mpirun(openmpi, 3, "script.py", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert done.out.count("met 3 gloo") == 3


@pytest.mark.slow
def test_who_is_not_in_a_part_leaves_the_cores_to_others(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
    def work(part):
        end = time.monotonic() + 4
        while time.monotonic() < end:
            pass

    before = cpu_ticks()
"""
    tail = "    print('ticks', rank, cpu_ticks() - before, flush=True)\n"
    done = run(openmpi, 4, body, tmp_path, "1", tail=PARTS + tail)
    assert done.status == 0, done.out + done.err
    ticks = {int(r): int(n) for r, n in re.findall(r"ticks (\d) (\d+)", done.out)}
    assert sorted(ticks) == [0, 1, 2, 3]
    assert ticks.pop(0) > 100  # a second or more, however busy the machine is
    assert max(ticks.values()) < 150, ticks  # of some 400; they joined a group again


def test_what_one_rank_of_a_part_raises_ends_all(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
    def work(part):
        if part.rank == 1:
            raise MemoryError("no room for it")
        dist.all_reduce(torch.ones(1))
"""
    started = time.monotonic()
    done = run(openmpi, 4, body, tmp_path, "2")
    assert done.status != 0
    (line,) = done.ours
    assert re.match(r"\[rank 1/4 \S+\] MemoryError: no room for it", line)
    assert time.monotonic() - started < 60


def test_what_a_whole_part_raises_is_said_once(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
    from mpitrain.errors import UsageError
    from mpitrain.mpi.collectives import all_or_none, world_comm

    def refuse():
        if rank == 1:
            raise UsageError("rank 1 does not want")

    def work(part):
        all_or_none(world_comm(), refuse, "agree")
"""
    done = run(openmpi, 3, body, tmp_path, "2")
    assert done.status == 2, done.err
    (line,) = done.ours
    assert line.startswith("[rank 1/3 ")
    assert "rank 1 does not want" in line


def test_a_hang_in_a_part_names_who_is_missing_there(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
    def work(part):
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=0.1).step()
        if part.rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
"""
    done = run(openmpi, 4, body, tmp_path, "2")
    assert done.status == 76, done.err
    (line,) = done.ours
    assert line.startswith("[rank 1/4 ")
    assert re.search(r"did not arrive:\s+rank 1 .*(time\.sleep|script\.py:)", done.err)
    assert re.search(r"ranks 2-3 \S+: asleep until others have done their", done.err)


def test_a_rank_that_is_killed_asleep_ends_all(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
    def work(part):
        time.sleep(100)

    if rank == 3:
        end = lambda: os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(3.0, end).start()
"""
    started = time.monotonic()
    done = run(openmpi, 4, body, tmp_path, "2")
    assert done.status != 0
    assert time.monotonic() - started < 60
    assert any(line.startswith("[rank 3/4 ") for line in done.ours), done.err

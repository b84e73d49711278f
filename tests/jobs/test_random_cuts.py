"""Trainings that are killed at random moments, again and again, lose nothing.

A few cuts here; `make soak` makes many more. The seed is printed; SOAK_SEED=n repeats.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from launcher import MPIS, find, send_signal
from resume_jobs import Job, Runs

TRIES = max(3, int(os.environ.get("SOAK_TRIES", "0")) // 4)
"""Trainings; each is cut four times."""

NUM_CUTS = 4
SEED = int(os.environ.get("SOAK_SEED", str(random.SystemRandom().randrange(10**6))))
NUM_RANKS = 2
VARIABLES = {"DROPOUT": "0.2", "BALLAST_MB": "8"}
OFTEN = ("--checkpoint-every-steps", "1", "--keep-checkpoints", "2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A folder with one training that was never cut: `plain`."""
    folder = tmp_path_factory.mktemp("runs")
    made = Runs(mpi=find("openmpi-5"), folder=folder, variables=VARIABLES)
    done = made.run("plain", NUM_RANKS)
    assert done.status == 0, done.out + done.err
    return made


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TRIES))
def test_a_training_that_is_killed_often_ends_with_the_same_bits(
    number: int, runs: Runs
) -> None:
    chance = random.Random(f"{SEED}/{number}")
    mine = Runs(
        mpi=find(MPIS[number % len(MPIS)]), folder=runs.folder, variables=VARIABLES
    )
    name = f"cut-{number}"
    for cut in range(NUM_CUTS):
        what = chance.choice(["one rank", "all ranks", "mpirun", "stop and kill"])
        moment = chance.uniform(0.0, 2.5)
        print(f"SOAK_SEED={SEED}, try {number}.{cut}: {what} after {moment:.2f} s")
        job = mine.start(name, NUM_RANKS, *OFTEN, STEP_SECONDS="0.15")
        before = len(mine.resumed_at(name)) if mine.record(name).exists() else 0
        # From the first lines of its log on, or from where it trains.
        if chance.random() < 0.8:
            wait_until_it_trains(job, mine, name, before)
        else:
            job.wait_until(lambda: len(job.ranks()) == NUM_RANKS)  # noqa: B023
        time.sleep(moment)
        strike(what, job, chance)
        status = job.end()
        if status == 0:
            break  # it was finished before
    done = mine.run(name, NUM_RANKS, *OFTEN)
    assert done.status == 0, done.out + done.err
    assert ".broken" not in str(list((mine.dir(name) / "checkpoints").iterdir()))
    runs.assert_same_bits(name, "plain")


def wait_until_it_trains(job: Job, runs: Runs, name: str, before: int) -> None:
    """Until it has gone on once more, or has written a checkpoint."""
    job.wait_until(
        lambda: (
            job.process.poll() is not None
            or (before == 0 and runs.newest(name))
            or (runs.record(name).exists() and len(runs.resumed_at(name)) > before)
        )
    )


def strike(what: str, job: Job, chance: random.Random) -> None:
    pids = job.ranks()
    if not pids:
        return  # it was finished before
    if what == "one rank":
        pids = [chance.choice(pids)]
    elif what == "mpirun":
        pids = [job.process.pid]
    elif what == "stop and kill":
        send_signal(pids, signal.SIGSTOP)
        time.sleep(chance.uniform(0.0, 1.0))
    send_signal(pids)

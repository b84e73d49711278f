"""What ails a training is said once, and what ails none is not said."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Iterator

import pytest

from mpitrain.record.events import Pace, StepRow
from mpitrain.record.health import Health
from mpitrain.world import Node, World

WORLD = World(
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=0,
    nodes=(Node(hostname="gpu01", ranks=(0, 1)), Node(hostname="gpu02", ranks=(2, 3))),
)

FAIR = Pace(
    epoch=1,
    step=20,
    num_steps=20,
    num_samples=1280,
    seconds=2.0,
    data_seconds=0.02,
    compute_seconds=1.6,
    communication_seconds=0.2,
    wait_seconds=0.1,
    slowest_rank=1,
    slowest_steps=6,
    late_seconds=0.1,
)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """All warnings until now."""
    messages: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("mpitrain").addHandler(ear)
    yield messages
    logging.getLogger("mpitrain").removeHandler(ear)


def told(health: Health, pace: Pace, num: int = 30, **changes: float) -> None:
    for _ in range(num):
        health.pace_done(dataclasses.replace(pace, **changes))


def test_a_fair_training_hears_nothing(said: list[str]) -> None:
    told(Health(WORLD, "auto", "runs/a"), FAIR, 200)
    assert said == []


def test_ranks_that_wait_for_samples_are_told_the_flag(said: list[str]) -> None:
    health = Health(WORLD, "2", "runs/a")
    told(health, FAIR, data_seconds=0.7)
    (words,) = said
    assert "35 %" in words
    assert "--num-workers (now 2)" in words


def test_the_first_samples_may_take_long(said: list[str]) -> None:
    health = Health(WORLD, "2", "runs/a")
    told(health, FAIR, 1, data_seconds=60.0, seconds=62.0)
    told(health, FAIR, 100)
    assert said == []


def test_a_rank_that_is_late_again_and_again_is_named(said: list[str]) -> None:
    health = Health(WORLD, "0", "runs/a")
    told(health, FAIR, slowest_rank=3, slowest_steps=18, late_seconds=0.4)
    (words,) = said
    assert "[rank 3/4 gpu02] is the last in 90 % of the steps" in words
    assert "(20 %)" in words
    told(health, FAIR, slowest_rank=0, slowest_steps=18, late_seconds=0.4)
    assert "[rank 0/4 gpu01]" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"slowest_rank": 3, "slowest_steps": 18, "late_seconds": 0.1},  # by little
        {"slowest_rank": 3, "slowest_steps": 6, "late_seconds": 0.4},  # seldom
        {"slowest_rank": -1, "slowest_steps": 0, "late_seconds": 0.0},  # alone
    ],
)
def test_a_rank_that_is_late_by_chance_is_not_named(
    said: list[str], changes: dict[str, float]
) -> None:
    told(Health(WORLD, "0", "runs/a"), FAIR, 100, **changes)
    assert said == []


def test_a_rank_that_is_late_for_a_while_is_not_named(said: list[str]) -> None:
    health = Health(WORLD, "0", "runs/a")
    for turn in range(20):
        told(health, FAIR, 5, slowest_rank=turn % 4, slowest_steps=18, late_seconds=0.4)
    assert said == []


def losses(health: Health, values: list[float]) -> None:
    rows = [
        StepRow(epoch=1, step=step, loss=loss, lr=0.1, gradient_norm=1.0)
        for step, loss in enumerate(values, start=1)
    ]
    for first in range(0, len(rows), 23):
        health.rows_done(rows[first : first + 23])
        if first % 2:  # a pace tells of several epochs
            health.pace_done(FAIR)
    health.pace_done(FAIR)


@pytest.mark.parametrize("before", [200, 204, 300])
def test_a_loss_that_jumps_is_told_with_the_cure(said: list[str], before: int) -> None:
    noise = random.Random(1)
    health = Health(WORLD, "0", "runs/a")
    usual = [0.4 * math.exp(noise.gauss(0, 0.1)) for _ in range(before)]
    losses(health, [*usual, 8.3, 0.4, 9.0])
    (words,) = said
    assert f"jumped to 8.3 in step {before + 1}, from about 0.4" in words
    assert "--clip-grad-norm" in words


@pytest.mark.parametrize("seed", range(5))
def test_losses_that_fall_and_scatter_are_usual(said: list[str], seed: int) -> None:
    noise = random.Random(seed)
    fall = [2.3 * math.exp(-step / 300) + 0.001 for step in range(5000)]
    losses(
        Health(WORLD, "0", "runs/a"),
        [it * math.exp(noise.gauss(0, 0.8)) for it in fall],
    )
    assert said == []


def test_losses_that_are_no_numbers_are_others_business(said: list[str]) -> None:
    losses(Health(WORLD, "0", "runs/a"), [math.nan, 0.0, math.inf] * 200)
    assert said == []

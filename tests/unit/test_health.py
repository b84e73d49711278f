"""What ails a training is said once, and what ails none is not said."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.mpi.world import Node, World
from mpitrain.record.health import HealthCheck
from mpitrain.train.metrics import Throughput

WORLD = World(
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=0,
    nodes=(Node(hostname="gpu01", ranks=(0, 1)), Node(hostname="gpu02", ranks=(2, 3))),
)

FAIR = Throughput(
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


def trainer(*, num_workers: Any = "2", is_in_memory: bool = False) -> Any:
    loader = SimpleNamespace(samples=SimpleNamespace(is_in_memory=is_in_memory))
    data = SimpleNamespace(train_loader=loader)
    return SimpleNamespace(
        engine=SimpleNamespace(world=WORLD, data=data),
        config=SimpleNamespace(num_workers=num_workers),
    )


TRAINER = trainer()


def told(
    health: HealthCheck,
    fair: Throughput,
    num: int = 30,
    of: Any = TRAINER,
    **changes: Any,
) -> None:
    for _ in range(num):
        health.on_throughput(of, dataclasses.replace(fair, **changes))


def test_a_fair_training_hears_nothing(said: list[str]) -> None:
    told(HealthCheck("runs/a"), FAIR, 200)
    assert said == []


def test_ranks_that_wait_for_samples_are_told_the_flag(said: list[str]) -> None:
    health = HealthCheck("runs/a")
    told(health, FAIR, data_seconds=0.7)
    (words,) = said
    assert "35 %" in words
    assert "--num-workers auto finds (now 2)" in words


@pytest.mark.parametrize(("found", "words"), [(0, "0"), (None, "the default")])
def test_no_workers_are_not_the_default(
    found: int | None, words: str, said: list[str]
) -> None:
    of = trainer(num_workers=found)
    told(HealthCheck("runs/a"), FAIR, of=of, data_seconds=0.7)
    assert f"(now {words})" in said[0]


def test_more_workers_do_not_help_samples_in_memory(said: list[str]) -> None:
    of = trainer(is_in_memory=True)
    told(HealthCheck("runs/a"), FAIR, of=of, data_seconds=0.7)
    (words,) = said
    assert "35 % of a step: the samples are in memory; gathering" in words
    assert "image" not in words
    assert "num-workers" not in words
    assert "shards" not in words


def test_the_first_samples_may_take_long(said: list[str]) -> None:
    health = HealthCheck("runs/a")
    told(health, FAIR, 1, data_seconds=60.0, seconds=62.0)
    told(health, FAIR, 100)
    assert said == []


def test_a_rank_that_is_late_again_and_again_is_named(said: list[str]) -> None:
    health = HealthCheck("runs/a")
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
    told(HealthCheck("runs/a"), FAIR, 100, **changes)
    assert said == []


def test_a_rank_that_is_late_for_a_while_is_not_named(said: list[str]) -> None:
    health = HealthCheck("runs/a")
    for turn in range(20):
        told(health, FAIR, 5, slowest_rank=turn % 4, slowest_steps=18, late_seconds=0.4)
    assert said == []

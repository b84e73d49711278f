"""Where the time of steps goes, by a CPU's clock and by marks in a GPU's stream."""

from __future__ import annotations

import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mpitrain.record.times import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    NUM_PHASES,
    UPDATE,
    Seconds,
)
from mpitrain.train.clock import Clock, DeviceClock
from mpitrain.train.pace import pace_of, times_of


def rows(clock: Clock) -> tuple[list[Seconds], list[Seconds]]:
    """Take what the clock has, a list for each step."""
    laps, between = clock.take()
    steps = range(0, len(laps), NUM_PHASES)
    return [list(laps[it : it + NUM_PHASES]) for it in steps], between


def test_each_phase_has_the_time_until_the_next() -> None:
    began = time.perf_counter()
    clock = Clock()
    clock.enter(DATA)
    time.sleep(0.02)
    clock.enter(FORWARD)
    time.sleep(0.05)
    clock.enter(UPDATE)
    time.sleep(0.02)
    clock.end(is_step=True, then=DATA)
    (seconds,), between = rows(clock)
    assert not between
    assert not clock.laps
    assert seconds[DATA] >= 0.02
    assert seconds[FORWARD] >= 0.05
    assert seconds[UPDATE] >= 0.02
    assert clock.phase == DATA
    assert sum(seconds) <= time.perf_counter() - began


@pytest.mark.parametrize("is_sure", [True, False], ids=["weights", "loss"])
def test_the_wait_for_others_begins_where_the_own_gradients_are_there(
    is_sure: bool,
) -> None:
    engine: Any = torch.autograd.Variable._execution_engine

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)  # computes
            return grad

    def all_there(*_: object) -> None:
        # As DDP does: at the end of backward it waits for the other ranks.
        engine.queue_callback(lambda: time.sleep(0.5))

    # Of the order in which a model names them, nothing is known.
    early, weight, also_early = (torch.ones((), requires_grad=True) for _ in range(3))
    weights = [early, weight, also_early]
    following = weights if is_sure else []
    # Where DDP has its hooks: behind what adds a gradient to a weight's.
    adding = weight.expand_as(weight).grad_fn.next_functions[0][0]
    adding.register_hook(all_there)
    here = []

    class Heard(Clock):
        def enter(self, phase: int) -> None:
            super().enter(phase)
            if phase == COMMUNICATION:
                here.append(float(weight.grad or 0.0))

    clock = Heard()
    for step in range(3):
        clock.follow(following)
        assert clock.is_following == (is_sure and step > 0)
        loss = Slow.apply(weight * 1) * early * also_early
        clock.enter(FORWARD)
        if not clock.is_following:
            clock.enter_when_computed(loss)
        clock.enter(BACKWARD)
        loss.backward()
        clock.enter(UPDATE)
        clock.end(is_step=True, then=DATA)
    for seconds in rows(clock)[0]:
        assert 0.05 <= seconds[BACKWARD] < 0.5 <= seconds[COMMUNICATION] < 1
    assert here == [1.0, 2.0, 3.0], "to add to a gradient is to compute"
    # A gradient that the forward pass asks for is no end of a backward pass.
    clock.enter(FORWARD)
    (weight * 2).backward()
    assert clock.phase == FORWARD
    # No other weight has a hook, nor ever had one: that costs for ever.
    assert len(weight._post_accumulate_grad_hooks or ()) == is_sure
    clock.follow([])
    assert not weight._post_accumulate_grad_hooks
    hooks = [(it._backward_hooks, it._post_accumulate_grad_hooks) for it in weights]
    assert hooks[0] == hooks[2] == (None, None)
    assert hooks[1][0] is None


@dataclass
class Gpu:
    """A stream of work: what is put in is done when the clock has gone so far."""

    done_at: float = 0.0
    now: float = 0.0
    marks: int = 0

    def compute(self, seconds: float) -> None:
        self.done_at = max(self.done_at, self.now) + seconds


@dataclass
class Mark:
    gpu: Gpu
    at: float = field(default=0.0)

    def record(self, stream: object) -> None:
        assert stream == "stream"
        self.at = max(self.gpu.done_at, self.gpu.now)

    def query(self) -> bool:
        return self.gpu.now > self.at  # a moment after it has come by

    def synchronize(self) -> None:
        self.gpu.now = max(self.gpu.now, self.at + 1e-9)

    def elapsed_time(self, other: Mark) -> float:
        assert self.query()
        assert other.query()
        return 1000 * (other.at - self.at)


def test_a_gpus_time_is_known_when_it_has_come_by() -> None:
    gpu = Gpu()

    def make_mark() -> Mark:
        gpu.marks += 1
        return Mark(gpu)

    clock = DeviceClock(make_mark, "stream")
    clock.enter(DATA)
    for step in range(50):
        gpu.now += 0.5  # this rank waits for samples, and its GPU with it
        clock.enter(FORWARD)
        gpu.compute(2.0)
        clock.enter(BACKWARD)
        gpu.compute(4.0)
        clock.enter(UPDATE)
        gpu.now = gpu.done_at  # the norm is asked for
        gpu.compute(0.25)  # and the weights change by and by
        clock.end(is_step=True, then=DATA)
        assert len(clock.laps) == step * NUM_PHASES  # not known yet
        gpu.now = gpu.done_at + 1e-9
    laps, between = rows(clock)
    assert len(laps) == 50
    assert not between
    for seconds in laps:
        assert seconds[DATA] == pytest.approx(0.5)
        assert seconds[FORWARD] == pytest.approx(2.0)
        assert seconds[BACKWARD] == pytest.approx(4.0)
        assert seconds[UPDATE] == pytest.approx(0.25)
    assert gpu.marks < 20  # they are used again


def of_ranks(seconds: torch.Tensor) -> Any:
    """Return what ranks tell each other of `(ranks, steps, phases)`."""
    return np.array([times_of(array("d", it.flatten()), 0) for it in seconds])


def test_the_rank_that_waits_least_is_the_last() -> None:
    # Rank 0 is half a second late before each step begins, rank 2 computes the longest.
    seconds = torch.zeros(3, 4, NUM_PHASES, dtype=torch.float64)
    seconds[..., FORWARD] = torch.tensor([1.0, 1.0, 1.01])[:, None]
    seconds[..., COMMUNICATION] = torch.tensor([0.05, 0.55, 0.54])[:, None]
    pace = pace_of(of_ranks(seconds), epoch=1, step=4, num_samples=4, seconds=4.4)
    assert (pace.slowest_rank, pace.slowest_steps) == (0, 4)
    assert pace.late_seconds == pytest.approx(4 * (0.54 - 0.05))


def test_at_the_end_all_is_told_though_a_gpu_be_busy() -> None:
    gpu = Gpu()
    clock = DeviceClock(lambda: Mark(gpu), "stream")
    clock.enter(EVALUATION)
    gpu.compute(2.0)
    clock.close()
    assert not clock.laps
    assert clock.between[0][EVALUATION] == pytest.approx(2.0)


def test_what_is_between_steps_is_no_step() -> None:
    clock = Clock()
    clock.enter(EVALUATION)
    time.sleep(0.01)
    clock.end(is_step=False, then=DATA)
    clock.sum_up()
    assert not clock.laps
    assert clock.between[0][EVALUATION] >= 0.01


def test_marks_are_summed_up_in_another_thread_while_others_are_made() -> None:
    clock = Clock()
    began = clock.sum_up()[1]
    is_over = threading.Event()
    watched: list[bool] = []

    def watch() -> None:
        while not is_over.is_set():
            phase, since = clock.sum_up()
            watched.append(phase in (DATA, FORWARD) and since >= began)

    clock.enter(DATA)
    thread = threading.Thread(target=watch)
    thread.start()
    num_steps = 0
    while num_steps < 20_000 or len(watched) < 100:
        clock.enter(FORWARD)
        clock.end(is_step=True, then=DATA)
        num_steps += 1
    is_over.set()
    thread.join()
    _, since = clock.sum_up()
    laps, between = rows(clock)
    assert all(watched)
    assert len(laps) == num_steps
    assert not between
    assert sum(map(sum, laps)) + sum(clock.seconds) == pytest.approx(since - began)
    assert min(map(min, laps)) >= 0.0


def test_pace_names_the_rank_that_the_others_wait_for() -> None:
    # Three ranks, four steps: rank 2 takes 0.3 s longer to its gradients in three.
    seconds = torch.zeros(3, 4, NUM_PHASES, dtype=torch.float64)
    seconds[..., DATA] = 0.1
    seconds[..., FORWARD] = 0.4
    seconds[..., BACKWARD] = 0.6
    seconds[2, :3, BACKWARD] += 0.3
    seconds[0, 3, FORWARD] += 0.3
    there = seconds.sum(2)
    seconds[..., COMMUNICATION] = there.amax(0) + 0.05 - there
    pace = pace_of(of_ranks(seconds), 2, 9, 256, seconds=4 * 1.45)
    assert (pace.slowest_rank, pace.slowest_steps) == (2, 3)
    assert pace.late_seconds == pytest.approx(3 * 0.3)
    assert pace.communication_seconds == pytest.approx(4 * 0.05)
    assert pace.wait_seconds == pytest.approx(4 * 0.3 * 2 / 3)
    assert pace.gpu_bytes is None
    whole = (
        pace.data_seconds
        + pace.compute_seconds
        + pace.communication_seconds
        + pace.wait_seconds
    )
    assert whole == pytest.approx(pace.seconds)

"""Where the time of steps goes, by a CPU's clock and by events in a GPU's stream."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mpitrain.train.metrics import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    EVALUATION,
    FORWARD,
    NUM_PHASES,
    OTHER,
    UPDATE,
)
from mpitrain.train.step_metrics import summary_of, throughput_of
from mpitrain.train.timer import GpuTimer, Seconds, Timer


def rows(timer: Timer) -> tuple[list[Seconds], list[Seconds]]:
    """Take the times, a list for each step."""
    steps, between = timer.take()
    starts = range(0, len(steps), NUM_PHASES)
    return [list(steps[it : it + NUM_PHASES]) for it in starts], between


def test_the_innermost_span_has_the_time() -> None:
    began = time.perf_counter()
    timer = Timer()
    with timer("evaluation"):
        time.sleep(0.02)
        with timer("forward"):
            time.sleep(0.05)
        time.sleep(0.02)
    time.sleep(0.03)
    timer.end_step()
    (seconds,), between = rows(timer)
    assert not between
    assert not timer.pending.steps
    assert seconds[EVALUATION] >= 0.04
    assert seconds[FORWARD] >= 0.05
    assert seconds[OTHER] >= 0.03
    assert timer.stack == [OTHER]
    assert sum(seconds) <= time.perf_counter() - began


def test_after_an_exception_the_phase_stays() -> None:
    timer = Timer()
    with pytest.raises(KeyError), timer("forward"):
        raise KeyError
    assert timer.phase == FORWARD


def test_the_wait_for_others_begins_where_the_own_gradients_are_there() -> None:
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

    early, weight, also_early = (torch.ones((), requires_grad=True) for _ in range(3))
    # Where DDP has its hooks: behind what adds a gradient to a weight's.
    adding = weight.expand_as(weight).grad_fn.next_functions[0][0]
    adding.register_hook(all_there)
    here = []

    class Noting(Timer):
        def mark(self, phase: int) -> None:
            super().mark(phase)
            if phase == COMMUNICATION:
                here.append(float(weight.grad or 0.0))

    timer = Noting()
    for _ in range(3):
        with timer("forward"):
            loss = Slow.apply(weight * 1) * early * also_early
        timer.mark_gradients(loss)
        with timer("backward"):
            loss.backward()
        timer.end_step()
    for seconds in rows(timer)[0]:
        assert 0.05 <= seconds[BACKWARD] < 0.5 <= seconds[COMMUNICATION] < 1
    assert here == [1.0, 2.0, 3.0], "to add to a gradient is to compute"
    # A gradient that the forward pass asks for is no end of a backward pass.
    with timer("forward"):
        inner = weight * 2
        timer.mark_gradients(inner)
        inner.backward()
        assert timer.phase == FORWARD


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

    def make_event() -> Mark:
        gpu.marks += 1
        return Mark(gpu)

    timer = GpuTimer(make_event, "stream")
    for step in range(50):
        with timer("data"):
            gpu.now += 0.5  # this rank waits for samples, and its GPU with it
        with timer("forward"):
            gpu.compute(2.0)
        with timer("backward"):
            gpu.compute(4.0)
        with timer("update"):
            gpu.now = gpu.done_at  # the norm is asked for
            gpu.compute(0.25)  # and the weights change by and by
        timer.end_step()
        assert len(timer.pending.steps) == step * NUM_PHASES  # not known yet
        gpu.now = gpu.done_at + 1e-9
    steps, between = rows(timer)
    assert len(steps) == 50
    assert not between
    for seconds in steps:
        assert seconds[DATA] == pytest.approx(0.5)
        assert seconds[FORWARD] == pytest.approx(2.0)
        assert seconds[BACKWARD] == pytest.approx(4.0)
        assert seconds[UPDATE] == pytest.approx(0.25)
    assert gpu.marks < 30  # they are used again


def of_ranks(seconds: torch.Tensor) -> Any:
    """Return what ranks gather of `(ranks, steps, phases)`."""
    return np.array([summary_of(array("d", it.flatten()), 0) for it in seconds])


def test_the_rank_that_waits_least_is_the_last() -> None:
    # Rank 0 is half a second late before each step begins, rank 2 computes the longest.
    seconds = torch.zeros(3, 4, NUM_PHASES, dtype=torch.float64)
    seconds[..., FORWARD] = torch.tensor([1.0, 1.0, 1.01])[:, None]
    seconds[..., COMMUNICATION] = torch.tensor([0.05, 0.55, 0.54])[:, None]
    found = throughput_of(
        of_ranks(seconds), epoch=1, step=4, num_samples=4, seconds=4.4
    )
    assert (found.slowest_rank, found.slowest_steps) == (0, 4)
    assert found.late_seconds == pytest.approx(4 * (0.54 - 0.05))


def test_times_are_complete_though_a_gpu_is_busy() -> None:
    gpu = Gpu()
    timer = GpuTimer(lambda: Mark(gpu), "stream")
    with timer("evaluation"):
        gpu.compute(2.0)
    timer.end_step(is_step=False)
    steps, between = timer.take()
    assert not steps
    assert between[0][EVALUATION] == pytest.approx(2.0)


def test_the_time_between_epochs_is_no_step() -> None:
    timer = Timer()
    with timer("evaluation"):
        time.sleep(0.01)
    timer.end_step(is_step=False)
    assert not timer.pending.steps
    assert timer.pending.between[0][EVALUATION] >= 0.01


def test_a_throughput_names_the_rank_that_the_others_wait_for() -> None:
    # Three ranks, four steps: rank 2 takes 0.3 s longer to its gradients in three.
    seconds = torch.zeros(3, 4, NUM_PHASES, dtype=torch.float64)
    seconds[..., DATA] = 0.1
    seconds[..., FORWARD] = 0.4
    seconds[..., BACKWARD] = 0.6
    seconds[2, :3, BACKWARD] += 0.3
    seconds[0, 3, FORWARD] += 0.3
    there = seconds.sum(2)
    seconds[..., COMMUNICATION] = there.amax(0) + 0.05 - there
    found = throughput_of(of_ranks(seconds), 2, 9, 256, seconds=4 * 1.45)
    assert (found.slowest_rank, found.slowest_steps) == (2, 3)
    assert found.late_seconds == pytest.approx(3 * 0.3)
    assert found.communication_seconds == pytest.approx(4 * 0.05)
    assert found.wait_seconds == pytest.approx(4 * 0.3 * 2 / 3)
    assert found.gpu_bytes is None
    whole = (
        found.data_seconds
        + found.compute_seconds
        + found.communication_seconds
        + found.wait_seconds
    )
    assert whole == pytest.approx(found.seconds)

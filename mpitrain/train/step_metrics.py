"""The metrics and the throughput of steps, kept until the ranks reduce them.

`report_steps`, about every two seconds, communicates in this order:

    PendingSteps.sync          all-gather: each rank's seconds, norm, sums of each step
                               all-reduce: losses by micro-batch, if these are fixed
    TrainData.take_skipped     all-reduce, if samples may be skipped
    take_samples_per_shard     all-reduce, if a stream has shards
    callbacks
    take_throughput            all-gather: each rank's times, if seconds enough are done

When it is called is decided by numbers that are equal on all ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.errors import UsageError
from mpitrain.exact_sum import sum_exactly
from mpitrain.torch_compat import all_gather_flat
from mpitrain.train.means import Sum
from mpitrain.train.metrics import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    NUM_PHASES,
    StepMetrics,
    Throughput,
    TrainState,
    mean,
)
from mpitrain.train.timer import StepSeconds

SYNC_SECONDS = 2.0  # about how often the ranks synchronize the metrics of their steps

MAX_STEPS = 512  # between two synchronizations: steps may become slower
MAX_ROWS = 1 << 18  # steps times ranks: every rank receives so many numbers

MAX_NORM_DIFFERENCE = 1e-3  # between ranks, relative

THROUGHPUT_SECONDS = 1.25
"""Seconds of steps that a `Throughput` covers at least, across epochs; fewer before a
checkpoint and at the end. Less than the time between two synchronizations."""


class MicroBatchLosses(NamedTuple):
    """The losses of one micro-batch."""

    indices: Indices  # numbers of its samples, int64 `(N,)`
    total: Tensor  # sum of their losses, `()`, on the device
    number: int = 0  # of the micro-batch in the step, if these are fixed
    sums: Mapping[
        str, Sum
    ] = {}  # of all losses by name, detached; the first is `total`

    def columns(self) -> Iterator[Tensor]:
        """Yield the sum of each loss, and of its weights if it has some."""
        for total, weight in self.sums.values():
            yield total
            if weight is not None:
                yield weight


class _Step(NamedTuple):
    losses: list[MicroBatchLosses]
    lrs: list[float]  # of the parameter groups
    grad_norm: float | Tensor  # not finite: the step was not applied

    @property
    def is_applied(self) -> bool:
        """Whether the weights have changed."""
        return math.isfinite(self.grad_norm)


class PendingSteps:
    """Steps whose metrics or throughput the ranks have not reduced yet."""

    def __init__(self, device: str, micro_batch_size: int | None = None) -> None:
        """``micro_batch_size``: where micro-batches do not depend on the ranks."""
        self._device = device
        self._micro_batch_size = micro_batch_size
        self._steps: list[_Step] = []
        self._sync_every = 1  # equal on all ranks
        # Of the last `sync`: the time of each rank, and the sums of losses by step.
        self.micro_batch_seconds: list[float] = []
        self.micro_batch_losses: list[list[float]] = []  # with fixed micro-batches
        self._clear_throughput()

    def _clear_throughput(self) -> None:
        self._step_seconds: StepSeconds = array("d")
        self._num_samples = 0
        # Of the steps since the last `Throughput`, on this rank and on the slowest.
        # Less than the sum of the maxima, where ranks are late by turns.
        self._seconds = self._max_seconds = 0.0
        self._until = 0, 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_sync_due(self) -> bool:
        """Whether it is time to call `sync`; equal on all ranks."""
        return len(self._steps) >= self._sync_every

    def reset_interval(self) -> None:
        """Forget how long steps take: those of another stage may be much slower."""
        self._sync_every = 1

    def add(
        self,
        losses: list[MicroBatchLosses],
        grad_norm: float | Tensor,
        lrs: list[float],
    ) -> None:
        """Add a step: its gradient norm, and learning rates of parameter groups."""
        self._steps.append(_Step(losses, lrs, grad_norm))

    def fetch_norms(self) -> Iterator[tuple[int, list[MicroBatchLosses], float]]:
        """Wait for the gradient norms that are on the device.

        Yields place, losses and norm of each of those steps that was not applied.
        """
        steps = enumerate(self._steps)
        waiting = [place for place, it in steps if isinstance(it.grad_norm, Tensor)]
        if not waiting:
            return
        # In one stack: each number alone would wait for the GPU.
        norms: Any = [self._steps[place].grad_norm for place in waiting]
        for place, norm in zip(waiting, torch.stack(norms).tolist(), strict=True):
            step = self._steps[place] = self._steps[place]._replace(grad_norm=norm)
            if not step.is_applied:
                yield place, step.losses, norm

    def drop_from(self, place: int) -> None:
        """Forget a step and those after it."""
        del self._steps[place:]

    def sync(
        self, state: TrainState, seconds: float, step_seconds: StepSeconds
    ) -> list[StepMetrics]:
        """Sum the losses of the steps since the last call over all ranks.

        Collective over the default group. There are such steps; they took ``seconds``
        on this rank, and are counted in ``state.step`` already. Their norms are here.
        """
        steps, self._steps = self._steps, []
        num = len(steps)
        self._step_seconds.extend(step_seconds)
        self._seconds += seconds
        # Gathered and summed in the order of the ranks: an all-reduce may take another
        # order for each place of its tensor, and so for each number of steps.
        own = (
            self._seconds,
            _micro_batch_seconds(steps, step_seconds),
            float(steps[-1].grad_norm),
        )
        of_ranks = all_gather(array("d", (*own, *_sums_of(steps))), self._device)
        self.micro_batch_seconds = of_ranks[:, 1].tolist()
        _check_equal_norms(of_ranks[:, 2].tolist(), state.step)
        found = functools.reduce(np.add, of_ranks)[len(own) :].reshape(-1, num)
        counts, *columns = found.tolist()
        if self._micro_batch_size is not None:
            columns = self._sums_by_number(steps, counts, self._micro_batch_size)
        rest = iter(columns)
        sums = {  # of values, and of weights
            name: (next(rest), counts if it.weight is None else next(rest))
            for name, it in steps[0].losses[0].sums.items()
        }
        for i, step in enumerate(steps):
            if step.is_applied:
                _add_sums(
                    state, {name: (it[0][i], it[1][i]) for name, it in sums.items()}
                )
                state.num_samples += int(counts[i])
            else:
                state.skipped_steps += 1
        # More than before by at least the least `seconds`, so no division by zero.
        before, self._max_seconds = self._max_seconds, float(of_ranks[:, 0].max())
        self._num_samples += int(sum(counts))
        self._until = state.epoch, state.step
        # Of gathered numbers alone: all ranks are to come back after the same step.
        wanted = round(SYNC_SECONDS * num / (self._max_seconds - before))
        most = min(2 * self._sync_every, MAX_STEPS, MAX_ROWS // len(of_ranks))
        self._sync_every = max(1, min(wanted, most))
        numbers = range(state.step - num + 1, state.step + 1)
        means = {name: list(map(mean, *it)) for name, it in sums.items()}
        losses = means.pop("loss")
        others = [{name: it[i] for name, it in means.items()} for i in range(num)]
        lrs = [step.lrs[0] for step in steps]
        norms = [float(step.grad_norm) for step in steps]
        groups = [tuple(it.lrs) if len({*it.lrs}) > 1 else () for it in steps]
        epochs = itertools.repeat(state.epoch)
        rows = zip(epochs, numbers, losses, lrs, norms, groups, others, strict=False)
        return list(itertools.starmap(StepMetrics, rows))

    def _sums_by_number(
        self, steps: list[_Step], counts: list[float], size: int
    ) -> list[list[float]]:
        """Sum the columns of each step in the same order on any number of ranks."""
        nums = [-(-int(count) // size) for count in counts]
        starts = [0, *itertools.accumulate(nums)]
        num_columns = len(list(steps[0].losses[0].columns()))
        shape = num_columns, starts[-1]
        whole = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for start, num, step in zip(starts, nums, steps, strict=False):
            for found in step.losses:
                if found.number < num:  # else it is of padding
                    for column, value in enumerate(found.columns()):
                        whole[column, start + found.number] = value
        columns = []
        for row in sum_over_ranks(whole).tolist():
            rest = iter(row)
            columns.append([list(itertools.islice(rest, num)) for num in nums])
        self.micro_batch_losses = columns[0]
        return [[sum_exactly(values) for values in column] for column in columns]

    def take_throughput(self, min_seconds: float) -> Throughput | None:
        """Return the throughput since the last one, if it covers enough; collective."""
        if not self._num_samples or self._max_seconds < min_seconds:
            return None
        gpu_bytes = 0
        if self._device != "cpu":
            module = torch.get_device_module(self._device)
            gpu_bytes = module.max_memory_allocated(self._device)
        times = all_gather(summary_of(self._step_seconds, gpu_bytes), self._device)
        found = throughput_of(
            times, *self._until, self._num_samples, seconds=self._max_seconds
        )
        self._clear_throughput()
        return found


def report_steps(trainer: Any, *, flush: bool) -> None:
    """Gather the metrics of a trainer's pending steps, and call its hooks; collective.

    See `Trainer.sync_metrics`.
    """
    state, engine, pending = trainer.state, trainer.engine, trainer.pending
    steps: list[StepMetrics] = []
    if len(pending):
        # Before the ranks wait for each other: of one that hangs there the times of
        # its last steps are known.
        trainer.step_times = trainer.timer.take()
        seconds = time.perf_counter() - trainer.synced_at
        steps = pending.sync(state, seconds, trainer.step_times.steps)
        trainer.micro_batch_losses = pending.micro_batch_losses
        engine.strategy.rebalance(pending.micro_batch_seconds)
    state.skipped_samples += engine.data.take_skipped()
    if state.epoch_step:
        counts = engine.data.take_samples_per_shard()
        pairs = itertools.zip_longest(state.samples_per_shard, counts, fillvalue=0)
        state.samples_per_shard = [sum(pair) for pair in pairs]
    if steps:  # the time between two epochs is no time of steps
        trainer.synced_at += seconds
        state.steps_seconds += seconds
        trainer.call("on_metrics", steps)
    throughput = pending.take_throughput(0.0 if flush else trainer.throughput_seconds)
    if throughput is not None:
        trainer.call("on_throughput", throughput)


def all_gather(numbers: array[float], device: str) -> NDArray[np.float64]:
    """Gather as many numbers of each rank, `(world_size, length)`; collective."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return np.array([numbers])
    # An array's memory as it is: a list would be converted number by number.
    mine = torch.frombuffer(numbers, dtype=torch.float64).to(device)
    found = mine.new_empty(world_size * len(numbers))  # gloo takes no other shape
    all_gather_flat(found, mine)
    return found.cpu().numpy().reshape(world_size, -1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """All-reduce values of which each is 0 on all ranks but one; collective.

    The sum is exact: the same bits, whatever the order of ranks.
    """
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def _add_sums(state: TrainState, sums: Mapping[str, tuple[float, float]]) -> None:
    """Add a step's sums of values and of weights."""
    for name, (total, weight) in sums.items():
        if name == "loss":
            # Of steps before, without weights, it is the number of samples.
            num_before = state.loss_weight
            num_before = state.num_samples if num_before is None else num_before
            state.loss_sum += total
            state.loss_weight = num_before + weight
        else:
            before = state.other_losses.get(name, (0.0, 0.0))
            state.other_losses[name] = [before[0] + total, before[1] + weight]


def _check_equal_norms(norms: list[float], step: int) -> None:
    """Refuse gradients that are not reduced: models of the ranks would drift apart.

    The norms differ in their last digits where the processors do.
    """
    low, high = min(norms), max(norms)
    # False where one is not finite: such a step was left out already.
    if high - low > MAX_NORM_DIFFERENCE * high:
        raise UsageError(
            f"the norm of the gradient in step {step} is {low:.6g} to {high:.6g} on "
            "the ranks; expected the same on all. With ddp: a loss of what the model "
            "returns, not of its derivatives alone (add 0 * outputs.sum()). Of a "
            "custom Strategy: gradients of every weight reduced in reduce_gradients(), "
            "or in the backward pass"
        ).on_all_ranks()


def _micro_batch_seconds(steps: list[_Step], step_seconds: StepSeconds) -> float:
    """Return the mean time of a micro-batch on this rank, without any waiting."""
    busy = sum(sum(step_seconds[p::NUM_PHASES]) for p in (DATA, FORWARD, BACKWARD))
    num = sum(len(part.indices) > 0 for step in steps for part in step.losses)
    return busy / max(num, 1)


def _sums_of(steps: list[_Step]) -> list[float]:
    """Return the samples of each step on this rank, then the columns; few kernels."""
    losses = [micro_batch for step in steps for micro_batch in step.losses]
    columns = zip(*(micro_batch.columns() for micro_batch in losses), strict=True)
    found: list[list[float]] = [[len(micro_batch.indices) for micro_batch in losses]]
    found += [torch.stack(column).tolist() for column in columns]
    if len(losses) == len(steps):  # a micro-batch each: nothing to sum up
        return list(itertools.chain.from_iterable(found))
    return [
        sum(itertools.islice(left, len(step.losses)))
        for left in map(iter, found)
        for step in steps
    ]


_NUM_SUMS = 3  # numbers before those of each step in what `summary_of` returns


def summary_of(step_seconds: StepSeconds, gpu_bytes: int) -> array[float]:
    """Return what `throughput_of` needs of a rank.

    Seconds of data and of computing, of all steps; those bytes; seconds of
    communication of each step.
    """
    sums = np.array(step_seconds).reshape(-1, NUM_PHASES).sum(0).tolist()
    computing = sums[FORWARD] + sums[BACKWARD]
    found = array("d", (sums[DATA], computing, gpu_bytes))
    return found + step_seconds[COMMUNICATION::NUM_PHASES]


def throughput_of(
    times: NDArray[np.float64], epoch: int, step: int, num_samples: int, seconds: float
) -> Throughput:
    """Compute the throughput of steps from the `summary_of` of all ranks.

    The last rank to finish its backward pass waits for nobody: its ``communication`` is
    what the all-reduce takes, and what the others have more is waiting for that rank.
    Waits within the backward pass (FSDP) count as computing.
    """
    world_size = len(times)
    data, computing, gpu_bytes = times[:, :_NUM_SUMS].T
    communication = times[:, _NUM_SUMS:]
    shortest = communication.min(0)
    slowest, slowest_steps, late = -1, 0, 0.0
    if world_size > 1:
        last = communication.argmin(0)
        counts = np.bincount(last, minlength=world_size)
        slowest = int(counts.argmax())
        slowest_steps = int(counts[slowest])
        median = np.sort(communication, 0)[world_size // 2]
        late = float((median - shortest)[last == slowest].sum())
    return Throughput(
        epoch=epoch,
        step=step,
        num_steps=len(shortest),
        num_samples=num_samples,
        seconds=seconds,
        data_seconds=float(data.sum()) / world_size,
        compute_seconds=float(computing.sum()) / world_size,
        communication_seconds=float(shortest.sum()),
        wait_seconds=float((communication - shortest).sum()) / world_size,
        slowest_rank=slowest,
        slowest_steps=slowest_steps,
        late_seconds=late,
        gpu_bytes=int(gpu_bytes.max()) or None,
    )

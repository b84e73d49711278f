"""Where the time of steps goes on this rank: spans on a CPU's clock or a GPU's own."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mpitrain.torch_compat import queue_backward_callback
from mpitrain.train.metrics import BACKWARD, COMMUNICATION, NUM_PHASES, OTHER, PHASES

Seconds = list[float]  # seconds of each phase, by its number

StepSeconds: TypeAlias = "array[float]"
"""`Seconds` of several steps, one after another: `(num_steps * NUM_PHASES,)`."""


class StepTimes(NamedTuple):
    """Where the time of some steps went on this rank."""

    steps: StepSeconds  # of each, with what came before it, such as a checkpoint
    between: list[Seconds]  # of what came between the steps of two epochs


# A class, no generator, and one call in it: in the midst of a step this code is in no
# cache, where all that it touches costs.
class _Span:
    """The context manager of one phase; reused for every span of it."""

    def __init__(self, timer: Timer, phase: int) -> None:
        self._phase, self._stack, self._mark = phase, timer.stack, timer.mark

    def __enter__(self) -> None:
        self._stack.append(self._phase)
        self._mark(self._phase)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:  # after an exception the phase stays: a report names it
            self._stack.pop()
            self._mark(self._stack[-1])


class Timer:
    """Measures where a rank's time goes: ``with timer("forward"): ...``.

    Spans nest; the innermost one gets the time. Time outside of all spans is
    ``"other"``. For a CPU, where a call returns when its work is done. `phase` began at
    `since`; `seconds` are of the unfinished step, `pending` of those before it.
    """

    def __init__(self) -> None:
        self.stack = [OTHER]
        self.phase, self.since = OTHER, perf_counter()
        self.seconds: Seconds = [0.0] * NUM_PHASES
        self.pending = StepTimes(array("d"), [])
        self._spans = {name: _Span(self, phase) for phase, name in enumerate(PHASES)}
        self._queue_callback = queue_backward_callback

    def __call__(self, phase: str) -> _Span:
        """Return a span: a context manager that measures one of `PHASES`."""
        return self._spans[phase]

    def mark(self, phase: int) -> None:
        """Count the time from here on as another phase's."""
        now = perf_counter()
        self.seconds[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def reset(self) -> None:
        """Close all spans, after an exception that was expected."""
        del self.stack[1:]
        self.mark(self.stack[0])

    def end_step(self, *, is_step: bool = True) -> None:
        """Say that a step, or the time between two epochs, is over."""
        self.mark(self.stack[-1])
        self._add(is_step=is_step)

    def _add(self, *, is_step: bool) -> None:
        seconds, self.seconds = self.seconds, [0.0] * NUM_PHASES
        if is_step:
            self.pending.steps.extend(seconds)
        else:
            self.pending.between.append(seconds)

    def mark_gradients(self, loss: Tensor) -> None:
        """Let ``communication`` begin where this rank has computed all its gradients.

        To be called before ``backward``: DDP and FSDP queue later what waits, at its
        end, for the other ranks.
        """
        # By a hook of the loss: callbacks can be queued within a backward pass alone,
        # and run at its end in the order in which they were queued.
        loss.register_hook(self._queue_mark)  # type: ignore[no-untyped-call]

    def _queue_mark(self, _: Tensor) -> None:
        if self.stack[-1] == BACKWARD:  # not a gradient that a forward pass asks for
            self._queue_callback(functools.partial(self.mark, COMMUNICATION))

    def take(self) -> StepTimes:
        """Return `pending` up to now, and begin anew. Waits for a GPU."""
        self.synchronize()
        found, self.pending = self.pending, StepTimes(array("d"), [])
        return found

    def synchronize(self) -> None:
        """Wait until the times of all marks are known."""


class GpuTimer(Timer):
    """For a GPU, which works on when a call has returned: marks are CUDA events.

    `phase` and `since` are the CPU's: a GPU may hang. `seconds` and `pending` are of
    the events that the GPU has passed. Events are recorded in ``stream``: ``backward``
    runs in a thread of autograd's, whose current stream is another.
    """

    def __init__(self, make_event: Callable[[], Any], stream: Any) -> None:
        super().__init__()
        self._make_event = make_event
        self._stream = stream
        self._free: list[Any] = []
        self._waiting: deque[tuple[Any, ...]] = deque()
        """Of each mark the phase that ended, its event, and whether a step ended there
        (``True``) or the time between two epochs (``False``), if one did."""
        self._last = self._record()

    def mark(self, phase: int) -> None:
        """Record an event between two phases."""
        self._waiting.append((self.phase, self._record()))
        self.phase, self.since = phase, perf_counter()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self._waiting:
            self._waiting[-1][1].synchronize()
            self._read()

    def _record(self) -> Any:
        # Events that were read are used again: none is made in a later step.
        event = self._free.pop() if self._free else self._make_event()
        event.record(self._stream)
        return event

    def _add(self, *, is_step: bool) -> None:
        self._waiting[-1] += (is_step,)
        self._read()

    def _read(self) -> None:
        # In order, and without waiting: what the GPU has not passed is read later.
        while self._waiting and self._waiting[0][1].query():
            phase, event, *ends = self._waiting.popleft()
            self.seconds[phase] += self._last.elapsed_time(event) / 1000
            self._free.append(self._last)
            self._last = event
            for is_step in ends:
                super()._add(is_step=is_step)


def make_timer(device: str) -> Timer:
    """Return the timer for a device: ``"cpu"``, or such as ``"cuda:0"``."""
    if device == "cpu":
        return Timer()
    module = torch.get_device_module(device)
    make_event = functools.partial(module.Event, enable_timing=True)
    return GpuTimer(make_event, module.current_stream(device))

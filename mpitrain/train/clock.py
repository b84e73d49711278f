"""Where the time of steps goes on this rank: by a CPU's clock, or by a GPU's own."""

from __future__ import annotations

import functools
import math
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mpitrain.record.times import (
    BACKWARD,
    COMMUNICATION,
    NUM_PHASES,
    OTHER,
    Laps,
    Seconds,
)

_STEP, _GAP = NUM_PHASES, 2 * NUM_PHASES
"""Added to the phase of a mark: a step ends there, or what is between two epochs."""


class Clock:
    """For a CPU, where a call returns when its work is done.

    A mark is two numbers at the end of a list, and nothing else: in the midst of a
    step, whatever is touched has long left the caches. They are summed up when somebody
    asks, all at once.

    Attributes:
        seconds: Of all until the present phase, since the last step was over.
        laps: The seconds of each step that is over, since the last `take`, with what
            was before it in its epoch: a checkpoint, the sums of all ranks.
        between: Those of what was between the steps of two epochs. All three are those
            of the last `sum_up`.
        is_following: Whether `enter_when_computed` is not needed.
    """

    def __init__(self) -> None:
        self._marks: list[float] = [OTHER, perf_counter()]
        self._lock = threading.Lock()
        self.laps: Laps = array("d")
        self.between: list[Seconds] = []
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
        self._queue_callback = engine.queue_callback
        self.seconds = [0.0] * NUM_PHASES
        self.is_following = False
        self._followed: Sequence[Tensor] = []
        self._hook: RemovableHandle | None = None

    @property
    def phase(self) -> int:
        """What this rank does at present."""
        return int(self._whole_marks()[-2]) % NUM_PHASES

    def _whole_marks(self) -> list[float]:
        """Return all marks; another thread may be about to make one."""
        marks = self._marks[:]
        return marks[: len(marks) // 2 * 2]

    def enter(self, phase: int) -> None:
        """Count the time from here on as another phase's."""
        marks = self._marks
        marks.append(phase)
        marks.append(perf_counter())

    def end(self, *, is_step: bool, then: int) -> None:
        """Let a step, or what is between steps, be over, and enter a phase."""
        marks = self._marks
        marks.append(then + (_STEP if is_step else _GAP))
        marks.append(perf_counter())

    def sum_up(self) -> tuple[int, float]:
        """Bring `laps`, `between` and `seconds` up to the present phase.

        In any thread.

        Returns:
            That phase, and since when, by `perf_counter`.
        """
        with self._lock:
            marks = np.fromiter(self._whole_marks(), np.float64).reshape(-1, 2)
            present = int(marks[-1, 0]) % NUM_PHASES, float(marks[-1, 1])
            if len(marks) == 1:
                return present
            del self._marks[: marks.size - 2]  # the last phase goes on
            ends, phases = np.divmod(marks[:, 0].astype(np.int64), NUM_PHASES)
            ends[0] = 0  # was summed up before
            rows = np.count_nonzero(ends) + 1
            places = NUM_PHASES * np.cumsum(ends > 0) + phases
            each = np.bincount(
                places[:-1], np.diff(marks[:, 1]), rows * NUM_PHASES
            ).reshape(rows, NUM_PHASES)
            each[0] += self.seconds
            is_step = ends[ends > 0] * NUM_PHASES == _STEP
            self.laps.frombytes(each[:-1][is_step].tobytes())
            self.between += each[:-1][~is_step].tolist()
            self.seconds = each[-1].tolist()
        return present

    def follow(self, weights: Sequence[Tensor]) -> None:
        """Let `enter_when_computed` be needed once, where all steps do the same.

        Args:
            weights: They get their gradients in every ``backward`` from here on, in the
                same order; empty: it is not known which do.
        """
        if weights is self._followed:
            return
        if self._hook is not None:
            self._hook.remove()
        self._hook = None
        self._followed, self.is_following = weights, False

    def enter_when_computed(self, loss: Tensor) -> None:
        """Let the wait for other ranks begin where this one has all its gradients.

        That is before DDP, or FSDP, waits for those of the others at the end of
        ``backward``: what they queue there is queued later, and done in that order.
        A hook of the weight that comes last costs less, and stays.

        Args:
            loss: ``backward`` is called on it next.
        """
        last = last_weight(loss, self._followed)
        if last is None:
            loss.register_hook(self._enter_later)  # type: ignore[no-untyped-call]
        else:
            self.is_following = True
            self._hook = last.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._enter_now
            )

    # A forward pass may ask for gradients, too: its phase is another.

    def _enter_later(self, _: Tensor) -> None:
        if self._marks[-2] == BACKWARD:
            self._queue_callback(functools.partial(self.enter, COMMUNICATION))

    def _enter_now(self, _: Tensor) -> None:
        if self._marks[-2] == BACKWARD:
            self.enter(COMMUNICATION)

    def take(self) -> tuple[Laps, list[Seconds]]:
        """Return `laps` and `between`; both begin anew."""
        self.settle()
        self.sum_up()
        laps, self.laps = self.laps, array("d")
        between, self.between = self.between, []
        return laps, between

    def settle(self) -> None:
        """Know of all that is over, though a GPU be busy with it still."""

    def close(self) -> None:
        """Let what is under way be over."""
        self.end(is_step=False, then=OTHER)
        self.settle()
        self.sum_up()


def last_weight(loss: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
    """Return the weight whose gradient is there last: that of the oldest operation.

    Of those that are ready, autograd takes the newest operation first.

    Args:
        loss: Of a forward pass.
        weights: To choose from; ``None`` is returned where none takes part.

    >>> early, late = (torch.ones((), requires_grad=True) for _ in range(2))
    >>> last_weight((late * 2 + 1) * early, [early, late]) is late
    True
    """
    among = {id(it): it for it in weights}
    todo: list[Any] = [loss.grad_fn] if among else []
    seen: set[Any] = set()
    found: Tensor | None = None
    oldest = math.inf
    while todo:
        node = todo.pop()
        for before, _ in node.next_functions:
            weight = among.get(id(getattr(before, "variable", None)))
            if weight is not None and node._sequence_nr() < oldest:  # noqa: SLF001
                found, oldest = weight, node._sequence_nr()  # noqa: SLF001
            elif before is not None and before not in seen:
                seen.add(before)
                todo.append(before)
    return found


class DeviceClock(Clock):
    """For a GPU, whose work goes on when a call has returned.

    Marks are left in its stream, and read when it has come by.

    Args:
        make_mark: Makes an event of `torch.cuda`'s kind.
        stream: Where they are left. ``backward`` runs in a thread of autograd's, which
            has another one at hand.
    """

    def __init__(self, make_mark: Callable[[], Any], stream: Any) -> None:
        super().__init__()
        self._make_mark = make_mark
        self._stream = stream
        self._free: list[Any] = []
        self._waiting: deque[tuple[int, Any, bool | None]] = deque()
        """Phases, the mark of each one's end, and whether a step ended there."""
        self._last = self._mark_stream()

    def enter(self, phase: int) -> None:
        """Leave a mark between two phases."""
        self._waiting.append((int(self._marks[0]), self._mark_stream(), None))
        self._marks[:] = phase, perf_counter()

    def end(self, *, is_step: bool, then: int) -> None:
        """Likewise; look what the GPU has done."""
        self._waiting.append((int(self._marks[0]), self._mark_stream(), is_step))
        self._marks[:] = then, perf_counter()
        self._read()

    def sum_up(self) -> tuple[int, float]:
        """Do no more than that: what is known is summed up, and a GPU may hang."""
        phase, since = self._whole_marks()
        return int(phase), since

    def settle(self) -> None:
        """Wait for the GPU."""
        if self._waiting:
            self._waiting[-1][1].synchronize()
            self._read()

    def _mark_stream(self) -> Any:
        mark = self._free.pop() if self._free else self._make_mark()
        mark.record(self._stream)
        return mark

    def _read(self) -> None:
        while self._waiting and self._waiting[0][1].query():
            phase, mark, is_step = self._waiting.popleft()
            self.seconds[phase] += self._last.elapsed_time(mark) / 1000
            self._free.append(self._last)
            self._last = mark
            if is_step is not None:
                seconds, self.seconds = self.seconds, [0.0] * NUM_PHASES
                if is_step:
                    self.laps.extend(seconds)
                else:
                    self.between.append(seconds)


def open_clock(device: str) -> Clock:
    """Return the clock for a device: ``"cpu"``, or such as ``"cuda:0"``."""
    if device == "cpu":
        return Clock()
    make_mark = functools.partial(torch.cuda.Event, enable_timing=True)
    return DeviceClock(make_mark, torch.cuda.current_stream(device))

"""Level 1 of the checkpoints of a training: when one goes to memory, and from there.

Level 1 is the memory of the nodes, for a restart within the job; level 2 is the disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.checkpoint.manager import Progress, WriteResult
from mpitrain.checkpoint.memory_folder import MemoryFolder
from mpitrain.checkpoint.memory_manager import MemoryManager
from mpitrain.checkpoint.save_clock import SaveClock
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.record.supervised import Supervision

logger = logging.getLogger("mpitrain")

PRICE = 0.01  # of the time that they may take
MIN_SECONDS = 0.5  # between two: the ranks agree about that often
BACK_OFF_SECONDS = 60.0


def best_interval(cost: float, seconds: float, num_faults: int) -> float:
    """Return the seconds between two checkpoints that take ``cost`` seconds each.

    Young's formula: the interval with which checkpoints and lost work together take
    least, by the rate of faults of this job until now. `PRICE` is the limit.

    >>> round(best_interval(0.005, 60.0, 0), 2), round(best_interval(0.5, 60.0, 0))
    (0.77, 50)
    """
    youngs = math.sqrt(2 * cost * seconds / (num_faults + 1))
    return max(youngs, cost / PRICE, MIN_SECONDS)


class MemoryLevel:
    """The checkpoints in memory of a training under `supervise`.

    All ranks call it at the same steps. Its numbers go with those of the `Checkpointer`
    from rank to rank.

    Attributes:
        saved: The position in the training of the last one.
    """

    COUNT = 3  # of its numbers

    def __init__(
        self,
        folder: MemoryFolder,
        supervision: Supervision,
        world: World,
        ranks: Communicator,
        fraction: float,
    ) -> None:
        self.saved: object = None
        self._folder, self._supervision, self._world = folder, supervision, world
        self._manager = MemoryManager(folder, world, ranks, fraction)
        self._clock = SaveClock(MIN_SECONDS)
        self._began = time.monotonic()
        self._copy_seconds = self._saved_at = 0.0
        self._costs: list[float] = []
        self._is_first = True

    @property
    def is_due(self) -> bool:
        """Whether to save now; equal on all ranks."""
        manager = self._manager
        return self._clock.may_save and not manager.refusal and not manager.is_busy

    def own_numbers(self) -> list[int]:
        """Return what the ranks exchange, by all-reduce(MAX); local."""
        number = self._clock.own_number() if self._world.is_rank_zero else 0
        return [number, *self._manager.local_progress().to_maxima()]

    def apply(self, numbers: Sequence[int]) -> None:
        """Go on by the numbers of all ranks; collective."""
        self._clock.apply(numbers[0])
        result = self._manager.apply_progress(Progress.from_maxima(numbers[1:]))
        if result is not None:
            self._end_save(result)

    def save(self, position: object, collect: Callable[[], Sequence[Any]]) -> None:
        """Copy what ``collect`` returns, the arguments of `CheckpointManager.save`."""
        began = time.monotonic()
        self._clock.is_due = False
        if position == self.saved:
            return
        self.saved, self._saved_at = position, began
        self._manager.save(*collect())
        self._copy_seconds = time.monotonic() - began
        self._clock.restart()
        if self._manager.refusal and self._world.is_rank_zero:
            logger.warning(
                "no checkpoints in memory: %s. After a fault the training resumes from "
                "the disk",
                self._manager.refusal,
            )

    def close(self) -> None:
        """Complete what is written, and remove all: nobody will resume from memory.

        Collective over all ranks.
        """
        # Its threads send to partners, by the communicator that `close` frees.
        while self._manager.finish("writing a checkpoint to memory") is not None:
            pass
        self._manager.close()
        self._folder.remove()

    def _end_save(self, result: WriteResult) -> None:
        if result.error:
            if self._world.is_rank_zero:
                logger.warning(
                    "the checkpoint of step %d is not in memory: %s; the next try is "
                    "in %.0f s",
                    *(result.step, result.error, BACK_OFF_SECONDS),
                )
            self.saved = None
            self._clock.restart(back_off_seconds=BACK_OFF_SECONDS)
            return
        cost = self._copy_seconds
        if self._world.device == "cpu":
            # The threads take from the cores of the training, and those of two ranks
            # hold up all at different moments.
            cost += 2 * self._manager.thread_seconds
        if self._is_first:  # with plan and memory, once
            self._is_first = False
            return
        # The least of three: others use the machine, too.
        self._costs = [*self._costs[-2:], cost]
        cost = min(self._costs)
        seconds = self._supervision.seconds + time.monotonic() - self._began
        num_faults = self._supervision.num_restarts
        self._clock.seconds = best_interval(cost, seconds, num_faults)
        self._clock.is_due = False
        # From the copy on, not from the end of the write: that is what work is lost by.
        self._clock.restart(since=self._saved_at)
        logger.info(
            "checkpoint of step %d in memory: %.4f s to copy, %.4f s in all, the next "
            "in %.1f s",
            *(result.step, self._copy_seconds, cost, self._clock.seconds),
        )

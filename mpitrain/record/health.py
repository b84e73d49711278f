"""What ails a training, told once, with the flag that cures it. Rank zero's ear."""

from __future__ import annotations

import logging
import math
import operator
from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from mpitrain.record.events import Pace, Silent, StepRow
from mpitrain.world import World

logger = logging.getLogger("mpitrain")

JUDGED_SECONDS = 10.0
"""Of so many seconds of steps a verdict is made up."""

STARVED = 0.2
"""Share of the time from which ranks wait too long for samples."""

LATE = 0.1
"""Share of the time by which a rank is too late, if it is the last ..."""

LAST = 0.6
"""... in this share of the steps."""

NUM_LOSSES = 200
"""Steps that tell what losses are usual, ..."""

NUM_JUDGED = 50
"""... of so many that come next."""

SPIKE_FACTOR = 3.0
SPIKE_DEVIATIONS = 6.0
"""A loss is a spike so many times above the usual one, and so many standard deviations
of its logarithm: where small losses scatter widely, that is usual, too."""


class Health(Silent):
    """Watches a training's times and losses, and warns.

    Args:
        world: Where rank zero stands.
        num_workers: Processes that read ahead for each rank, in words.
        run_dir: The run folder, as a person would write it.
    """

    def __init__(self, world: World, num_workers: str, run_dir: str) -> None:
        self._run_dir = run_dir
        self._world = world
        self._num_workers = num_workers
        self._paces: list[Pace] = []
        self._rows: list[StepRow] = []
        self._is_first = True
        self._suspect: int | None = None
        self._named: int | None = None
        self._is_starved = False
        self._has_spiked = False
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Keep them until their pace comes."""
        self._rows += rows

    def pace_done(self, pace: Pace) -> None:
        """Look for losses that jump, for ranks that wait, and for whom."""
        rows, self._rows = self._rows, []
        while rows:
            unknown = NUM_LOSSES - len(self._losses)
            num = unknown or NUM_JUDGED  # at first they tell what is usual, no more
            self._judge_losses(rows[:num])
            rows = rows[num:]
        if self._is_first:  # compilers, caches, the first samples
            self._is_first = False
            return
        self._paces.append(pace)
        seconds = sum(it.seconds for it in self._paces)
        if seconds >= JUDGED_SECONDS:
            self._judge_data(seconds)
            self._judge_ranks(seconds)
            self._paces = []

    def _judge_losses(self, rows: Sequence[StepRow]) -> None:
        if self._has_spiked:
            return
        usual = deviation = math.inf
        if len(self._losses) == NUM_LOSSES:
            usual = sum(self._losses) / NUM_LOSSES
            squares = sum(map(operator.mul, self._losses, self._losses))
            deviation = math.sqrt(max(0.0, squares / NUM_LOSSES - usual**2))
        most = usual + max(math.log(SPIKE_FACTOR), SPIKE_DEVIATIONS * deviation)
        for row in rows:
            if 0 < row.loss < math.inf:
                self._losses.append(math.log(row.loss))
                if self._losses[-1] > most:
                    self._warn_of_spike(row, math.exp(usual))
                    return

    def _warn_of_spike(self, row: StepRow, usual: float) -> None:
        self._has_spiked = True
        logger.warning(
            "the loss jumped to %.4g in step %d, from about %.4g: a lower --lr, or "
            "--clip-grad-norm, keeps such steps small; --warmup-epochs, if it is early",
            *(row.loss, row.step, usual),
        )

    def _judge_data(self, seconds: float) -> None:
        waited = sum(it.data_seconds for it in self._paces) / seconds
        if waited > STARVED and not self._is_starved:
            self._is_starved = True
            logger.warning(
                "ranks wait for samples during %.0f %% of a step: more processes that "
                "read ahead may help, --num-workers (now %s), or files that are read "
                "faster; `python -m mpitrain bench data` times both",
                *(100 * waited, self._num_workers),
            )

    def _judge_ranks(self, seconds: float) -> None:
        """Name a rank that is the last in two verdicts, one after the other."""
        last, late = Counter[int](), defaultdict[int, float](float)
        for pace in self._paces:
            last[pace.slowest_rank] += pace.slowest_steps
            late[pace.slowest_rank] += pace.late_seconds
        slowest, num_last = last.most_common(1)[0]
        late_seconds = late[slowest]
        num_steps = sum(it.num_steps for it in self._paces)
        is_late = (
            slowest >= 0
            and num_last >= LAST * num_steps
            and late_seconds > LATE * seconds
        )
        before, self._suspect = self._suspect, slowest if is_late else None
        if is_late and before == slowest != self._named:
            self._named = slowest
            host = next(n.hostname for n in self._world.nodes if slowest in n.ranks)
            logger.warning(
                "[rank %d/%d %s] is the last in %.0f %% of the steps, %.3f s (%.0f %%) "
                "later than the ranks in the middle, and all wait for it: look at "
                "what else runs on that node; `python -m mpitrain check` compares "
                "nodes, `python -m mpitrain report %s` shows when it began",
                *(slowest, self._world.world_size, host),
                *(100 * num_last / num_steps, late_seconds / num_last),
                *(100 * late_seconds / seconds, self._run_dir),
            )

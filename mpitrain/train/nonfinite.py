"""What follows a loss or gradient that is not finite: skip the step, or stop."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from mpitrain.errors import NonFiniteError, collective_error
from mpitrain.mpi.world import World
from mpitrain.train.optimizer import LossScale
from mpitrain.train.step_metrics import Losses

logger = logging.getLogger("mpitrain")

MAX_NAMED = 16
"""Samples that a message names."""

_Found = list[list[tuple[str, list[int]]]]


class NonFiniteGuard:
    """Names the samples whose loss is not finite, and skips the step or stops."""

    def __init__(self, world: World, on_nonfinite: Literal["stop", "skip"]) -> None:
        self._world = world
        self._on_nonfinite = on_nonfinite
        self._num_skipped = 0

    def handle(
        self,
        losses: list[Losses],
        grad_norm: float,
        scale: LossScale,
        step: int,
        epoch: int,
    ) -> None:
        """Decide what follows a step that was not applied.

        Collective over the default group. ``losses`` are this rank's.

        Raises:
            NonFiniteError: Names rank, step and samples; on every rank or on none.
        """
        found = self._gather(losses)
        if not any(found) and scale.can_shrink:
            scale.shrink()  # too large for fp16 alone, as happens when scales are tried
            self._num_skipped += 1
            return
        reason = self._describe(losses, grad_norm, found, step, epoch)
        if self._on_nonfinite == "skip":
            self._num_skipped += 1
            if self._world.is_rank_zero:
                logger.warning("step %d is skipped: %s", step, reason)
            return
        raise collective_error(
            NonFiniteError(
                f"{reason}.\nThe weights are those after step {step - 1}. Look at "
                "these samples, try a lower --lr or --clip-grad-norm, or skip such "
                "steps: --on-nonfinite skip"
            )
        )

    def take_skipped(self) -> int:
        """Return the number of steps skipped since the last call."""
        number, self._num_skipped = self._num_skipped, 0
        return number

    def _gather(self, losses: list[Losses]) -> _Found:
        """Return each rank's losses that are not finite, with their samples."""
        mine = [
            (f"{float(total)}", indices.tolist())
            for indices, total in losses
            if len(indices) and not math.isfinite(float(total))
        ]
        if self._world.world_size == 1:
            return [mine]
        found: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(found, mine)
        return found

    def _describe(
        self,
        losses: list[Losses],
        grad_norm: float,
        found: _Found,
        step: int,
        epoch: int,
    ) -> str:
        world, where = self._world, f"in step {step} (epoch {epoch})"
        for rank, named in enumerate(found):
            for loss, samples in named:
                host = next(n.hostname for n in world.nodes if rank in n.ranks)
                return (
                    f"the loss is {loss} {where} on rank {rank}/{world.world_size} "
                    f"{host}, samples {_list_samples(samples)}"
                )
        mine = np.concatenate([indices for indices, _ in losses]).tolist()
        return (
            f"the norm of the gradient is {grad_norm} {where}, though every rank's "
            f"loss is finite; rank {world.rank} had samples {_list_samples(mine)}"
        )


def _list_samples(samples: list[int]) -> str:
    """Name some samples.

    >>> _list_samples([3, 1]), _list_samples(list(range(20)))[-13:]
    ('3 1', '15 and 4 more')
    """
    shown = " ".join(str(sample) for sample in samples[:MAX_NAMED])
    more = len(samples) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown

"""Losses and gradients that are no numbers: whose they are, and what follows."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from mpitrain.errors import NonFiniteError, agreed
from mpitrain.train.steps import Losses
from mpitrain.train.update import LossScale
from mpitrain.world import World

logger = logging.getLogger("mpitrain")

NUM_NAMED = 16
"""Samples that a message names."""


class Watch:
    """Names the loss that is no number, and says what follows.

    Args:
        world: Where this process stands.
        on_nonfinite: What follows.
    """

    def __init__(self, world: World, on_nonfinite: Literal["stop", "skip"]) -> None:
        self._world = world
        self._on_nonfinite = on_nonfinite
        self._num_skipped = 0

    def judge(
        self,
        losses: list[Losses],
        norm: float,
        scale: LossScale,
        step: int,
        epoch: int,
    ) -> None:
        """Decide what follows a gradient that is not finite; it was not applied.

        Collective over the default group.

        Args:
            losses: Of this rank's samples in the step.
            norm: The gradient's, equal on all ranks.
            scale: What the loss was multiplied by.
            step: Number of the step, from 1.
            epoch: Its epoch.

        Raises:
            NonFiniteError: Names rank, step and samples; on every rank or on none.
        """
        found = self._gathered(losses)
        if not any(found) and scale.may_shrink():
            scale.shrink()  # too large for fp16 alone, as happens when scales are tried
            self._num_skipped += 1
            return
        words = self._words(losses, norm, found, step, epoch)
        if self._on_nonfinite == "skip":
            self._num_skipped += 1
            if self._world.is_rank_zero:
                logger.warning("step %d is skipped: %s", step, words)
            return
        raise agreed(
            NonFiniteError(
                f"{words}.\nThe weights are those after step {step - 1}. Look at these "
                "samples, try a lower --lr or --clip-grad-norm, or go on without such "
                "steps: --on-nonfinite skip"
            )
        )

    def take_skipped(self) -> int:
        """Return how many steps were skipped since the last call."""
        number, self._num_skipped = self._num_skipped, 0
        return number

    def _gathered(self, losses: list[Losses]) -> list[list[tuple[str, list[int]]]]:
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

    def _words(
        self,
        losses: list[Losses],
        norm: float,
        found: list[list[tuple[str, list[int]]]],
        step: int,
        epoch: int,
    ) -> str:
        where = f"in step {step} (epoch {epoch})"
        for rank, named in enumerate(found):
            for loss, samples in named:
                return (
                    f"the loss is {loss} {where} on rank {rank}/"
                    f"{self._world.world_size} {self._host_of(rank)}, samples "
                    f"{_listed(samples)}"
                )
        mine = np.concatenate([indices for indices, _ in losses])
        return (
            f"the norm of the gradient is {norm} {where}, though every rank's loss is "
            f"finite; rank {self._world.rank} had samples {_listed(mine.tolist())}"
        )

    def _host_of(self, rank: int) -> str:
        nodes = self._world.nodes
        return next(node.hostname for node in nodes if rank in node.ranks)


def _listed(samples: list[int]) -> str:
    """Name some samples.

    >>> _listed([3, 1]), _listed(list(range(20)))[-13:]
    ('3 1', '15 and 4 more')
    """
    shown = " ".join(str(sample) for sample in samples[:NUM_NAMED])
    more = len(samples) - NUM_NAMED
    return f"{shown} and {more} more" if more > 0 else shown

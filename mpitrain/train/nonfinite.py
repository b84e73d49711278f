"""What follows a loss or gradient that is not finite: skip the step, or stop."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import numpy as np
import torch.distributed as dist

from mpitrain.errors import NonFiniteError
from mpitrain.launch.job import heartbeat
from mpitrain.train.checks import shown_names
from mpitrain.train.metrics import NUM_PHASES
from mpitrain.train.step_metrics import MicroBatchLosses

logger = logging.getLogger("mpitrain")

MAX_SAMPLES = 16  # that a message names


def handle_nonfinite(
    trainer: Any, losses: list[MicroBatchLosses], grad_norm: float, step: int
) -> None:
    """Skip a step that was not applied, or stop. Collective over the default group.

    ``step`` is its number, from 1.

    Raises:
        NonFiniteError: Names rank, step and samples; on every rank or on none.
    """
    heartbeat("a step that is not finite")  # there is no optimizer step to tell it
    engine, state = trainer.engine, trainer.state
    world, scale = engine.world, engine.optimizer.scale
    mine = [
        (float(total), indices.tolist())
        for indices, total, *_ in losses
        if len(indices) and not math.isfinite(float(total))
    ]
    # All ranks are here: the norm, which is of all their gradients, is not finite.
    found: list[Any] = [mine] * world.world_size
    if world.world_size > 1:
        dist.all_gather_object(found, mine)
    if not any(found) and scale.can_shrink:
        scale.shrink()  # too large for fp16 alone, as happens when scales are tried
        return
    name = engine.strategy.pass_name
    where = f"in step {step} (epoch {state.epoch})" + f", pass {name!r}" * bool(name)
    rank = next((rank for rank, named in enumerate(found) if named), None)
    shown = functools.partial(shown_names, most=MAX_SAMPLES, by=" ")
    if rank is None:
        samples = np.concatenate([indices for indices, *_ in losses]).tolist()
        reason = (
            f"the norm of the gradient is {grad_norm} {where}, though every rank's "
            f"loss is finite; rank {world.rank} had samples {shown(samples)}"
        )
    else:
        loss, samples = found[rank][0]
        host = world.host_of(rank)
        reason = (
            f"the loss is {loss} {where} on rank {rank}/{world.world_size} {host}, "
            f"samples {shown(samples)}"
        )
    if engine.config.on_nonfinite == "stop":
        trainer.sync_metrics(flush=True)  # report the steps before
        raise NonFiniteError(
            f"{reason}.\nThe weights are those before"
            f"{' this pass' * bool(name)}. Look at these samples, try a lower --lr or "
            "--clip-grad-norm, or skip such steps: --on-nonfinite skip"
        ).on_all_ranks()
    if world.is_rank_zero:
        logger.warning("step %d is skipped: %s", step, reason)


def handle_deferred(trainer: Any) -> None:
    """Skip, or stop at, steps that a GPU has not applied. Collective, as above.

    The host has sent it more steps meanwhile. Of these none was applied either, if the
    training is to stop: they are taken back.
    """
    pending, state, timer = trainer.pending, trainer.state, trainer.timer
    first = state.step - len(pending) + 1
    for place, losses, norm in pending.fetch_norms():
        if trainer.engine.config.on_nonfinite == "stop":
            state.epoch_step -= len(pending) - place
            state.step -= len(pending) - place
            pending.drop_from(place)
            # Waits for the GPU: of all steps sent the times are to be there, then go.
            timer.pending = timer.take()
            del timer.pending.steps[place * NUM_PHASES :]
        handle_nonfinite(trainer, losses, norm, first + place)

"""A pass of a training step: forward and backward of all micro-batches, an update.

A step has one, or one for each of several optimizers by name. What communicates in it,
on every rank in this order::

    strategy.begin_pass       DDP sends rank zero's weights (in the first one)
    strategy.begin_step       rank zero's buffers are sent (if it is overridden)
    verification              copies of weights are compared (--verify-every)
    each micro-batch
        engine.check_losses   names of losses are compared (in a stage's first one)
        forward, backward     weights are gathered (fsdp)
        backward              gradients are reduced (in the last one, or in each)
    verification              micro-batches are computed again and compared
    strategy.reduce_gradients they are reduced, or checked (if it is overridden)
    _weight_factor            weights are added up (if the losses have some)
    optimizer.end_pass        the norm of shards, or weights are sent (fsdp, ZeRO)
    check_buffers             changed buffers are named (in a stage's first step)
    handle_nonfinite          the losses are named (if the norm is not finite)

Ranks may have unequal numbers of micro-batches, and each has at least one: a rank
without samples has a row of padding (docs/decisions/0005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.data.loader import Batch, RankStep
from mpitrain.data.samples import BadRow, kind_of
from mpitrain.errors import DataError
from mpitrain.train.checks import warn_of_values
from mpitrain.train.means import Sum, named_values, sum_of
from mpitrain.train.nonfinite import handle_nonfinite
from mpitrain.train.optimizer import NO_GRADIENT
from mpitrain.train.step_metrics import MicroBatchLosses
from mpitrain.train.strategy.base import Strategy


class Pass(NamedTuple):
    """The part of a step that updates the weights of one name's optimizers."""

    name: str  # empty: `configure_optimizers` gave none
    losses: list[MicroBatchLosses]
    factor: float | Tensor  # of the sum of losses, for the mean by weight
    grad_norm: float | Tensor  # as `OptimizerWrapper.end_pass` returns it


def merge_passes(
    passes: Sequence[Pass],
) -> tuple[list[MicroBatchLosses], float | Tensor]:
    """Return losses and gradient norm of a step.

    Of several passes the loss is the sum of their means, and each is another, by name.
    """
    first = passes[0]
    if not first.name:
        return first.losses, first.grad_norm
    losses = []
    for found in zip(*(it.losses for it in passes), strict=True):
        total = sum(of.total * it.factor for it, of in zip(passes, found, strict=True))
        sums = {"loss": Sum(total, None)} | {
            f"{it.name}_{name}": one
            for it, of in zip(passes, found, strict=True)
            for name, one in of.sums.items()
        }
        losses.append(found[0]._replace(total=total, sums=sums))
    # Numbers, also of a GPU: `OptimizerWrapper.may_defer` is for a single pass.
    return losses, math.hypot(*(float(it.grad_norm) for it in passes))


def train_pass(trainer: Any, name: str, step: RankStep) -> Pass:
    """Update the weights of the optimizers of a name by a global batch. Collective.

    ``trainer`` is a `Trainer`, whose module imports this one.
    """
    engine, state, timer = trainer.engine, trainer.state, trainer.timer
    optimizer, strategy = engine.optimizer, engine.strategy
    scale = engine.begin_pass(name, state, step.number, step.num_samples)
    losses: list[MicroBatchLosses] = []
    number, verification = state.step + 1, engine.verification
    # In the first pass alone: a callback, or the pass, may have changed the batch.
    is_first = name == optimizer.names[0]
    if verification is not None and not (is_first and verification.is_due(number)):
        verification = None

    def compute(batch: Batch, timer: Any = timer) -> dict[str, Sum]:
        """Compute the losses of a micro-batch, and its gradients; return the sums."""
        batch.epoch, batch.step = state.epoch, step.number
        if is_first:
            trainer.call("on_batch_start", batch)
        with engine.norm_statistics(batch):
            with timer("forward"):
                loss, sums = _sums_of_losses(trainer, batch)
            if strategy.reduces_in_backward and engine.world.world_size > 1:
                timer.mark_gradients(loss)
            # Equal to scale - 0 * loss: the scale, or NaN where the loss is not. A
            # gradient may be finite where its loss is not. The NaN reaches all
            # ranks by the all-reduce: they skip the step without another one.
            factor = torch.rsub(sums["loss"].total, scale, alpha=0)
            with timer("backward"):
                # Not backward(loss, factor): it imports SymPy (torch 2.14).
                torch.autograd.backward(loss * factor)
        return sums

    # Asked first: a span of the timer costs time, also around nothing.
    if strategy.communicates_before_step:
        with timer("communication"):
            strategy.begin_step(state.epoch, step.number, step.num_samples)
    if verification is not None:
        with timer("communication"):
            verification.compare_state(engine, state)
        verification.begin(strategy, number)
    for batch in step.micro_batches:
        # Of this rank: the gradients of all are reduced in its backward pass (ddp).
        is_last = len(losses) + 1 == step.num_micro_batches
        with strategy.micro_batch(is_last=is_last):
            sums, place = compute(batch), strategy.micro_batch_number
            total = sums["loss"].total
            losses.append(MicroBatchLosses(batch.indices, total, place, sums))
            if verification is not None:
                verification.record(place, batch, total, strategy.named_weights())
    if verification is not None:
        with timer("communication"):
            verification.compare(
                engine,
                state,
                lambda wanted: engine.data.micro_batch(state, step.number, wanted),
                # Not as computing: a rank with few micro-batches would seem slow.
                lambda batch: compute(batch, lambda _: nullcontext())["loss"].total,
            )
    if strategy.communicates_after_step:
        with timer("communication"):
            strategy.reduce_gradients()
    with timer("update"):
        # Only now: other ranks' weights are known when all have computed their losses.
        by_weight = _weight_factor(strategy, losses, step.num_samples)
        grad_norm = optimizer.end_pass(by_weight)
    if name == optimizer.names[-1]:
        engine.check_buffers()
    # A tensor is on the device still: `handle_deferred` looks at it later.
    if not isinstance(grad_norm, Tensor) and not math.isfinite(grad_norm):
        handle_nonfinite(trainer, losses, grad_norm, state.step + 1)
    return Pass(name, losses, by_weight, grad_norm)


def _weight_factor(
    strategy: Strategy, losses: Sequence[MicroBatchLosses], num_samples: int
) -> float | Tensor:
    """Return by what a step's gradients are multiplied, if losses have weights.

    The backward pass divided them by the samples of the step. The weights of other
    ranks are not known before, and need not be: the gradient is linear in them.
    """
    weights = [found.sums["loss"].weight for found in losses]
    mine = [weight for weight in weights if weight is not None]
    if not mine:
        return 1.0
    total = strategy.sum_of_weights(mine)
    if isinstance(total, Tensor):
        # As on the host, which would wait for it. full_like: torch rounds num / total
        # twice, as 1 / total and a product.
        return torch.where(total == 0, 0.0, torch.full_like(total, num_samples) / total)
    return num_samples / total if total else 0.0


def _sums_of_losses(trainer: Any, batch: Batch) -> tuple[Tensor, dict[str, Sum]]:
    """Return the sum of a micro-batch's losses, and it and others, detached."""
    try:
        trainer.batch = batch  # for `Trainer.all_gather` in the user's loss
        name = trainer.engine.strategy.pass_name
        found = trainer.compute_loss(batch, *([name] if name else []))
        named = named_values(found, "the training step")
        if not trainer.is_task_step:
            trainer.task.refuse_other_step()
        num, num_rows = len(batch), batch.num_rows
        sums = {name: sum_of(it, num, num_rows, name) for name, it in named.items()}
    except BadRow as bad:
        raise bad.named(batch.indices) from None
    finally:
        trainer.batch = None
    loss = sums["loss"].total
    if not loss.requires_grad:
        raise DataError(f"the loss is {kind_of(named['loss'])}: {NO_GRADIENT}")
    warn_of_values(named, trainer.warned_of)
    # Before the backward pass: a rank with another loss would wait there for ever.
    trainer.engine.check_losses(named)
    # Detached: they are kept until the next report, and would keep the graph.
    return loss, {name: Sum(it[0].detach(), it[1]) for name, it in sums.items()}

"""The training, in the order of time."""

from __future__ import annotations

import contextlib
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.data.sharding import Indices
from mpitrain.data.sources import Data, Samples
from mpitrain.record.events import Epoch, Listener, Progress
from mpitrain.train.evaluate import evaluate
from mpitrain.train.optim import build_optimizer
from mpitrain.train.plan import Plan
from mpitrain.world import World

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def train(
    world: World,
    plan: Plan,
    model: nn.Module,
    data: Data,
    listener: Listener,
    progress: Progress,
) -> None:
    """Train a model.

    Collective over the default group.

    Args:
        world: Where this process stands.
        plan: Epochs, steps and microsteps.
        model: Equal on all ranks, on this rank's device, in the precision asked for;
            trained in place.
        data: The samples.
        listener: Told of every step and epoch.
        progress: Told of every batch of an evaluation; steps tell it by themselves.
    """
    replica = replicate(model, world, all_used=plan.config.model == "convnet")
    torch.manual_seed(plan.config.seed + world.rank)  # of dropout: its own on each rank
    optimizer = build_optimizer(model, plan.config)
    step = 0
    for epoch in range(1, plan.num_epochs + 1):
        started = time.perf_counter()
        model.train()
        sums: list[Tensor] = []  # each step's (sum of losses, count), this rank's part
        rates: list[float] = []
        for samples in plan.steps_of(epoch):
            rates.append(plan.learning_rate(step))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            optimizer.zero_grad(set_to_none=True)
            sums.append(accumulate_gradient(replica, data.train, samples, world, plan))
            optimizer.step()
            step += 1
            listener.step_done(step)

        totals = torch.stack(sums)
        dist.all_reduce(totals)
        loss_sum, count = totals.sum(dim=0).tolist()
        stepped = time.perf_counter()
        dtype = DTYPES[plan.config.precision]
        validation = evaluate(model, data.val, world, dtype, progress)
        listener.epoch_done(
            Epoch(
                epoch=epoch,
                step=step,
                step_losses=tuple((totals[:, 0] / totals[:, 1]).tolist()),
                learning_rates=tuple(rates),
                train_loss=loss_sum / count,
                train_samples=int(count),
                val_loss=validation.loss,
                val_accuracy=validation.accuracy,
                val_samples=validation.num_samples,
                steps_seconds=stepped - started,
                epoch_seconds=time.perf_counter() - started,
            )
        )


def replicate(model: nn.Module, world: World, *, all_used: bool = False) -> nn.Module:
    """Wrap a model so that gradients are averaged over all ranks, where there are more.

    Collective over the default group.

    Args:
        model: Equal on all ranks.
        world: Where this process stands.
        all_used: Whether every weight is known to take part in the loss. Where one does
            not and DDP is not told to look, it leaves gradients beside it unreduced,
            and complains only at the next forward.
    """
    if world.world_size == 1:
        return model
    warnings.filterwarnings("ignore", message=".*find_unused_parameters=True")
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=not all_used
    )


def accumulate_gradient(
    replica: nn.Module, data: Samples, samples: Indices, world: World, plan: Plan
) -> Tensor:
    """Compute the gradient of the mean loss over one step's samples.

    Collective over the default group.

    Every sample weighs the same, whichever rank has it: each rank sums its own losses,
    and the sum is divided by the samples of all ranks. DDP averages over ranks, so we
    multiply by their number.

    Args:
        replica: The model, wrapped.
        data: Where the samples come from.
        samples: The step's samples on all ranks, int64 `(B,)`.
        world: Where this process stands.
        plan: Epochs, steps and microsteps.

    Returns:
        float64 `(2,)`: the sum of this rank's losses, and how many samples they are.
    """
    dtype = DTYPES[plan.config.precision]
    scale = world.world_size / len(samples)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    microsteps = plan.microsteps_of(samples, world.rank)
    for number, chosen in enumerate(microsteps, start=1):
        # A rank whose share is used up walks along with a sample of weight zero:
        # DDP's all-reduces need every rank, and most models need one sample.
        weight = 1.0 if len(chosen) else 0.0
        inputs, labels = data.batch(chosen if len(chosen) else samples[:1])
        inputs = inputs.to(world.device, dtype)
        labels = labels.to(world.device)
        with synchronize_if(replica, last=number == len(microsteps)):
            loss = weight * F.cross_entropy(replica(inputs), labels, reduction="sum")
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        sums[0] += loss.detach().double()
        sums[1] += len(chosen)
    return sums


def synchronize_if(
    replica: nn.Module, *, last: bool
) -> contextlib.AbstractContextManager[None]:
    """Let DDP average the gradients in the last microstep of a step only."""
    if last or not isinstance(replica, DistributedDataParallel):
        return contextlib.nullcontext()
    return replica.no_sync()

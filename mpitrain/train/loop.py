"""The training, in the order of time."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.data import sharding
from mpitrain.data.sharding import Indices
from mpitrain.data.sources import Data, Samples
from mpitrain.models import build_model
from mpitrain.record.events import Epoch, Listener
from mpitrain.train.config import TrainConfig
from mpitrain.train.evaluate import evaluate
from mpitrain.train.optim import build_optimizer, learning_rate
from mpitrain.world import World

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def train(
    world: World, config: TrainConfig, data: Data, listener: Listener
) -> nn.Module:
    """Train a model.

    Collective over the default group.

    Args:
        world: Where this process stands.
        config: What was asked.
        data: The samples.
        listener: Told of every step and epoch.

    Returns:
        The trained model, not wrapped, equal on all ranks.
    """
    dtype = DTYPES[config.precision]
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        seed=config.seed,
    ).to(world.device, dtype)
    replica = replicate(model, world)
    optimizer = build_optimizer(model, config)

    num_samples = len(data.train)
    steps_per_epoch = sharding.num_steps(num_samples, config.global_batch_size)
    total_steps = steps_per_epoch * config.epochs
    warmup_steps = round(steps_per_epoch * config.warmup_epochs)

    step = 0
    for epoch in range(1, config.epochs + 1):
        started = time.perf_counter()
        model.train()
        order = sharding.epoch_order(num_samples, config.seed, epoch)
        sums: list[Tensor] = []  # each step's (sum of losses, count), this rank's part
        rates: list[float] = []
        for samples in sharding.steps_of(order, config.global_batch_size):
            rates.append(
                learning_rate(
                    step,
                    peak=config.lr,
                    warmup_steps=warmup_steps,
                    total_steps=total_steps,
                )
            )
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            optimizer.zero_grad(set_to_none=True)
            sums.append(
                accumulate_gradient(replica, data.train, samples, world, config)
            )
            optimizer.step()
            step += 1
            listener.step_done(step)
            if config.dry_run:
                break

        totals = torch.stack(sums)
        dist.all_reduce(totals)
        loss_sum, count = totals.sum(dim=0).tolist()
        trained = time.perf_counter()
        validation = evaluate(model, data.val, world, dtype)
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
                train_seconds=trained - started,
                epoch_seconds=time.perf_counter() - started,
            )
        )
        if config.dry_run:
            break
    return model


def replicate(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model so that gradients are averaged over all ranks, where there are more.

    Collective over the default group.
    """
    if world.world_size == 1:
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def accumulate_gradient(
    replica: nn.Module,
    data: Samples,
    samples: Indices,
    world: World,
    config: TrainConfig,
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
        config: What was asked.

    Returns:
        float64 `(2,)`: the sum of this rank's losses, and how many samples they are.
    """
    dtype = DTYPES[config.precision]
    mine = sharding.shard_of(samples, world.rank, world.world_size)
    largest = sharding.largest_shard(len(samples), world.world_size)
    size = min(config.micro_batch_size or largest, largest)
    num_microsteps = sharding.num_microsteps(len(samples), world.world_size, size)
    scale = world.world_size / len(samples)
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    for microstep in range(num_microsteps):
        chosen = mine[microstep * size : (microstep + 1) * size]
        # A rank whose share is used up walks along with a sample of weight zero:
        # DDP's all-reduces need every rank, and most models need one sample.
        weight = 1.0 if len(chosen) else 0.0
        inputs, labels = data.batch(chosen if len(chosen) else samples[:1])
        inputs = inputs.to(world.device, dtype)
        labels = labels.to(world.device)
        with synchronize_if(replica, microstep == num_microsteps - 1):
            loss = weight * F.cross_entropy(replica(inputs), labels, reduction="sum")
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        sums[0] += loss.detach().double()
        sums[1] += len(chosen)
    return sums


def synchronize_if(
    replica: nn.Module, last: bool
) -> contextlib.AbstractContextManager[None]:
    """Let DDP average the gradients in the last microstep of a step only."""
    if last or not isinstance(replica, DistributedDataParallel):
        return contextlib.nullcontext()
    return replica.no_sync()

r"""ResNet-50 on one GPU: our loop beside the same loop written by hand, in turns.

    .venv/bin/python benchmarks/resnet.py
    .venv/bin/python benchmarks/resnet.py --device cpu --model resnet18 \
        --image-size 64 --batch-size 8 --samples 64 --precisions fp32

Random images of a fixed set, held on the device by both. Same first weights, order,
optimizer, learning rates and memory format. Counted are the training steps of an epoch,
with the device synchronized before and after. Each ratio is of one epoch of ours and
the one by hand beside it, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import about, spread, write
from torchvision import models

import mpitrain
from mpitrain.config import TrainConfig
from mpitrain.data.in_memory import InMemory
from mpitrain.data.sharding import epoch_order
from mpitrain.mpi.world import World
from mpitrain.tasks.stages import place_stages
from mpitrain.train.metrics import TrainState
from mpitrain.train.plan import Plan

WARM_UP_EPOCHS = 2
NUM_CLASSES = 1000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Measure all precisions, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2560)
    parser.add_argument("--epochs", type=int, default=6, help="that count, of each")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    report = about("benchmarks/resnet.py " + " ".join(sys.argv[1:]))
    with mpitrain.init(device=asked.device) as world:
        if world.device != "cpu":
            report["device"] = torch.cuda.get_device_name()
        report["rows"] = [row(name, asked, world) for name in asked.precisions]
    write(report, asked.json)


def row(precision: Any, asked: argparse.Namespace, world: World) -> dict[str, Any]:
    """Compare the loops in one precision."""
    size = asked.image_size
    torch.manual_seed(1)
    train = InMemory(
        torch.randn(asked.samples, 3, size, size),
        torch.randint(NUM_CLASSES, (asked.samples,)),
    )
    config = TrainConfig(
        epochs=asked.epochs + WARM_UP_EPOCHS,
        global_batch_size=asked.batch_size,
        precision=precision,
    )
    seconds: dict[str, list[float]] = {"ours": [], "by hand": []}
    loops = {
        "ours": ours(asked.model, train, config, world),
        "by hand": by_hand(asked.model, train, config, world),
    }
    names = list(loops)
    for epoch in range(1, config.epochs + 1):
        names.reverse()
        for name in names:
            synchronize(world)
            started = time.perf_counter()
            end_epoch = loops[name](epoch)
            synchronize(world)
            if epoch > WARM_UP_EPOCHS:
                seconds[name].append(time.perf_counter() - started)
            end_epoch()
    ratio = spread([a / b for a, b in zip(*seconds.values(), strict=True)])
    rates = {name: asked.samples / min(each) for name, each in seconds.items()}
    print(
        f"{asked.model} {precision} batch {asked.batch_size}: ours {rates['ours']:.0f} "
        f"samples/s, by hand {rates['by hand']:.0f}, ratio of times {ratio}",
        flush=True,
    )
    return {"precision": precision, "samples_per_second": rates, "ratio": ratio}


def synchronize(world: World) -> None:
    if world.device != "cpu":
        torch.cuda.synchronize()


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return models.get_model(name, num_classes=NUM_CLASSES)


def ours(
    model: str, train: InMemory, config: TrainConfig, world: World
) -> Callable[[int], Callable[[], Any]]:
    """Return what trains an epoch in our loop, and returns what ends it."""
    few = InMemory(train.inputs[:8], train.targets[:8])
    trainer = mpitrain.Trainer(
        build(model), train, few, config, world=world, find_unused_parameters=False
    )
    engine = trainer.set_up()
    (stage,) = engine.plan.stages
    engine.start_stage(stage)

    def run(_: int) -> Callable[[], Any]:
        trainer.train_epoch()
        return trainer.validate

    return run


def by_hand(
    name: str, train: InMemory, config: TrainConfig, world: World
) -> Callable[[int], Callable[[], Any]]:
    """Return what trains an epoch in a loop written by hand."""
    data = train.to(world.device)
    size = config.global_batch_size
    model = build(name).to(world.device)
    mixed = config.precision in ("bf16", "fp16")
    if mixed and world.device != "cpu":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.peak_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=True,
        fused=True,
    )
    scaler = torch.amp.GradScaler(world.device, enabled=config.precision == "fp16")
    steps_per_epoch = -(-len(train) // size)
    stages = place_stages(None, config)
    plan = Plan(num_samples=len(train), config=config, stages=stages)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        kind = world.device.partition(":")[0]
        return torch.autocast(kind, DTYPES[config.precision], enabled=mixed)

    def run(epoch: int) -> Callable[[], Any]:
        model.train()
        order = torch.from_numpy(epoch_order(len(train), config.seed, epoch))
        state = TrainState(epoch=epoch)
        for number in range(steps_per_epoch):
            rate = plan.learning_rate(plan.stages[0], state, number)
            for group in optimizer.param_groups:
                group["lr"] = rate
            chosen = order[number * size : (number + 1) * size].to(world.device)
            x = data.inputs[chosen]
            if mixed and world.device != "cpu":
                x = x.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(model(x), data.targets[chosen])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return lambda: None

    return run


if __name__ == "__main__":
    main()

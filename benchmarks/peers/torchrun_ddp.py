"""The default training as a plain torchrun DDP script: what a careful user writes.

    torchrun --standalone --nproc-per-node 8 benchmarks/peers/torchrun_ddp.py

Same data, network, batch, epochs, optimizer and schedule as `python -m mpitrain`; no
mpitrain in it. Rank zero prints the final accuracy.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "10"))
GLOBAL_BATCH_SIZE = 64
LR = 0.1
DIGITS = (
    Path(__file__).parents[2]
    / "mpitrain/tasks/image_classification/datasets/digits/digits.npz"
)


class ConvNet(nn.Module):
    """The network of `mpitrain.models.build`, written again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden = nn.Linear(32 * 16, 40)
        self.head = nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(F.relu(self.hidden(x.flatten(1))))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the set to train and the one to validate."""
    arrays = np.load(DIGITS)
    order = arrays["permutation"].astype(np.int64)
    images = torch.from_numpy(arrays["images"][order]).unsqueeze(1).float() / 16.0
    labels = torch.from_numpy(arrays["labels"][order]).long()
    num_train = int(arrays["num_train"])
    train = TensorDataset(images[:num_train], labels[:num_train])
    return train, TensorDataset(images[num_train:], labels[num_train:])


def cosine(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule: an epoch of warm-up, then a cosine."""
    warmup, total = steps_per_epoch, steps_per_epoch * EPOCHS
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            (step + 1) / warmup
            if step < warmup
            else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        ),
    )


def start() -> None:
    """Start gloo; with STORE in a file of this attempt.

    After a restart torchrun's own store still has the addresses of the attempt before,
    and with 4 ranks or more gloo connects to them (torch 2.14.1; 9 of 9 failed).
    """
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = os.environ.get("STORE")
    dist.init_process_group(
        "gloo",
        init_method=None if store is None else f"file://{store}-{count}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def main() -> None:
    start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, val = digits()
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(
        train, batch_size=GLOBAL_BATCH_SIZE // world_size, sampler=sampler
    )
    val_loader = DataLoader(
        val, batch_size=256, sampler=DistributedSampler(val, shuffle=False)
    )

    torch.manual_seed(1)
    model = ConvNet()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    schedule = cosine(optimizer, len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        replica.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for x, y in val_loader:
                scores = model(x)
                sums[0] += F.cross_entropy(scores, y, reduction="sum").double()
                sums[1] += (scores.argmax(1) == y).sum()
                sums[2] += len(y)
        dist.all_reduce(sums)
        if rank == 0:
            loss, correct, count = sums.tolist()
            print(
                f"epoch {epoch + 1} val_loss {loss / count:.4f} "
                f"val_accuracy {correct / count:.2%}",
                flush=True,
            )
    dist.barrier()  # without it, every second run died at its exit here (torch 2.15)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

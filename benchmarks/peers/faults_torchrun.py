"""A training loop that torchrun restarts, with checkpoints of torch.distributed.

torchrun --standalone --nproc-per-node 4 --max-restarts 99 faults_torchrun.py
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchrun_ddp import ConvNet, digits, start

STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.05"))
EVERY_STEPS = 50  # Young's interval for a save of 50 ms and a fault a minute: 2.4 s


def main() -> None:
    start()
    rank = dist.get_rank()
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    train, _ = digits()
    sampler = DistributedSampler(train, shuffle=True, seed=1)
    loader = DataLoader(train, batch_size=64 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(1)
    model = ConvNet()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    saved = sorted(Path("checkpoints").glob("step-*/.metadata"))
    if saved:
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=str(saved[-1].parent))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(saved[-1].parent.name[5:])
    for epoch in itertools.count(step // len(loader)):
        sampler.set_epoch(epoch)
        for place, (inputs, labels) in enumerate(loader):
            if place < step % len(loader) and step // len(loader) == epoch:
                continue  # of the epoch that was cut
            optimizer.zero_grad()
            F.cross_entropy(replica(inputs), labels).backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            step += 1
            if step % EVERY_STEPS == 0:
                state = {"model": model.state_dict()}
                state["optimizer"] = optimizer.state_dict()
                dcp.save(state, checkpoint_id=f"checkpoints/step-{step:08}")
            if rank == 0:
                with Path("steps").open("a") as file:
                    file.write(f"{time.time()} {step}\n")


if __name__ == "__main__":
    main()

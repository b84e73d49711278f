"""Plain DistributedDataParallel, as torchrun's tutorials have it."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["RANK"])
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
total = next(model.parameters()).detach().clone()
dist.all_reduce(total)
assert torch.allclose(total / world_size, next(model.parameters()))
if "destroy" in sys.argv[1:]:
    dist.destroy_process_group()
print(f"done {rank}/{world_size}", flush=True)

"""FSDP2 on CPU, and torch.distributed.checkpoint, saved and loaded."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


model, optimizer = build()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
of_model, of_optimizer = get_state_dict(model, optimizer)
dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=sys.argv[1])

again, its_optimizer = build()
of_model, of_optimizer = get_state_dict(again, its_optimizer)
dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=sys.argv[1])
set_state_dict(
    again, its_optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
)
for left, right in zip(model.parameters(), again.parameters(), strict=True):
    assert torch.equal(left.full_tensor(), right.full_tensor())
dist.destroy_process_group()
print(f"done {rank}/{world_size}", flush=True)

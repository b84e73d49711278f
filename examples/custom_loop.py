"""A custom training loop in plain DDP: mpitrain starts the ranks.

mpirun -np 4 --oversubscribe python examples/custom_loop.py
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpitrain


def main() -> None:
    with mpitrain.init() as world:
        torch.manual_seed(world.rank)
        inputs = torch.randn(32, 10, device=world.device)
        targets = inputs.sum(dim=1, keepdim=True)

        model = nn.Linear(10, 1).to(world.device)
        ddp_model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()
        if world.is_rank_zero:
            print(f"{world.world_size} ranks, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()

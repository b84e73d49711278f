"""A custom loop of two networks, the same on any number of ranks; resumes exactly.

mpirun -np 3 --oversubscribe python examples/gan.py runs/gan
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import mpitrain

NOISE = 8


class Ring(Dataset[tuple[Tensor, Tensor]]):
    """Points of eight clusters on a circle, and noise that differs in each epoch."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angle = torch.tensor(index % 8 * torch.pi / 4)
        point = torch.stack([angle.cos(), angle.sin()]) + 0.05 * torch.randn(2)
        return point.double(), torch.randn(2, NOISE, dtype=torch.float64)


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
    return nn.Sequential(*layers).double()


def losses(scores: Tensor, target: float) -> Tensor:
    targets = torch.full_like(scores, target)
    found = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
    return found.squeeze(1)  # one for each sample


def main(folder: str, epochs: int = 3) -> None:
    with mpitrain.init() as world:
        torch.manual_seed(1)
        g, d = mlp(NOISE, 2).to(world.device), mlp(2, 1).to(world.device)
        ddp_g, ddp_d = DistributedDataParallel(g), DistributedDataParallel(d)
        opt_g = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.99))
        opt_d = torch.optim.Adam(d.parameters(), lr=4e-3, betas=(0.5, 0.99))
        loader = mpitrain.DataLoader(Ring(), global_batch_size=32)
        objects = {"g": g, "d": d, "opt_g": opt_g, "opt_d": opt_d, "loader": loader}
        checkpointer = mpitrain.Checkpointer(folder)
        recorder = mpitrain.Recorder(folder)
        step = (checkpointer.restore(**objects) or {"step": 0})["step"]
        while loader.epoch <= epochs:
            for (real, noise), weights in loader:
                with torch.no_grad():
                    fake = g(noise[:, 0])
                of_real, of_fake = ddp_d(torch.cat([real, fake])).split(len(real))
                d_losses = losses(of_real, 1.0) + losses(of_fake, 0.0)
                d_loss = (d_losses * weights).sum()
                d_loss.backward()
                opt_d.step()
                d.requires_grad_(False)
                g_loss = (losses(d(ddp_g(noise[:, 1])), 1.0) * weights).sum()
                g_loss.backward()
                opt_g.step()
                d.requires_grad_(True)
                opt_g.zero_grad()
                opt_d.zero_grad()
                step += 1
                recorder.log(step, epoch=loader.epoch, d=d_loss, g=g_loss)
                reason = checkpointer.should_stop()
                if reason or step % 10 == 0:
                    checkpointer.save(step, **objects)
                if reason:
                    recorder.finish(stopped=reason)
                    raise mpitrain.Stopped(reason)
        recorder.finish()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""A training loop of your own. Replace the data, the model and the steps.

mpirun -np 4 --oversubscribe python train.py runs/first
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import mpitrain


def load_data(num: int, seed: int) -> TensorDataset:
    """Return synthetic samples; any map-style data set will do."""
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, `(N,)`."""
    return (outputs - targets).square().mean(1)


def validate(model: nn.Module, loader: mpitrain.DataLoader) -> Tensor:
    """Return this rank's part of the mean loss; the ranks' mean is that of all."""
    total, num = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for (inputs, targets), weights in loader:  # rows of padding have weight 0
            losses = squared_errors(model(inputs), targets)
            total += (losses * weights).sum().cpu() * loader.num_samples
            num += loader.num_samples
    return total / num


def train(run_dir: str, epochs: int) -> None:
    """Train on the ranks of mpirun, from the last checkpoint on if there is one."""
    with mpitrain.init() as world:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        parallel = DistributedDataParallel(model.to(world.device))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = mpitrain.DataLoader(load_data(500, seed=1), 32)
        val_loader = mpitrain.DataLoader(load_data(100, seed=2), 32, shuffle=False)
        checkpointer = mpitrain.Checkpointer(run_dir)
        recorder = mpitrain.Recorder(run_dir)
        objects = {"model": model, "optimizer": optimizer, "loader": loader}
        step = (checkpointer.restore(**objects) or {"step": 0})["step"]
        while loader.epoch <= epochs:
            for (inputs, targets), weights in loader:
                losses = squared_errors(parallel(inputs), targets)
                loss = (losses * weights).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                recorder.log(step, loss=loss)
                if reason := checkpointer.should_stop():  # a signal, the time limit
                    checkpointer.save(step, **objects)
                    recorder.finish(stopped=reason)
                    raise mpitrain.Stopped(reason)
            found = recorder.log(step, val_loss=validate(model, val_loader))
            checkpointer.save(step, **objects)
            if world.is_rank_zero:
                print(f"step {step}: val_loss {found['val_loss']:.4f}", flush=True)
        recorder.finish()
        if world.is_rank_zero:
            print(f"finished at step {step}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--epochs", type=int, default=10)
    train(**vars(parser.parse_args()))

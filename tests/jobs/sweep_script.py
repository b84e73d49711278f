"""A script whose trials a sweep runs; --how says what is wrong with it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mpitrain


class Net(nn.Module):
    """Pickled by name: ``__main__`` is the script."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ.get("PACE", "0")))
        return self.head(inputs)


def some(num: int, seed: int) -> TensorDataset:
    inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1))


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


class Fault(mpitrain.Callback):
    def __init__(self, how: str, out: str) -> None:
        self.how, self.mark = how, Path(out) / "killed"

    def on_step_end(self, trainer: mpitrain.Trainer) -> None:
        if trainer.state.step != 7 or dist.get_rank() != dist.get_world_size() - 1:
            return
        if self.how == "raises":
            raise ArithmeticError("this is the fault")
        if self.how == "exits":
            raise SystemExit("no more")
        if self.how == "kills_once" and not self.mark.exists():
            self.mark.write_text("")
            os.kill(os.getpid(), 9)


def callbacks_of(how: str, out: str) -> list[mpitrain.Callback] | None:
    if how == "recorder":
        return [mpitrain.Recorder(out)]
    if how == "checkpointer":
        return [mpitrain.Checkpointer(out)]
    if how == "no_record":
        return None
    return mpitrain.default_callbacks(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden_size", type=int, default=1)
    parser.add_argument("--how", default="")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    how = args.how
    print("the script trains", how or "well", os.environ["WORLD_SIZE"])
    if how == "no_trainer":
        return
    config = mpitrain.TrainConfig(epochs=args.epochs, global_batch_size=8, lr=args.lr)
    torch.manual_seed(1)
    model = Net()
    loss: Any = squared_errors
    if how == "not_finite":
        loss = lambda *of: squared_errors(*of) * torch.nan  # noqa: E731
    callbacks = callbacks_of(how, args.out)
    if callbacks is not None:
        callbacks.append(Fault(how, args.out))
    val_data = None if how == "no_validation" else some(13, 2)

    def train() -> None:
        trainer = mpitrain.Trainer(
            model, some(50, 1), val_data, config, loss=loss, callbacks=callbacks
        )
        trainer.fit()
        if trainer.world and trainer.world.is_rank_zero:
            torch.save(model.cpu(), Path(args.out) / "whole.pt")

    if how == "no_init":
        train()
        return
    with mpitrain.init(device="cpu") as world:
        assert world.world_size == int(os.environ["WORLD_SIZE"])
        os.chdir("/")  # `run` has the script where it was started
        train()
        if how == "twice":
            train()


if __name__ == "__main__":
    main()

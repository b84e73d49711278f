"""The code of the how-to pages runs as it stands."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import TensorDataset

import mpitrain
from mpitrain import TrainConfig, World
from mpitrain.mpi.collectives import world_comm

pytestmark = pytest.mark.mpi

PAGES = Path(__file__).parents[2] / "docs"
CLASSES = 10


def classes(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    labels = torch.arange(num) % CLASSES
    return TensorDataset(torch.randn(num, 6, generator=generator), labels)


class GanModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.g = nn.Linear(6, 1), nn.Linear(6, 6)

    def forward(self, images: Tensor, name: str) -> tuple[Tensor, Tensor]:
        del name
        return self.d(images), self.d(self.g(images))


def names_of(page: str, world: World, **more: Any) -> dict[str, Any]:
    """Return what the blocks of a page define, each run after those before it."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
    api: dict[str, Any] = {name: getattr(mpitrain, name) for name in mpitrain.__all__}
    api["Trainer"] = functools.partial(mpitrain.Trainer, world=world, callbacks=())
    api["init"] = lambda: contextlib.nullcontext(world)
    names: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "mpitrain": SimpleNamespace(**api),
        "OneCycleLR": OneCycleLR,
        "CosineAnnealingLR": CosineAnnealingLR,
        "DistributedDataParallel": DistributedDataParallel,
        "model": nn.Sequential(OrderedDict(layers=layers, head=nn.Linear(8, CLASSES))),
        "train_data": classes(40),
        "val_data": classes(30),
        "config": TrainConfig(epochs=1, global_batch_size=12),
        **more,
    }
    text = (PAGES / page).read_text().replace("import mpitrain\n", "")
    trainers = []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "from mine import" in code:  # whole scripts, which tests/jobs run
            continue
        exec(code.replace("runs/mine", str(names.get("run_dir"))), names)
        trainers += [names.pop("trainer")] if "trainer" in names else []
    return {**names, "trainers": trainers}


@pytest.mark.parametrize("page", ["accelerate", "horovod", "lightning"])
def test_the_code_for_users_of(page: str, world: World) -> None:
    found = names_of(f"coming-from/{page}.md", world)
    trained = [trainer.fit().loss for trainer in found["trainers"]]
    assert len(trained) == (page == "lightning")
    assert page == "lightning" or found["loader"].epoch == 2  # read to its end


def test_the_metrics_of_the_page(world: World) -> None:
    (trainer,) = names_of("howto/metrics.md", world)["trainers"]
    found = trainer.fit()
    assert {*found.values} == {"loss", "top3", "nll", "auroc", "perplexity"}
    assert found.values["nll"] == pytest.approx(found.values["loss"])
    assert found.results["confusion"].sum() == len(classes(30))


def test_the_model_on_meta_of_the_page(world: World) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    folder = Path(world_comm().bcast(tempfile.mkdtemp()))
    if world.is_rank_zero:
        torch.save(net().state_dict(), folder / "model.pt")
    world_comm().barrier()
    found = names_of("howto/training.md", world, Net=net, run_dir=folder)
    (trainer,) = found["trainers"]
    assert {*trainer.fit().values} >= {"loss"}


def test_the_optimizers_of_the_page(world: World) -> None:
    found = names_of("howto/optimizers.md", world)
    for trainer in found["trainers"]:
        trainer.fit()
    assert len(found["trainers"]) == 3
    trainer = found["mpitrain"].Trainer(
        found["model"],
        classes(40),
        classes(30),
        found["config"],
        optimizer=found["optimizers"],
    )
    trainer.fit()
    gan = found["mpitrain"].Trainer(
        GanModel(), classes(40), classes(30), found["config"], task=found["Gan"]()
    )
    assert {*gan.fit().values} == {"loss"}


def test_the_loop_of_the_page(world: World, run_dir: Path) -> None:
    found = names_of(
        "howto/own-loops.md",
        world,
        run_dir=run_dir,
        data=classes(40),
        Net=functools.partial(nn.Linear, 6, CLASSES),
    )
    assert (found["step"], found["loader"].epoch) == (10, 11)

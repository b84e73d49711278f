"""Models that come in DDP, DataParallel, FSDP or torch.compile."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import NUM_SAMPLES, Net, config_of, some, trained
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.errors import Stopped, UsageError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


def with_a_wrapped_head(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Net()
    model.head = wrap(model.head)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("wrap", [DistributedDataParallel, DataParallel])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_model_that_is_parallelized_already_is_refused(
    world: World, wrap: Callable[[nn.Module], nn.Module], strategy: str
) -> None:
    name = wrap.__name__  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=rf"the model is a {name}, .* plain module"):
        trained(world, model=wrap(Net()), strategy=strategy)
    with pytest.raises(UsageError, match=rf"'head' in the model is a {name}"):
        trained(world, model=with_a_wrapped_head(wrap), strategy=strategy)


def test_a_model_that_fully_shard_has_sharded_is_refused(world: World) -> None:
    model = Net()
    fully_shard(model)
    with pytest.raises(UsageError, match="sharded already, by fully_shard"):
        trained(world, model=model)


class Compiler:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return graph.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # by dynamo
@pytest.mark.parametrize(("strategy", "is_part"), [("auto", False), ("fsdp", True)])
def test_a_compiled_model_trains_the_same_under_its_plain_names(
    world: World, strategy: str, *, is_part: bool
) -> None:
    compiler = Compiler()

    def wrap(module: nn.Module) -> nn.Module:
        found: nn.Module = torch.compile(module, backend=compiler)  # type: ignore[call-overload]
        return found

    expected, plain = trained(world, strategy=strategy)
    model = with_a_wrapped_head(wrap) if is_part else wrap(Net())
    losses, state = trained(world, strategy=strategy, model=model)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert list(state) == list(plain)
    assert compiler.num_graphs  # what the user has asked for is done
    with pytest.raises(UsageError, match=r"--bitwise does not go with torch\.compile"):
        trained(world, model=with_a_wrapped_head(wrap), bitwise=True)


class StopsOnce(Callback):
    """Stops after a number of steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self.step:
            raise StopRequested("as the test wants")


def test_a_checkpoint_of_a_compiled_model_is_resumed_by_the_plain_one(
    world: World, comm: Any
) -> None:
    with contextlib.ExitStack() as stack:
        folder = comm.bcast(stack.enter_context(tempfile.TemporaryDirectory()))
        for model in (torch.compile(Net(), backend="eager"), Net()):
            trainer = Trainer(
                model,
                some(NUM_SAMPLES),
                some(29, "val"),
                config_of(ema_decay=0.5),
                world=world,
                callbacks=[StopsOnce(4), Checkpointer(Path(folder) / "run")],
            )
            with contextlib.suppress(Stopped):
                trainer.fit()
        assert trainer.resumed_from
        assert trainer.state.step == 10
        comm.Barrier()

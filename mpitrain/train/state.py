"""What of a training is kept: its tensors by name, and the states of random numbers.

    model/NAME            weights and buffers
    optimizer/NAME/KEY    what the optimizer knows of a weight
    average/NAME          its moving average
    random/RANK/KIND      what a rank draws from; of use to as many ranks alone

Of sharded tensors each rank has its share. What all ranks have is equal, but for
buffers: rank zero's are the ones that count, as everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpitrain.checkpoints.loading import Loader
from mpitrain.data.randomness import seed_of_rank
from mpitrain.errors import UsageError, agreed
from mpitrain.train.strategy import Replica
from mpitrain.train.update import Updater
from mpitrain.world import World

MODEL, OPTIMIZER, AVERAGE, RANDOM = "model/", "optimizer/", "average/", "random/"


def tensors_of(
    model: nn.Module, replica: Replica, updater: Updater, world: World, prefix: str
) -> dict[str, Tensor]:
    """Return what this rank has to keep, by name; no copies.

    Args:
        model: The whole model.
        replica: What of it is trained in this stage.
        updater: Of that.
        world: Where this process stands.
        prefix: What the names of that have before them in the whole model.

    Raises:
        UsageError: The model's state has parts that cannot be kept; on every rank.
    """
    found: dict[str, Tensor] = {}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, tensor in split_state(model)[0].items():
        if world.is_rank_zero or name not in buffers:
            found[MODEL + name] = tensor
    for name, key, value in _optimizer_state(replica, updater):
        found[f"{OPTIMIZER}{prefix}{name}/{key}"] = value
    of_replica = {
        name for name, _ in replica.model.named_buffers(remove_duplicate=False)
    }
    for name, average in updater.averages().items():
        if world.is_rank_zero or name not in of_replica:
            found[AVERAGE + prefix + name] = average
    for kind, state in _random_state(world).items():
        found[f"{RANDOM}{world.rank}/{kind}"] = state
    return found


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's ``state_dict``: its tensors, and what is none.

    The latter is what modules return from `get_extra_state`.

    Raises:
        UsageError: JSON cannot carry it; on every rank.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value
            continue
        try:
            is_same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            is_same = False
        if not is_same:
            raise agreed(
                UsageError(
                    f"the model's state_dict has {name!r}, a {type(value).__name__}; "
                    "expected tensors, or what JSON can carry: a checkpoint holds "
                    "nothing that could run code when it is read. Make it a tensor "
                    "(register_buffer)"
                )
            )
        others[name] = value
    return tensors, others


def load_model(loader: Loader, model: nn.Module) -> None:
    """Give a model what a checkpoint has of it, before it is spread."""
    # Not in place: what a module returns may be a copy.
    tensors = {
        name: torch.empty_like(tensor, requires_grad=False)
        for name, tensor in split_state(model)[0].items()
    }
    loader.load({MODEL + name: tensor for name, tensor in tensors.items()})
    model.load_state_dict({**tensors, **loader.facts["extra_state"]})


def load_progress(
    loader: Loader, replica: Replica, updater: Updater, prefix: str
) -> None:
    """Give optimizer and averages what they had, in the stage that was under way.

    Args:
        loader: Of the checkpoint.
        replica: What is trained in this stage.
        updater: Of that.
        prefix: As `tensors_of` has it.
    """
    outlines = loader.outlines(OPTIMIZER)
    tensors: dict[str, Tensor] = {}
    optimizer = updater.local_optimizer
    own = {weight for group in optimizer.param_groups for weight in group["params"]}
    now = updater.config.optimizer
    is_other = loader.facts["config"]["optimizer"] != now  # begun from another run
    for name, weight in replica.model.named_parameters():
        if weight not in own or is_other:
            continue
        of_weight = {
            full.rpartition("/")[2]: outline
            for full, outline in outlines.items()
            if full.rpartition("/")[0] == prefix + name
        }
        for key, outline in of_weight.items():
            dtype = outline.properties.dtype
            if outline.size == weight.shape and key != "step":
                value = torch.empty_like(weight, dtype=dtype, requires_grad=False)
            else:
                # As Optimizer.load_state_dict has it: counts stay in host memory,
                # unless the device itself counts.
                counts = key == "step" and not optimizer.defaults.get("fused")
                device = "cpu" if counts else weight.device
                value = torch.empty(outline.size, dtype=dtype, device=device)
            optimizer.state[weight][key] = value
            tensors[f"{OPTIMIZER}{prefix}{name}/{key}"] = value
    kept = loader.outlines(AVERAGE)
    for name, average in updater.averages().items():
        if prefix + name in kept:
            tensors[AVERAGE + prefix + name] = average
    loader.load(tensors)


def load_random(loader: Loader, world: World, *, seed: int, num_steps: int) -> None:
    """Let this rank draw what it would have drawn.

    Where there are other numbers of ranks now, each gets a new seed, from the run's and
    the step.
    """
    if loader.facts["world_size"] != world.world_size:
        torch.manual_seed(seed_of_rank(seed_of_rank(seed, num_steps), world.rank))
        return
    state = _random_state(world)
    prefix = f"{RANDOM}{world.rank}/"
    known = loader.outlines(prefix)
    state = {kind: tensor for kind, tensor in state.items() if kind in known}
    loader.load({prefix + kind: tensor for kind, tensor in state.items()})
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
    numbers = state["python"].tolist()
    last = float(state["python_gauss"])
    random.setstate((3, tuple(numbers), None if np.isnan(last) else last))
    *words, position, has_gauss = state["numpy"].tolist()
    keys = np.array(words, np.uint32)
    gauss = float(state["numpy_gauss"])
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))


def _optimizer_state(
    replica: Replica, updater: Updater
) -> Iterator[tuple[str, str, Tensor]]:
    state = updater.local_optimizer.state
    for name, weight in replica.model.named_parameters():
        for key, value in state.get(weight, {}).items():
            if isinstance(value, Tensor):
                yield name, key, value


def _random_state(world: World) -> dict[str, Tensor]:
    """Return this rank's generators as tensors in host memory."""
    _, numbers, gauss = random.getstate()
    kind, *state = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    words: Any = state[0]
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor(
            float("nan") if gauss is None else gauss, dtype=torch.float64
        ),
        "numpy": torch.tensor([*words.tolist(), *state[1:3]], dtype=torch.int64),
        "numpy_gauss": torch.tensor(state[3], dtype=torch.float64),
    }
    if world.device != "cpu":
        found["cuda"] = torch.cuda.get_rng_state(world.device)
    return found

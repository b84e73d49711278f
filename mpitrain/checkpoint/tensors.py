"""The tensors of a checkpoint by name, and how they get back into a training.

    model/NAME            weights and buffers
    optimizer/NAME/KEY    the optimizer's state of a weight
    average/NAME          the EMA of a weight
    objects/NAME/...      other objects of a custom loop, see `objects`
    random/RANK/KIND      a rank's random number generators

A sparse KEY, such as the momentum of an embedding, is stored dense, under its name with
the number of its sparse dimensions. A KEY that ends with .number is a Python number.

Of sharded tensors each rank has its shard. What all ranks have is equal, except for
buffers, of which rank zero's are saved.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpitrain.checkpoint.format import check_json
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.console import say
from mpitrain.data.randomness import rank_seed
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.train.engine import Engine
from mpitrain.train.metrics import TrainState
from mpitrain.train.optimizer import OptimizerWrapper
from mpitrain.train.scheduled_optimizers import ScheduledOptimizer

MODEL, OPTIMIZER, EMA, RANDOM = "model/", "optimizer/", "average/", "random/"
OBJECTS = "objects/"
SPARSE, NUMBER = ".sparse-", ".number"
KERNELS = ("fused", "foreach", "capturable")
"""How an optimizer computes on its device and weights: not loaded, since a resumed job
may have others."""


def tensors_to_save(
    model: nn.Module,
    trained: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    ema: Mapping[str, Tensor],
    prefix: str,
    world: World,
) -> dict[str, Tensor]:
    """Return the tensors that this rank has to save, by name; no copies.

    The optimizers, with ZeRO of this rank's shard, train ``trained``, a part of
    ``model`` whose names there begin with ``prefix``; ``ema`` has its names.
    """
    is_zero = world.is_rank_zero
    found = saved_by_rank(split_state(model)[0], model, MODEL, is_rank_zero=is_zero)
    for optimizer in optimizers:
        for name, key, value in _optimizer_state(trained, optimizer):
            found[f"{OPTIMIZER}{prefix}{name}/{key}"] = value
    found |= saved_by_rank(ema, trained, EMA + prefix, is_rank_zero=is_zero)
    return found | random_to_save(world)


def saved_by_rank(
    tensors: Mapping[str, Tensor], module: nn.Module, prefix: str, *, is_rank_zero: bool
) -> dict[str, Tensor]:
    """Return what this rank has to save of a module's tensors, by name with prefix.

    Buffers, such as batch norm's, may differ between ranks: they are rank zero's.
    """
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {
        prefix + name: tensor
        for name, tensor in tensors.items()
        if is_rank_zero or name not in buffers
    }


def random_to_save(world: World) -> dict[str, Tensor]:
    """Return the states of this rank's random number generators, by name."""
    state = _random_state(world).items()
    return {f"{RANDOM}{world.rank}/{kind}": value for kind, value in state}


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a ``state_dict``'s tensors, and what `get_extra_state` returned."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise UsageError(
                    f"the model is on the device meta, where {name} has no numbers; "
                    "expected a model on this rank's device"
                ).on_all_ranks()
            tensors[name] = value
            continue
        hint = ". Make it a tensor (register_buffer)"
        check_json(value, f"{name!r} of the model's state_dict", hint)
        others[name] = value
    return tensors, others


def load_model(
    reader: CheckpointReader,
    model: nn.Module,
    prefix: str = MODEL,
    extra_state: Mapping[str, Any] | None = None,
) -> None:
    """Load the state of a model, which may be sharded."""
    if extra_state is None:
        extra_state = reader.metadata["extra_state"]
    tensors = split_state(model)[0]
    here = {name: of.shape for name, of in tensors.items()}
    there = {name: of.shape for name, of in reader.stored(prefix).items()}
    for name in {**there, **here}:
        if here.get(name) != there.get(name):
            found, expected = (
                f"of shape {tuple(shapes[name])}" if name in shapes else "missing"
                for shapes in (here, there)
            )
            raise UsageError(
                f"{reader.checkpoint.path} was written by another model: {name} is "
                f"{found} in this model, and {expected} in the checkpoint. "
                "Expected the same model, or another run folder"
            ).on_all_ranks()
    # In place, so that there is no second model; what a module returns may be a copy.
    reader.load({prefix + name: tensor for name, tensor in tensors.items()})
    model.load_state_dict({**tensors, **extra_state})


def load_states(
    reader: CheckpointReader,
    named: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    prefix: str = OPTIMIZER,
) -> None:
    """Load an optimizer's state of weights, by their names in the checkpoint."""
    stored = reader.stored(prefix)
    tensors: dict[str, Tensor] = {}
    groups = {
        weight: group for group in optimizer.param_groups for weight in group["params"]
    }
    for name, weight in named:
        if weight not in groups:
            continue
        of_weight = {
            full.rpartition("/")[2]: outline
            for full, outline in stored.items()
            if full.rpartition("/")[0] == name
        }
        for key, outline in of_weight.items():
            dtype = outline.dtype
            # With the strides and shards of its weight. A weight without dimensions has
            # the shape of a count of steps.
            if outline.shape == weight.shape and key != "step":
                value = torch.empty_like(weight, dtype=dtype, requires_grad=False)
            else:
                # As in Optimizer.load_state_dict: counts stay in host memory, unless
                # a kernel reads them.
                group = groups[weight]
                in_kernel = group.get("fused") or group.get("capturable")
                device = "cpu" if key == "step" and not in_kernel else weight.device
                value = torch.empty(outline.shape, dtype=dtype, device=device)
            optimizer.state[weight][key] = value
            tensors[f"{prefix}{name}/{key}"] = value
    reader.load(tensors)
    for state in optimizer.state.values():
        for key in [key for key in state if SPARSE in key]:
            plain, _, num_dimensions = key.partition(SPARSE)
            state[plain] = state.pop(key).to_sparse(int(num_dimensions))
        for key in [key for key in state if key.endswith(NUMBER)]:
            state[key.removesuffix(NUMBER)] = state.pop(key).item()


def load_ema(
    reader: CheckpointReader, ema: Mapping[str, Tensor], prefix: str = ""
) -> None:
    """Load the averages that the checkpoint has; see `tensors_to_save`."""
    stored = reader.stored(EMA)
    reader.load(
        {
            EMA + prefix + name: average
            for name, average in ema.items()
            if prefix + name in stored
        }
    )


def load_averaged(
    reader: CheckpointReader, model: nn.Module, ema: Mapping[str, Tensor], prefix: str
) -> None:
    """Load a model with its averages as weights, and let them be the present ones.

    The checkpoint may be of another stage, with averages of other weights.
    """
    load_model(reader, model)
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: tensor.detach() for name, tensor in named}
    load_ema(reader, tensors)
    for name, average in ema.items():
        average.copy_(tensors[prefix + name])


def load_random(
    reader: CheckpointReader, world: World, *, seed: int, step: int
) -> None:
    """Load this rank's random number generators.

    On another number of ranks, seed torch's from the step: what it drew cannot be had.
    """
    if reader.metadata["world_size"] != world.world_size:
        torch.manual_seed(rank_seed(rank_seed(seed, step), world.rank))
        return
    state = _random_state(world)
    prefix = f"{RANDOM}{world.rank}/"
    known = reader.stored(prefix)
    state = {kind: tensor for kind, tensor in state.items() if kind in known}
    reader.load({prefix + kind: tensor for kind, tensor in state.items()})
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        module = torch.get_device_module(world.device)
        module.set_rng_state(state["cuda"], world.device)
    numbers = state["python"].tolist()
    last = float(state["python_gauss"])
    random.setstate((3, tuple(numbers), None if np.isnan(last) else last))
    *words, position, has_gauss = state["numpy"].tolist()
    keys = np.array(words, np.uint32)
    gauss = float(state["numpy_gauss"])
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))


def _optimizer_state(
    trained: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, str, Tensor]]:
    for name, weight in trained.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor) and value.is_sparse:
                yield name, f"{key}{SPARSE}{value.sparse_dim()}", value.to_dense()
            elif isinstance(value, Tensor):
                yield name, key, value
            elif isinstance(value, int | float):
                # Python's floats keep their bits; torch's default has fewer.
                dtype = torch.float64 if isinstance(value, float) else None
                yield name, key + NUMBER, torch.tensor(value, dtype=dtype)
            elif value is not None:
                raise UsageError(
                    f"the optimizer {type(optimizer).__name__} keeps {key!r}, a "
                    f"{type(value).__name__}, of each weight; expected tensors: "
                    "a checkpoint cannot hold it"
                ).on_all_ranks()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps more than a checkpoint holds; local."""
    kind, problem = type(optimizer), ""
    owner = next(it for it in kind.__mro__ if "state_dict" in vars(it))
    others = {} if _is_torchs(kind) else vars(optimizer)  # ZeRO has one in `optim`
    wrapped = [
        key
        for key, value in others.items()
        if any(isinstance(it, torch.optim.Optimizer) for it in _members(value))
    ]
    keys = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if not _is_torchs(owner):
        problem = "has a state_dict() of its own"
    elif wrapped:
        problem = f"has another optimizer in its attribute {wrapped[0]!r}"
    elif keys:
        problem = f"has the key {keys[0]!r} in its state, which is no weight"
    if problem:
        raise UsageError(
            f"the optimizer {kind.__name__} {problem}: a checkpoint cannot hold what "
            "it keeps there. Expected one class that keeps all in self.state[weight] "
            "and in the numbers of self.param_groups, or no Checkpointer"
        ).on_all_ranks()
    if isinstance(local := getattr(optimizer, "optim", None), torch.optim.Optimizer):
        check_optimizer(local)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def load_param_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> None:
    """Set what `ScheduledOptimizer.plain_groups` returned, or a part of it."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key not in KERNELS:
                _set_number(group, key, value)


def schedules_to_save(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """Return what JSON can hold of the user's optimizers and schedulers."""
    states = []
    for it in optimizer.optimizers:
        check_optimizer(it.optimizer)
        state = (
            {} if it.scheduler is None else _with_text_keys(it.scheduler.state_dict())
        )
        check_json(state, f"the state of {type(it.scheduler).__name__}")
        has_groups = bool(optimizer.form or state)
        states.append(
            {
                "groups": it.plain_groups() if has_groups else [],
                "first_groups": it.first_groups if has_groups else [],
                "scheduler": state,
            }
        )
    form = optimizer.form or optimizer.config.optimizer
    return {"form": form, "states": states, "num_steps": optimizer.num_steps}


def load_stage(reader: CheckpointReader, engine: Engine, *, is_own: bool) -> None:
    """Load the averages, loss scale and optimizers of a stage, if it is the same.

    Of another run, ``is_own`` false, the optimizers if they are alike. Then what the
    script has set in their groups stays, and its schedulers step to this place.
    """
    found, stage = reader.metadata["trainer"], engine.stage
    if (found["stage"], found.get("trainable")) != (stage.name, stage.trainable):
        return  # a new stage begins with a new optimizer
    optimizer, prefix = engine.optimizer, engine.part.prefix
    load_ema(reader, optimizer.ema_values, prefix)
    if found["config"]["precision"] == optimizer.config.precision:
        optimizer.scale.restore(found["loss_scale"])
    saved = found.get("optimizers") or {  # not in older checkpoints
        "form": found["config"]["optimizer"],
        "states": [{"groups": [], "scheduler": {}}],
    }
    state = TrainState(**found["state"])
    optimizer.num_steps = saved.get("num_steps", state.step)
    form = optimizer.form or optimizer.config.optimizer
    is_alike = saved["form"] == form
    if is_own and not is_alike:
        raise UsageError(
            f"{reader.checkpoint.path} was written with other optimizers: "
            f"{saved['form']}; found {form}. Expected the same, or another run folder"
        ).on_all_ranks()
    states = saved["states"] if is_alike else [None] * len(optimizer.optimizers)
    trained = engine.strategy.model.named_parameters()
    named = [(prefix + name, weight) for name, weight in trained]
    for it in optimizer.optimizers if is_alike else ():
        load_states(reader, named, it.local)
    steps_done = engine.plan.steps_done(stage, state)
    if steps_done is None:
        steps_done = optimizer.num_steps
    epochs_done = max(0, state.epoch - stage.first_epoch)
    for it, of_one in zip(optimizer.optimizers, states, strict=True):
        if is_own:
            _load_schedule(it, of_one, has_groups=bool(optimizer.form or it.scheduler))
            continue
        num = steps_done if it.interval == "step" else epochs_done
        it.fast_forward_scheduler(num, reader.checkpoint.path)
        if of_one is not None and of_one["groups"]:
            changed = _take_progress(it, of_one)
            # Of the configured one the configuration tells.
            if changed and optimizer.form and engine.world.is_rank_zero:
                say(f"changed since then: {', '.join(changed)} of {it.kind}")


def _load_schedule(
    it: ScheduledOptimizer, saved: Mapping[str, Any], *, has_groups: bool
) -> None:
    if it.scheduler is not None and saved["scheduler"]:
        fresh = it.scheduler.state_dict()
        it.scheduler.load_state_dict(_like(fresh, saved["scheduler"]))
    if saved["groups"] and has_groups:
        load_param_groups(it.optimizer, saved["groups"])
    it.first_groups = saved.get("first_groups") or it.first_groups


def _take_progress(it: ScheduledOptimizer, saved: Mapping[str, Any]) -> list[str]:
    """Let a new run's groups have what the run before has counted in them.

    That is what its script has set as that of the run before, the run before has
    changed, and the scheduler does not set. Return what the script has set otherwise.
    """
    firsts = saved.get("first_groups")
    if not firsts:  # in older checkpoints; what the run before has changed is not known
        return []
    changed: list[str] = []
    for number, (group, mine, now, first, last) in enumerate(
        zip(
            it.optimizer.param_groups,
            it.first_groups,
            it.plain_groups(),
            firsts,
            saved["groups"],
            strict=True,
        )
    ):
        for key in mine.keys() & last.keys() - {*KERNELS, "initial_lr"}:
            # The rate at the begin; JSON has lists for tuples.
            name = "initial_lr" if key == "lr" and "initial_lr" in first else key
            before, value = _as_tuple(first.get(name)), mine.get(name, mine[key])
            if value != before:
                where = f" of group {number}" * (len(firsts) > 1)
                changed.append(f"{key}{where}: {before} -> {value}")
            elif key != "lr" and now[key] == value:
                _set_number(group, key, last[key])
        if it.monitor is not None and "num_bad_epochs" in saved["scheduler"]:
            # What a metric has reduced no number of steps can tell.
            share = last["lr"] / first["lr"] if first["lr"] else 1.0
            _set_number(group, "lr", now["lr"] * share)
    return sorted(changed)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _set_number(group: dict[str, Any], key: str, value: Any) -> None:
    # In place: a fused or compiled step reads the tensor that it was given.
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = _as_tuple(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(it) for key, it in value.items()}
    return [*map(_with_text_keys, value)] if isinstance(value, list) else value


def _like(fresh: Any, stored: Any) -> Any:
    """Return a state with the keys it had, such as the milestones of MultiStepLR."""
    if isinstance(fresh, dict) and isinstance(stored, dict):
        keys = {str(key): key for key in fresh}
        named = {keys.get(name, name): it for name, it in stored.items()}
        found = copy.copy(fresh)  # no class of it is called: a defaultdict has two
        found.clear()
        for key, it in named.items():
            found[key] = _like(fresh.get(key), it)
        return found
    if isinstance(fresh, list) and isinstance(stored, list):
        # A scheduler may have taken off what was done.
        return [_like(*it) for it in zip_longest(fresh[: len(stored)], stored)]
    return stored


def _random_state(world: World) -> dict[str, Tensor]:
    _, numbers, gauss = random.getstate()
    kind, *state = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    words: Any = state[0]
    # NaN stands for None: no second number of a pair of normal ones is left.
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
        module = torch.get_device_module(world.device)
        found["cuda"] = module.get_rng_state(world.device)
    return found

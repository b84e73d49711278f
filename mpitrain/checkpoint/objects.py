"""What a custom loop saves, by name: modules, optimizers, other states, plain values.

    model/, optimizer/    the tensors of these two names, as `Trainer` stores them
    objects/NAME/         those of any other name

What is no tensor goes into the metadata as JSON, in which a tensor is its name. An
optimizer's state is stored by the names of its weights in the modules that are saved
with it, so that it fits on another number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import (
    KERNELS,
    OBJECTS,
    SPARSE,
    check_optimizer,
    load_model,
    load_states,
    saved_by_rank,
    split_state,
)
from mpitrain.data.samples import kind_of
from mpitrain.errors import UsageError
from mpitrain.torch_compat import local_shard, reshard

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

PLAIN = (bool, int, float, str)
VALUES = (*PLAIN, Tensor, Mapping, list, tuple)


def split_objects(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what has a state, unwrapped, and the plain values."""
    stateful, plain = {}, {}
    for name, it in objects.items():
        if isinstance(it, WRAPPERS):
            stateful[name] = it.module
        elif isinstance(it, Tensor) or hasattr(it, "load_state_dict"):
            stateful[name] = it
        else:
            plain[name] = it
    return stateful, plain


def pack_objects(
    objects: Mapping[str, Any], *, is_rank_zero: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors that this rank has to save, by name, and JSON by object.

    Buffers, and what is neither a module nor an optimizer, are rank zero's. The JSON of
    optimizers may have other weights on each rank: see `merge`.
    """
    tensors: dict[str, Tensor] = {}
    packed: dict[str, Any] = {}
    reshard(objects.values())
    names = _weight_names(objects)
    for name, it in objects.items():
        prefix = prefix_of(name)
        if isinstance(it, nn.Module):
            state, packed[name] = split_state(it)
            tensors |= saved_by_rank(state, it, prefix, is_rank_zero=is_rank_zero)
        elif isinstance(it, torch.optim.Optimizer):
            packed[name] = _pack_optimizer(name, it, names, tensors)
        else:
            found: dict[str, Tensor] = {}
            whole = it if isinstance(it, Tensor) else it.state_dict()
            packed[name] = _pack(whole, f"{prefix}value", found)
            for key, value in found.items():
                if is_rank_zero or local_shard(value) is not None:
                    tensors[key] = value
    return tensors, packed


def merge(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return rank zero's JSON, with the values of weights that other ranks have."""
    merged = of_ranks[0] if of_ranks else {}
    for other in of_ranks[1:]:
        for name, it in other.items():
            if isinstance(it, dict) and "weights" in it and "groups" in it:
                merged[name]["weights"] |= it["weights"]
    return merged


def load_objects(reader: CheckpointReader, objects: Mapping[str, Any]) -> None:
    """Load the states of objects that were saved by these names."""
    known = reader.metadata.get("objects")
    reshard(objects.values())
    path, names = reader.checkpoint.path, _weight_names(objects)
    if known is None:  # of an older version
        groups = [_pack(it, "", {}) for it in reader.metadata["param_groups"]]
        optimizer = {"groups": groups, "weights": {}}
        known = {"model": reader.metadata["extra_state"], "optimizer": optimizer}
    if missing := objects.keys() - known.keys():
        raise UsageError(
            f"{path} has no {', '.join(sorted(missing))}; expected some of "
            f"{', '.join(known)}, by the names that save() was called with"
        ).on_all_ranks()
    for name, it in objects.items():
        prefix, packed = prefix_of(name), known[name]
        if isinstance(it, nn.Module):
            load_model(reader, it, prefix, packed)
        elif isinstance(it, torch.optim.Optimizer):
            _load_optimizer(reader, name, it, names, packed)
        elif isinstance(it, Tensor):
            with torch.no_grad():
                it.copy_(_unpack(packed, reader, it))
        else:
            it.load_state_dict(_unpack(packed, reader, it.state_dict()))


def prefix_of(name: str) -> str:
    """Return what the names of an object's tensors begin with."""
    return f"{name}/" if name in ("model", "optimizer") else f"{OBJECTS}{name}/"


def _weight_names(objects: Mapping[str, Any]) -> dict[Tensor, list[str]]:
    """Return the names of each weight: of ``model`` its own, else NAME/its own.

    A weight that is shared has several. Its state is saved by the first one, which may
    be another one when it is restored.
    """
    names: dict[Tensor, list[str]] = {}
    for name, it in objects.items():
        if isinstance(it, nn.Module):
            for key, weight in it.named_parameters(remove_duplicate=False):
                own = key if name == "model" else f"{name}/{key}"
                names.setdefault(weight, []).append(own)
        elif isinstance(it, Tensor):
            names.setdefault(it, []).append(name)
    return names


def _pack_optimizer(
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, list[str]],
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    prefix, weights, groups = prefix_of(name), {}, []
    _check_weights(name, optimizer, names)
    for number, group in enumerate(optimizer.param_groups):
        # Without what is no value, such as a function: the next job has it.
        values = {
            key: value
            for key, value in group.items()
            if key != "params" and (value is None or isinstance(value, VALUES))
        }
        groups.append(_pack(values, f"{prefix}/groups/{number}", tensors))
    for weight, state in _local(optimizer).state.items():
        others, of = {}, names[weight][0]
        for key, value in state.items():
            full = f"{prefix}{of}/{key}"
            if isinstance(value, Tensor) and value.is_sparse:
                tensors[f"{full}{SPARSE}{value.sparse_dim()}"] = value.to_dense()
            elif isinstance(value, Tensor):
                tensors[full] = value
            else:
                others[key] = _pack(value, f"{prefix}/{of}/{key}", tensors)
        if others:
            weights[of] = others
    return {"groups": groups, "weights": weights}


def _check_weights(
    name: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, list[str]]
) -> None:
    check_optimizer(optimizer)
    groups = optimizer.param_groups
    if any(weight not in names for group in groups for weight in group["params"]):
        raise UsageError(
            f"{name} trains a weight that no module has which is saved or restored with"
            " it; expected all modules of its weights as arguments, such as "
            "save(step, model=model, optimizer=optimizer)"
        ).on_all_ranks()


def _load_optimizer(
    reader: CheckpointReader,
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, list[str]],
    packed: Mapping[str, Any],
) -> None:
    _check_weights(name, optimizer, names)
    named = _named_in(reader, name, optimizer, names, packed)
    path, found = reader.checkpoint.path, optimizer.param_groups
    if len(found) != len(packed["groups"]):
        raise UsageError(
            f"{name} has {len(found)} parameter groups, and {len(packed['groups'])} in "
            f"{path}; expected the same"
        ).on_all_ranks()
    for group, saved in zip(found, packed["groups"], strict=True):
        for key, value in _unpack(saved, reader, group).items():
            if key in KERNELS:
                continue
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # it may be part of a graph
            else:
                group[key] = value
    load_states(reader, named, _local(optimizer), prefix_of(name))
    trained = {it for group in _local(optimizer).param_groups for it in group["params"]}
    for of, weight in named:
        for key, value in packed["weights"].get(of, {}).items():
            if weight in trained:
                _local(optimizer).state[weight][key] = _unpack(value, reader, None)


def _named_in(
    reader: CheckpointReader,
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, list[str]],
    packed: Mapping[str, Any],
) -> list[tuple[str, Tensor]]:
    """Return the weights whose states are in the checkpoint, by their names there."""
    # Tensors of groups, and within other values, begin with a slash: of no weight.
    stored = {
        full.rpartition("/")[0]
        for full in reader.stored(prefix_of(name))
        if not full.startswith("/")
    } | packed["weights"].keys()
    found = {
        weight: next(of for of in all_names if of in stored)
        for weight, all_names in names.items()
        if not stored.isdisjoint(all_names)
    }
    left = sorted(stored.difference(found.values()))
    trained = [it for group in optimizer.param_groups for it in group["params"]]
    # A state may be of a weight that is not trained any more. But a weight without a
    # state may be that one, by a name of a module that is not here.
    if left and any(weight not in found for weight in trained):
        raise UsageError(
            f"{name}: {reader.checkpoint.path} has the state of {left[0]}, which no "
            "module has that is restored with it; expected all modules of its weights "
            "by the names that save() was called with"
        ).on_all_ranks()
    return [(of, weight) for weight, of in found.items()]


def _local(optimizer: Any) -> torch.optim.Optimizer:
    """Return what has the states: of ZeRO the optimizer of this rank's weights."""
    return getattr(optimizer, "optim", optimizer)  # type: ignore[no-any-return]


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON in which tensors are their names; add them to ``tensors``."""
    if isinstance(value, Tensor):
        while path in tensors:  # of keys 1 and "1"
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping) and all(isinstance(k, str | int) for k in value):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = value.items()
        return {kind: [[k, _pack(it, f"{path}/{k}", tensors)] for k, it in pairs]}
    if isinstance(value, list | tuple):
        parts = [_pack(it, f"{path}/{i}", tensors) for i, it in enumerate(value)]
        return parts if isinstance(value, list) else {"tuple": parts}
    if value is None or isinstance(value, PLAIN):
        return value
    raise UsageError(
        f"{path} is {kind_of(value)}; expected tensors, numbers, text, None, and "
        "lists, tuples and dicts of them. A checkpoint holds nothing that could run "
        "code when it is read"
    ).on_all_ranks()


def _unpack(packed: Any, reader: CheckpointReader, now: Any) -> Any:
    """Return what was packed; tensors on the devices of those that stand there now."""

    def part(key: Any) -> Any:
        try:
            return now[key]
        except (TypeError, KeyError, IndexError):
            return None

    if isinstance(packed, list):
        return [_unpack(it, reader, part(i)) for i, it in enumerate(packed)]
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tuple":
        return tuple(_unpack(value, reader, now))
    if kind != "tensor":
        found = {key: _unpack(it, reader, part(key)) for key, it in value}
        return Counter(found) if kind == "counter" else found
    stored = reader.stored(value)[""]
    if isinstance(now, Tensor) and now.shape == stored.shape:
        tensor = torch.empty_like(now, dtype=stored.dtype, requires_grad=False)
    elif len(stored.places) > 1:
        raise UsageError(
            f"{value} was sharded over ranks, and there is no such tensor yet to load "
            "it into; expected an object whose state_dict() has it"
        ).on_all_ranks()
    else:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
    reader.load({value: tensor})
    return tensor

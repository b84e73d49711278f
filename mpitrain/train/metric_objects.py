"""Metrics that keep a state over the whole data set, as those of torchmetrics.

Each rank updates its own copy by its batches. At the end every rank sends its states to
rank zero in one exchange, whatever they are: there a rank without a sample, or with
other states, is found, and nobody waits for it. Rank zero lets the metric join them,
computes, and sends the result to all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpitrain.data.samples import kind_of, map_tensors
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.tasks.task import MetricsFn, Task
from mpitrain.train.evaluate import Evaluation

MAX_NUMBERS = 100  # of a vector that are recorded, such as those of the classes

METHODS = ("update", "compute", "reset")


class _State(NamedTuple):
    """The state of one metric on one rank, its tensors on the CPU."""

    kind: str  # name of the class
    is_updated: bool
    values: dict[str, Any]  # tensors, or lists of tensors, by name


def split_metrics(task: Task, metrics: Any) -> MetricsFn | None:
    """Give a task the metric objects of a mapping; return a function for the others."""
    if not isinstance(metrics, Mapping):
        return metrics  # type: ignore[no-any-return]
    functions = {}
    for name, metric in metrics.items():
        if all(callable(getattr(metric, method, None)) for method in METHODS):
            task.metric_objects[name] = metric
        elif callable(metric):
            functions[name] = metric
        else:
            raise UsageError(
                f"metric {name!r} is {kind_of(metric)}; expected a function, or an "
                "object with update, compute and reset"
            )
    return lambda *args: {name: it(*args) for name, it in functions.items()}


def flatten_metrics(metrics: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return metrics by name, on the device; those of a collection one by one.

    A collection shares states between metrics, which are then no longer told apart.

    Raises:
        UsageError: What one is is not known.
    """
    found: dict[str, Any] = {}
    for name, metric in metrics.items():
        members = metric.items() if hasattr(metric, "items") else [(name, metric)]
        for key, member in members:
            is_torchs = isinstance(member, nn.Module) and any(_parts(member))
            if not is_torchs and not callable(getattr(member, "merge_state", None)):
                raise UsageError(
                    f"metric {key!r} is {kind_of(member)}; expected a function, a "
                    "metric of torchmetrics, or an object with update, compute, reset "
                    "and merge_state(other), which adds the state of another rank's"
                ).on_all_ranks()
            if is_torchs:
                member.to(device)
                for part in _parts(member):
                    part.set_dtype(torch.float64)  # of its sums, float32 otherwise
            found[key] = member
    return found


def add_metrics(found: Evaluation, task: Task, ranks: Communicator) -> Evaluation:
    """Add the metrics of a task's objects, and those derived of all; collective."""
    metrics = task.metric_objects
    if not metrics and type(task).derived_metrics is Task.derived_metrics:
        return found
    of_ranks = ranks.gather([_state_of(metric) for metric in metrics.values()])

    def compute() -> tuple[dict[str, float], dict[str, Any]]:
        values, results = dict(found.values), {}
        for place, (name, metric) in enumerate(metrics.items()):
            of_metric = [states[place] for states in of_ranks]
            try:
                result = _compute(name, metric, of_metric)
            except DataError:
                raise
            except Exception as error:
                raise DataError(
                    f"the metric {name!r} cannot be computed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            results[name] = map_tensors(lambda x: x.detach().cpu(), result)
            _add(values, dict(_numbers(name, results[name])))
        _add(values, task.derived_metrics(values))
        return values, results

    values, results = ranks.on_rank_zero(compute, "compute the metrics")
    return replace(found, values=values, results=results)


def _add(values: dict[str, float], more: Mapping[str, float]) -> None:
    if twice := values.keys() & more.keys():
        raise UsageError(f"two metrics are named {twice.pop()!r}; expected other names")
    values |= more


def _compute(name: str, metric: Any, of_ranks: list[Any]) -> Any:
    if not isinstance(metric, nn.Module):
        for other in of_ranks[1:]:
            metric.merge_state(other)
        return metric.compute()
    for part, states in zip(_parts(metric), zip(*of_ranks, strict=True), strict=True):
        _join(name, part, states)
    with warnings.catch_warnings():
        # Rank zero's own may have no sample.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        return metric.compute()


def _join(name: str, part: Any, of_ranks: tuple[_State, ...]) -> None:
    """Let a metric of torchmetrics find the states of all ranks when it computes.

    It asks its ``dist_sync_fn`` for the states of all ranks, tensor by tensor, and
    reduces them as it knows. Of a list only its own part is asked for: that one has all
    ranks' elements already, since they may be of unequal number.
    """
    first = of_ranks[0]
    for rank, state in enumerate(of_ranks):
        if (found := _outline(state)) != (expected := _outline(first)):
            raise DataError(
                f"the metric {name!r} differs between ranks: {expected} on rank 0, "
                f"{found} on rank {rank}.\nExpected the same kind on every rank"
            )
    updated = [state for state in of_ranks if state.is_updated] or [first]
    tensors: dict[int, list[Tensor]] = {}
    lists: list[list[Tensor]] = []
    device = part.device
    for key, value in first.values.items():
        if isinstance(value, list):
            joined = [it.to(device) for state in of_ranks for it in state.values[key]]
            setattr(part, key, joined)
            tensors |= {id(it): [it] for it in joined}
            lists.append(joined)
        else:
            of_key = [state.values[key].to(device) for state in updated]
            setattr(part, key, of_key[0])
            tensors[id(of_key[0])] = of_key

    def gather(asked: Tensor, group: Any = None) -> list[Tensor]:
        del group
        if id(asked) not in tensors and not any(_is_whole(asked, it) for it in lists):
            raise DataError(
                f"the metric {name!r} asks for a tensor that is no state of its own, "
                f"{kind_of(asked)}; expected one that is computed from its states"
            )
        return tensors.get(id(asked), [asked])

    part.dist_sync_fn = gather
    part.distributed_available_fn = lambda: len(updated) > 1


def _is_whole(asked: Tensor, elements: list[Tensor]) -> bool:
    """Whether a tensor is the elements of a list, concatenated, or nothing at all."""
    if not elements:
        return asked.numel() == 0
    numel = sum(it.numel() for it in elements)
    return asked.numel() == numel and torch.equal(
        asked.flatten(), torch.cat([it.flatten() for it in elements]).to(asked.dtype)
    )


def _parts(metric: nn.Module) -> Iterator[Any]:
    """Yield a metric and those that it wraps, in one order on all ranks."""
    for module in metric.modules():
        if hasattr(module, "metric_state") and hasattr(module, "dist_sync_fn"):
            yield module


def _state_of(metric: Any) -> Any:
    if not isinstance(metric, nn.Module):
        return metric
    return [
        _State(
            type(part).__name__,
            part.update_called,
            map_tensors(lambda x: x.detach().cpu(), part.metric_state),
        )
        for part in _parts(metric)
    ]


def _outline(state: _State) -> str:
    """Describe a state, but for the number of elements in its lists."""
    found = []
    for name, value in state.values.items():
        is_list = isinstance(value, list)
        found.append(f"{name}: {'list' if is_list else kind_of(value)}")
    return f"{state.kind} ({', '.join(found)})"


def _numbers(name: str, result: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a result: a scalar, a short vector, or those by name."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            has_name = str(key) == name or str(key).startswith(f"{name}_")
            yield from _numbers(str(key) if has_name else f"{name}_{key}", value)
    elif isinstance(result, Tensor) and result.numel() == 1:
        yield name, float(result)
    elif isinstance(result, Tensor) and result.ndim == 1 and len(result) <= MAX_NUMBERS:
        yield from ((f"{name}_{i}", float(it)) for i, it in enumerate(result))
    elif isinstance(result, int | float):
        yield name, float(result)

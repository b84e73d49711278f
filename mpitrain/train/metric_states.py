"""The states of a metric of torchmetrics, joined over ranks as it does, but exactly.

torchmetrics' own exchange waits for ranks that have fewer elements or none, and joins
lists rank by rank. Here it is turned off: ranks send what `TorchMetric.state` returns,
and rank zero reduces it as the metric says, with the elements of lists in the order of
the data set. What then depends on the number of ranks is an error.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mpitrain.data.samples import kind_of, map_tensors
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import refuse_differences

# Of torchmetrics: the result is random, or by the batches of one process.
NOT_JOINED = ("BootStrapper", "MetricTracker", "Running")

# What an update changes of every metric, and is no state.
OF_BASE = (
    *("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache"),
    *("_defaults", "_persistent", "_reductions"),
)


class MetricState(NamedTuple):
    """The state of a metric, or of one that it wraps, on a rank; on the CPU."""

    kind: str  # name of the class
    is_updated: bool
    values: dict[str, Any]  # tensors; of lists the elements, by number of the batch
    once: dict[str, Any]  # what updates set once, such as a number of classes
    again: list[str]  # other attributes that updates change


class TorchMetric:
    """A metric of torchmetrics on this rank, and those that it wraps.

    Its sums are in float64. ``is_exact``: results must have the same bits on any number
    of ranks, and what sums floating-point numbers is refused.

    Raises:
        UsageError: Its states cannot be joined.
    """

    def __init__(self, name: str, metric: Any, device: str, *, is_exact: bool) -> None:
        self.name, self.metric, self._is_exact = name, metric, is_exact
        metric.to(device)
        for module in metric.modules():
            kinds = [cls.__name__ for cls in type(module).__mro__]
            if refused := [it for it in NOT_JOINED if it in kinds]:
                raise UsageError(
                    f"metric {name!r} is a {refused[0]}, whose result depends on the "
                    "number of ranks; expected another metric"
                )
            if hasattr(module, "_enable_compute_groups"):  # states would be shared
                module._enable_compute_groups = False
        for part in parts_of(metric):
            self._prepare(part)
        self.reset()

    def _prepare(self, part: Any) -> None:
        for key, value in vars(part).items():
            is_modules = any(isinstance(it, nn.Module) for it in _trace(value))
            if key != "_modules" and is_modules:
                raise UsageError(
                    f"metric {self.name!r} has modules in its attribute {key!r}, where "
                    "nothing finds them; expected a ModuleList or a ModuleDict"
                )
        for key, default in part._defaults.items():
            if isinstance(default, Tensor):
                self._check_exact(part, key, default)
                if default.is_floating_point():  # set_dtype() casts networks, too
                    part._defaults[key] = default.double()
            # A copy: updates append to a list.
            setattr(part, key, copy.copy(part._defaults[key]))
        part._dtype = torch.float64  # of states that an update adds
        # So compute() exchanges nothing: other ranks are not in it.
        part.distributed_available_fn = _never

    def reset(self) -> None:
        """Reset it."""
        self.metric.reset()
        self._starts: list[tuple[int, list[dict[str, int]]]] = []
        self._before = [_attributes(part) for part in parts_of(self.metric)]

    def begin_batch(self, number: int) -> None:
        """Note where the batch of this number begins in the lists."""
        states = [part.metric_state.items() for part in parts_of(self.metric)]
        lengths = [
            {key: len(it) for key, it in items if isinstance(it, list)}
            for items in states
        ]
        self._starts.append((number, lengths))

    def state(self) -> list[MetricState]:
        """Return the states of the metric and those that it wraps."""
        found = []
        pairs = zip(parts_of(self.metric), self._before, strict=True)
        for place, (part, before) in enumerate(pairs):
            values, once, again = {}, {}, []
            is_updated = part.update_called
            for key, value in part.metric_state.items():
                values[key] = map_tensors(lambda x: x.detach().cpu(), value)
                if isinstance(value, Tensor):  # of wrappers no updates are counted
                    is_updated |= not value.equal(part._defaults[key])
                else:
                    is_updated |= bool(value)
                    starts = [(n, it[place].get(key, 0)) for n, it in self._starts]
                    values[key] = _by_batch(values[key], starts)
            for key, value in _attributes(part).items():
                if _is_same(old := before.get(key, [None]), value):
                    continue
                # What is set once is of the first update, such as binary or multiclass;
                # numbers that change, as a count in Python, are states in disguise.
                now = getattr(part, key)
                is_flag = isinstance(now, bool | str | torch.dtype)
                if is_flag or (old == [None] and isinstance(now, Real)):
                    once[key] = now
                else:
                    again.append(key)
            kind = type(part).__name__
            found.append(MetricState(kind, is_updated, values, once, again))
        return found

    # --- on rank zero -------------------------------------------------------------

    def compute(self, of_ranks: Sequence[Sequence[MetricState]]) -> Any:
        """Compute the metric of the states of all ranks.

        Raises:
            DataError: They cannot be joined, or ranks have others.
        """
        mine = [(part, dict(part.metric_state)) for part in parts_of(self.metric)]
        try:
            return self._result(of_ranks)
        finally:  # a reset may keep some, such as features of real images
            for part, state in mine:
                for key, value in state.items():
                    setattr(part, key, value)

    def _result(self, of_ranks: Sequence[Sequence[MetricState]]) -> Any:
        kinds = [", ".join(state.kind for state in states) for states in of_ranks]
        refuse_differences(dict(enumerate(kinds)), f"the metric {self.name!r}")
        of_parts = [
            {rank: it for rank, it in enumerate(states) if it.is_updated}
            for states in zip(*of_ranks, strict=True)
        ]
        is_stacked = any(
            isinstance(default, Tensor) and part._reductions.get(key) is None
            for part in parts_of(self.metric)
            for key, default in part._defaults.items()
        )
        if not is_stacked:
            return self._compute(self.metric, of_parts)
        # Of one rank the result is as that of one process: it must not be a stack.
        of_one = [dict([*it.items()][:1]) for it in of_parts]
        one = _shape_of(self._compute(copy.deepcopy(self.metric), of_one))
        result = self._compute(self.metric, of_parts)
        if (found := _shape_of(result)) != one:
            raise DataError(
                f"the metric {self.name!r} has a state without dist_reduce_fx, which "
                f"is stacked by rank: its result is {found}, and {one} of one rank. "
                'Expected add_state(..., dist_reduce_fx="sum"), or another'
            )
        return result

    def _compute(self, metric: Any, of_parts: list[dict[int, MetricState]]) -> Any:
        for part, of_ranks in zip(parts_of(metric), of_parts, strict=True):
            if of_ranks:
                self._join(part, of_ranks)
        return metric.compute()

    def _join(self, part: Any, of_ranks: Mapping[int, MetricState]) -> None:
        outlines = {rank: _outline(it) for rank, it in of_ranks.items()}
        refuse_differences(outlines, f"the metric {self.name!r}")
        states = list(of_ranks.values())
        for state in states:
            wrong = [k for k, it in state.once.items() if it != states[0].once.get(k)]
            wrong += [] if list(of_ranks) == [0] else state.again
            if wrong:
                raise DataError(
                    f"the metric {self.name!r} keeps {wrong[0]!r}, which is no state, "
                    "and is not joined between ranks; expected add_state() for what "
                    "updates change"
                )
            vars(part).update(state.once)
        device = "cpu" if part.compute_on_cpu else part.device
        for key, value in states[0].values.items():
            of_key = [state.values[key] for state in states]
            if isinstance(value, list):
                batches = sorted(itertools.chain(*of_key), key=operator.itemgetter(0))
                joined: Any = [it for _, elements in batches for it in elements]
            else:
                joined = self._reduced(part, key, of_key)
            setattr(part, key, map_tensors(lambda x: x.to(device), joined))
        # Else compute() returns what it returned before, or warns of no update.
        part._computed, part._update_count = None, 1

    def _reduced(self, part: Any, key: str, of_ranks: list[Tensor]) -> Tensor:
        """Reduce a state as torchmetrics does between ranks."""
        first, reduction = of_ranks[0], part._reductions[key]
        self._check_exact(part, key, first)
        if len(of_ranks) == 1:
            return first
        name = getattr(reduction, "__name__", "")
        if name == "dim_zero_cat":
            return torch.cat(of_ranks)
        if name == "dim_zero_mean" and all(it.equal(first) for it in of_ranks):
            return first
        if name == "dim_zero_mean":
            reason = "is a mean by ranks, whatever their numbers of samples"
        elif name == "dim_zero_sum" and part._defaults[key].any():
            reason = f"is a sum that begins with {part._defaults[key]} on each rank"
        elif any(it.shape != first.shape for it in of_ranks):
            reason = f"is {kind_of(of_ranks)} on them"
        else:
            stacked = torch.stack(of_ranks)
            return stacked if reduction is None else reduction(stacked)
        raise DataError(
            f"the metric {self.name!r} depends on the number of ranks: its state "
            f"{key!r} {reason}. Expected sums that begin with zeros"
        )

    def _check_exact(self, part: Any, key: str, value: Tensor) -> None:
        kind = getattr(part._reductions[key], "__name__", "")
        is_joined_exactly = kind.endswith(("_cat", "_max", "_min", "_mean"))
        if self._is_exact and value.is_floating_point() and not is_joined_exactly:
            raise UsageError(
                f"metric {self.name!r} sums {key!r}, {kind_of(value)}: its last bits "
                "depend on the number of ranks, and here they must not. Expected a "
                "metric that counts or keeps all values, or a function, whose mean is "
                "exact"
            )


def parts_of(metric: Any) -> Iterator[Any]:
    """Yield a metric of torchmetrics and those that it wraps, alike on all ranks."""
    for module in metric.modules() if isinstance(metric, nn.Module) else ():
        if hasattr(module, "metric_state") and hasattr(module, "dist_sync_fn"):
            yield module


def _never() -> bool:
    return False


def _attributes(part: Any) -> dict[str, list[Any]]:
    """Return what updates may change besides the states; see `_trace`."""
    found = {**vars(part), **part._buffers}
    ignored = {*part._defaults, *OF_BASE, *vars(nn.Module())}
    return {key: _trace(it) for key, it in found.items() if key not in ignored}


def _trace(value: Any) -> list[Any]:
    """Return what shows if a value is changed, in place, too."""
    if isinstance(value, Tensor):
        return [value, value._version]  # torch counts writes to it
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return [*value]
    is_plain = value is None or isinstance(value, Real | str | torch.dtype)
    return [value] if is_plain else []


def _is_same(old: list[Any], new: list[Any]) -> bool:
    pairs = zip(old, new, strict=False)
    return len(old) == len(new) and all(
        a is b or (isinstance(a, Real | str | bytes) and type(a) is type(b) and a == b)
        for a, b in pairs
    )


def _by_batch(
    elements: list[Any], starts: Sequence[tuple[int, int]]
) -> list[tuple[int, list[Any]]]:
    """Divide a list into the elements of each batch.

    >>> _by_batch([7, 8, 9], [(0, 0), (2, 1), (4, 3)])
    [(0, [7]), (2, [8, 9]), (4, [])]
    """
    places = [start for _, start in starts] + [len(elements)]
    # An update may make a list anew, or shorter: then no batch is known of an element.
    if not starts or places[0] or places != sorted(places):
        return [(starts[0][0] if starts else 0, elements)]
    pairs = zip(starts, places[1:], strict=True)
    return [(number, elements[start:stop]) for (number, start), stop in pairs]


def _outline(state: MetricState) -> str:
    """Describe a state, but for shapes and elements."""
    found = [
        f"{name}: {'list' if isinstance(value, list) else value.dtype}"
        for name, value in state.values.items()
    ]
    return f"{state.kind} ({', '.join(found)})"


def _shape_of(result: Any) -> str:
    if isinstance(result, Mapping):
        return ", ".join(f"{key} {kind_of(it)}" for key, it in result.items())
    return kind_of(result)

"""Metrics that keep a state over the whole data set, as those of torchmetrics.

Each rank updates its own copy by its batches. At the end every rank packs its states,
or why it cannot, and sends them to rank zero in one exchange, whatever they are: there
a rank without a sample, or with other states, is found, and nobody waits for it. Rank
zero joins them, computes, and sends the result to all.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpitrain.data.randomness import own_random_state, seed_all
from mpitrain.data.samples import kind_of, map_tensors
from mpitrain.errors import DataError, MpitrainError, UsageError
from mpitrain.mpi.shared_arrays import Communicator, refuse_differences
from mpitrain.tasks.task import DerivedFn, MetricsFn, Task
from mpitrain.train.evaluate import Evaluation, refuse_names
from mpitrain.train.metric_states import TorchMetric, parts_of

MAX_NUMBERS = 100  # of a vector that are recorded, such as those of the classes

METHODS = ("update", "compute", "reset")


def split_metrics(
    task: Task, metrics: Any, derived: DerivedFn | None = None
) -> MetricsFn | None:
    """Give a task the metric objects of a mapping; return a function for the others."""
    if derived is not None:
        vars(task)["derived_metrics"] = derived
    if not isinstance(metrics, Mapping):
        if metrics is not None and not callable(metrics):
            raise UsageError(
                f"metrics= is {type(metrics).__name__}; expected a dict of metrics by "
                'name, such as {"mae": mae}, or a function that returns one'
            )
        return metrics  # type: ignore[no-any-return]
    functions = {}
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise UsageError(f"a metric is named {name!r}; expected a text")
        if isinstance(metric, type):
            raise UsageError(
                f"metric {name!r} is the class {metric.__name__}; expected an object "
                f"of it, such as {metric.__name__}()"
            )
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


class _OwnMetric:
    """A metric object of another class, with ``merge_state``; as `TorchMetric`."""

    def __init__(self, name: str, metric: Any) -> None:
        if not callable(getattr(metric, "merge_state", None)):
            raise UsageError(
                f"metric {name!r} is {kind_of(metric)}; expected a function, a metric "
                "of torchmetrics, or an object with update, compute, reset and "
                "merge_state(other), which adds the state of another rank's"
            )
        self.metric = metric

    def reset(self) -> None:
        self.metric.reset()

    def begin_batch(self, number: int) -> None:
        pass

    def state(self) -> Any:
        return self.metric

    def compute(self, of_ranks: Sequence[Any]) -> Any:
        for other in of_ranks[1:]:
            self.metric.merge_state(other)
        return self.metric.compute()


class MetricObjects:
    """The metric objects of a task; replaces them. Collective.

    Those of a collection become objects of their own: it shares states between them,
    which are then no longer told apart.

    Raises:
        UsageError: An object cannot be joined, or ranks have others; on all ranks.
    """

    def __init__(
        self, task: Task, device: str, ranks: Communicator, *, is_exact: bool
    ) -> None:
        self._task, self._ranks, self._device = task, ranks, device
        derive = getattr(task.derived_metrics, "__func__", None)
        self._derives = derive is not Task.derived_metrics
        self._metrics: dict[str, TorchMetric | _OwnMetric] = {}
        # Errors wait until the ranks have compared: one rank alone may have one.
        try:
            for name, metric in _flat(task.metric_objects):
                self._metrics[name] = (
                    TorchMetric(name, metric, device, is_exact=is_exact)
                    if any(parts_of(metric))
                    else _OwnMetric(name, metric)
                )
            mine = ", ".join(
                f"{name} ({type(it.metric).__name__})"
                for name, it in self._metrics.items()
            )
            mine += ", derived_metrics" * self._derives
            problem = ""
        except UsageError as error:
            problem, mine = str(error), ""
        problems, names = zip(*ranks.allgather((problem, mine or "none")), strict=True)
        for reason in filter(None, problems):
            raise UsageError(reason).on_all_ranks()
        refuse_differences(
            dict(enumerate(names)), "the set of metrics", kind=UsageError
        )
        task.metric_objects = {k: it.metric for k, it in self._metrics.items()}

    def reset(self) -> None:
        """Begin an evaluation, or end one; local."""
        self._task.metric_errors.clear()
        for metric in self._metrics.values():
            metric.reset()

    def begin_batch(self, number: int) -> None:
        """Note where the batch of this number begins; local."""
        for metric in self._metrics.values():
            metric.begin_batch(number)

    @contextlib.contextmanager
    def without_samples(self) -> Iterator[None]:
        """Let updates in here change copies: padding is no sample; local."""
        task = self._task
        objects, errors = task.metric_objects, task.metric_errors
        # A task's validation_step may update them itself, without asking for samples.
        task.metric_objects, task.metric_errors = copy.deepcopy(objects), {}
        try:
            yield
        finally:
            task.metric_objects, task.metric_errors = objects, errors

    def add_to(self, found: Evaluation) -> Evaluation:
        """Return an evaluation with the metrics, and with those derived of all."""
        derive = self._task.derived_metrics
        if not self._metrics and not self._derives:
            return found
        # One gather, whatever the states are: no rank waits for a state of another.
        of_ranks = self._ranks.gather(
            {
                name: self._task.metric_errors.get(name) or _packed(metric)
                for name, metric in self._metrics.items()
            }
        )

        def compute() -> tuple[dict[str, float], dict[str, Any]]:
            values, results = dict(found.values), {}
            for name, metric in self._metrics.items():
                with _named(f"the metric {name!r} cannot be computed"):
                    states = [self._unpacked(name, it[name]) for it in of_ranks]
                    # What it draws is the same each time, and changes no training.
                    with own_random_state(self._device):
                        seed_all(0, self._device)
                        result = metric.compute(states)
                    results[name] = map_tensors(lambda x: x.detach().cpu(), result)
                    pickle.dumps(results[name])  # or to send it would fail
                    _add(values, dict(numbers_of(name, results[name])))
            with _named("derived_metrics() failed"):
                _add(values, {k: float(it) for k, it in derive({**values}).items()})
            return values, results

        # There alone, and sent as it is: an error is that of all ranks, and no rank
        # needs the memory for all states (docs/decisions/0016).
        values, results = self._ranks.on_rank_zero(compute, "compute the metrics")
        self.reset()  # lists may be as large as the data set
        return replace(found, values=values, results=results)

    def _unpacked(self, name: str, packed: bytes | str) -> Any:
        if isinstance(packed, str):
            raise DataError(f"the metric {name!r} failed: {packed}")
        device = "cpu" if isinstance(self._metrics[name], TorchMetric) else self._device
        buffer = io.BytesIO(packed)
        # torch's format, for map_location: other ranks' GPUs have other numbers. What
        # it unpickles are objects of this job.
        return torch.load(buffer, map_location=device, weights_only=False)


def _flat(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, metric in metrics.items():
        found += metric.items() if hasattr(metric, "items") else [(name, metric)]
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two metrics are named {twice[0]!r}; expected other names")
    return found


def _packed(metric: TorchMetric | _OwnMetric) -> bytes | str:
    """Return a state, or what failed."""
    buffer = io.BytesIO()
    try:
        torch.save(metric.state(), buffer)
    except Exception as error:
        return f"it cannot be sent: {type(error).__name__}: {error}"
    return buffer.getvalue()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except MpitrainError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error


def _add(values: dict[str, float], more: Mapping[str, float]) -> None:
    refuse_names(more)
    if twice := values.keys() & more.keys():
        raise UsageError(f"two metrics are named {twice.pop()!r}; expected other names")
    values |= more


def numbers_of(name: str, result: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a result: a scalar, a short vector, or those by name."""
    if isinstance(result, np.ndarray | np.generic):
        result = torch.as_tensor(result)
    if hasattr(result, "_asdict"):
        result = result._asdict()  # a named tuple
    if isinstance(result, Mapping):
        for key, value in result.items():
            has_name = str(key) == name or str(key).startswith(f"{name}_")
            yield from numbers_of(str(key) if has_name else f"{name}_{key}", value)
    elif isinstance(result, Tensor) and result.numel() == 1:
        yield name, result.item()
    elif isinstance(result, Real):
        yield name, float(result)
    elif _is_vector(result):
        for i, it in enumerate(result):
            yield from numbers_of(f"{name}_{i}", it)


def _is_vector(result: Any) -> bool:
    if isinstance(result, Tensor):
        return result.ndim == 1 and len(result) <= MAX_NUMBERS
    if not isinstance(result, list | tuple) or len(result) > MAX_NUMBERS:
        return False
    return all(
        it.numel() == 1 if isinstance(it, Tensor) else isinstance(it, Real)
        for it in result
    )

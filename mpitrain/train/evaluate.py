"""Exact evaluation: every sample once, summed over all ranks, then divided.

Batches do not depend on the number of ranks, which take them in turn. Each fills rows
of a matrix, one for each of its batches; the others' rows are 0. The ranks compare the
names of the metrics, add their matrices, which is exact, and sum its columns exactly.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpitrain.data.loader import Batch, BatchLoader, RankStep
from mpitrain.data.samples import BadRow, map_tensors
from mpitrain.data.sharding import RankShard
from mpitrain.errors import DataError, UsageError
from mpitrain.exact_sum import sum_exactly
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.tasks.task import Model
from mpitrain.train.means import is_weighted, sum_of
from mpitrain.train.metrics import best_metric, knows_best, mean
from mpitrain.train.step_metrics import sum_over_ranks

logger = logging.getLogger("mpitrain")

ENDLESS_BATCHES = 10_000  # of an evaluation of an iterable set, then a warning

ValidationStep = Callable[[Model, Batch], Mapping[str, Any]]
"""`Task.validation_step`."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of a model on a data set. Equal on all ranks."""

    values: Mapping[str, float]
    """By name: the means, ``loss``, if there is one, and others such as ``accuracy``;
    the numbers of metric objects; and what is derived of them."""
    num_samples: int  # number of samples
    results: Mapping[str, Any] = field(default_factory=dict)
    """What metric objects returned, by name, on the CPU: matrices, too."""

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.values["loss"]

    @property
    def accuracy(self) -> float:
        """Fraction of samples classified correctly, 0 to 1."""
        return self.values["accuracy"]


def refuse_names(names: Iterable[str]) -> None:
    """Refuse names of metrics that records have for something else."""
    if "samples" in names:
        raise UsageError(
            "a metric is named 'samples', as their number is; expected another name"
        ).on_all_ranks()


def refuse_loss_names(names: Iterable[str]) -> None:
    """Refuse names of training losses that records have for something else."""
    for name in sorted({"samples", "lr", "gradient_norm"}.intersection(names)):
        raise UsageError(
            f"a training loss is named {name!r}, which is the name of another value in "
            "the record; expected another name"
        ).on_all_ranks()


def score_of(
    values: Mapping[str, float],
    best_by: str | None = None,
    *,
    by: str = "best_by",
    losses: Collection[str] = (),
) -> float | None:
    """Return the metric that the best checkpoint is chosen by; ``None``: not finite.

    Negated where lower is better. ``best_by`` is that of `CheckpointConfig`; without
    it, and without accuracy and loss, there is none: which is better is not known.
    ``losses``: names of the losses that are recorded.
    """
    name, is_lower_better = best_metric(values, best_by)
    if not knows_best(values, best_by):
        return None
    if name not in values:
        asked = f"{by} {best_by}" if best_by else "the best validation is by loss"
        raise UsageError(
            f"{asked}: found no such metric in the validation; expected one of "
            f"{', '.join(values)}: --best-by NAME, best_by of a Checkpointer, or the "
            "metric of EarlyStopping"
        ).on_all_ranks()
    if name in losses and best_by and not is_lower_better and "max:" not in best_by:
        raise UsageError(
            f"{by} {best_by}: {name} is a loss, of which a name does not tell that the "
            f"lowest is the best; expected min:{name}"
        ).on_all_ranks()
    found = -values[name] if is_lower_better else values[name]
    return found if math.isfinite(found) else None


def warn_of_no_best(values: Mapping[str, float], best_by: str | None) -> None:
    """Warn if no validation can be the best one."""
    if values and not knows_best(values, best_by):
        logger.warning(
            "the validation has neither accuracy nor loss: no checkpoint is the best "
            "one; choose a metric by --best-by max:NAME, or best_by="
        )


def join_evaluations(by_name: Mapping[str, Evaluation]) -> Evaluation:
    """Return the metrics of several sets, each with the name of its set before it.

    >>> a, b = (Evaluation(values={"loss": x}, num_samples=2) for x in (1.0, 3.0))
    >>> join_evaluations({"a": a, "b": b}).values, join_evaluations({"": a}) is a
    ({'a_loss': 1.0, 'b_loss': 3.0}, True)
    """
    if by_name.keys() == {""}:
        return by_name[""]
    values: dict[str, float] = {}
    results: dict[str, Any] = {}
    for name, found in by_name.items():
        more = {f"{name}_{key}": value for key, value in found.values.items()}
        if twice := values.keys() & more.keys():
            raise UsageError(
                f"two sets of validation data have a metric {twice.pop()!r}; expected "
                "other names of the sets"
            ).on_all_ranks()
        values |= more
        results |= {f"{name}_{key}": value for key, value in found.results.items()}
    num_samples = sum(found.num_samples for found in by_name.values())
    return Evaluation(values=values, num_samples=num_samples, results=results)


def validate_once(trainer: Any, *, is_epoch_end: bool) -> None:
    """Evaluate the model, unless the job before did after this step. Collective.

    ``trainer`` is a `Trainer`, whose module imports this one.
    """
    engine, state = trainer.engine, trainer.state
    if state.is_validated:
        return
    began = time.perf_counter()
    with trainer.timer("evaluation"):
        found = engine.validate(
            trainer.validation_step, lambda: trainer.call("on_validation_batch_end")
        )
    # A stop within it leaves the state as it was: the next job validates anew.
    state.skipped_samples += engine.data.take_skipped()
    state.val_seconds += time.perf_counter() - began
    state.metrics, state.val_samples = dict(found.values), found.num_samples
    trainer.results = found.results
    state.validated_step = state.step
    # After the state: a checkpoint in this hook is of a step that was validated.
    metrics = state.epoch_metrics(engine.stage.name, is_end=is_epoch_end)
    trainer.call("on_validation_end", metrics)


def steps_of_evaluation(
    loader: BatchLoader, rank_shard: RankShard
) -> Iterator[RankStep]:
    """Yield the steps of an evaluation; say so if it may never end. Collective."""
    has_end = rank_shard.order is not None or _has_length(loader.samples)
    for step in loader.steps(rank_shard, epoch=0):
        is_long = step.number + 1 >= ENDLESS_BATCHES
        if not has_end and is_long and not loader.has_warned:
            loader.has_warned = True
            if rank_shard.rank == 0:
                logger.warning(
                    "an evaluation has had %d batches on each rank; that of an "
                    "iterable data set without an end does not end. Expected a set "
                    "that ends, such as by itertools.islice in its __iter__",
                    ENDLESS_BATCHES,
                )
        yield step


def _has_length(samples: Any) -> bool:
    """Whether a stream knows how long it is, by ``__len__``."""
    try:
        return len(samples.dataset) >= 0
    except (TypeError, NotImplementedError):  # it has none, or torch's that raises
        return False


@torch.no_grad()
def evaluate(
    model: Model,
    loader: BatchLoader,
    rank_shard: RankShard,
    ranks: Communicator,
    step_fn: ValidationStep,
    device: str,
    on_batch_end: Callable[[], object] = lambda: None,
    begin_batch: Callable[[int], object] = lambda _: None,
) -> Evaluation:
    """Compute the means over every sample once; collective, in evaluation mode.

    Each rank has one batch of each step, and as many. One without samples is for the
    collectives of ``model`` and ``on_batch_end``: its metrics do not count.
    ``begin_batch`` gets the number of each batch, before it is evaluated.
    """
    kind: Any = {"dtype": torch.float64, "device": device}
    names: tuple[str, ...] | None = None  # of this rank's batches, once it had one
    numbers: list[int] = []  # of the batches with samples on this rank
    rows: list[Tensor] = []  # their sums of each metric, of weights, and their sizes
    num_batches = 0
    for step in steps_of_evaluation(loader, rank_shard):
        number = step.number * rank_shard.world_size + rank_shard.rank
        num_batches = (step.number + 1) * rank_shard.world_size
        for batch in step.micro_batches:
            heartbeat("evaluation")  # a long one is no hang
            begin_batch(number)
            try:
                values = step_fn(model, batch)
            except BadRow as bad:
                raise bad.named(batch.indices) from None
            if num := len(batch):
                names = tuple(values) if names is None else names
                if values.keys() != set(names):
                    now, before = (", ".join(it) or "none" for it in (values, names))
                    raise DataError(
                        f"metrics returned {now}, and {before} for an earlier batch; "
                        "expected the same names for every batch"
                    )
                row = torch.full((2 * len(names) + 1,), num, **kind)
                for place, name in enumerate(names):
                    # Before the sum, which would round in float32.
                    value = map_tensors(lambda x: x.to(**kind), values[name])
                    if not (is_weighted(value) or isinstance(value, Tensor)):
                        # What is no number `sum_of` names.
                        with contextlib.suppress(TypeError, ValueError, RuntimeError):
                            value = torch.as_tensor(value, **kind)
                    row[place], weight = sum_of(value, num, num, name)
                    if weight is not None:
                        row[len(names) + place] = weight
                rows.append(row)
                numbers.append(number)
            on_batch_end()  # also without samples: callbacks communicate in it
    if not num_batches:
        error = DataError("none of the samples to validate by could be read")
        raise error.on_all_ranks()
    # A rank may have had no batch.
    known = next((it for it in ranks.allgather(names) if it is not None), ())
    # Before the all-reduce: with other names ranks would send other lengths, and wait.
    seen = f"({', '.join(known if names is None else names)})"
    ranks.check_equal(seen, "what metrics returned", "Expected the same names")
    refuse_names(known)
    whole = torch.zeros((num_batches, 2 * len(known) + 1), **kind)
    if rows:
        whole[numbers] = torch.stack(rows)
    *found, num_samples = map(sum_exactly, sum_over_ranks(whole).T.tolist())
    means = map(mean, found[: len(known)], found[len(known) :])
    return Evaluation(
        values=dict(zip(known, means, strict=True)), num_samples=int(num_samples)
    )

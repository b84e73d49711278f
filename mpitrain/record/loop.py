"""What a custom loop logs: means over the ranks, and the lines of ``metrics.jsonl``."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.exact_sum import sum_exactly
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.record.reading import number

OF_STEP = ("lr", "gradient_norm")  # values that are no losses


def mean_over_ranks(values: Mapping[str, Any], ranks: Communicator) -> dict[str, float]:
    """Return the means of tensors over the ranks, and rank zero's numbers; collective.

    Raises:
        UsageError: The names differ between ranks; on every rank.
    """
    mine = {k: it.detach() if hasattr(it, "detach") else it for k, it in values.items()}
    of_ranks = ranks.allgather({name: float(it) for name, it in mine.items()})
    if odd := [it for it in of_ranks if it.keys() != of_ranks[0].keys()]:
        raise UsageError(
            f"Recorder.log got {', '.join(of_ranks[0])} on rank 0, and "
            f"{', '.join(odd[0])} on another; expected the same names"
        ).on_all_ranks()
    return {
        name: sum_exactly([it[name] for it in of_ranks]) / len(of_ranks)
        if hasattr(value, "dtype")
        else of_ranks[0][name]
        for name, value in values.items()
    }


def before_step(
    path: Path, step: int, *, is_validation: bool = False
) -> tuple[int, int, int, array[float]]:
    """Return the bytes of a record before a step, and the validations in them.

    Between both the last step in them: a loop need not log each step. And the losses
    since the last validation: the mean of an epoch has them all. If a loop resumes with
    the validation after the step, the line of the step stays.
    """
    num_bytes = last = num_validations = 0
    losses = array("d")
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            row: Any = {}
            with contextlib.suppress(ValueError):
                row = json.loads(line)
            of_epoch = row.get("event") == "epoch"
            is_kept = is_validation and not of_epoch
            if row.get("step", 0) >= step + is_kept:
                break
            num_bytes += len(line)
            if of_epoch or row.get("event") == "step":
                last = row.get("step", last)
            if of_epoch:
                num_validations, losses = num_validations + 1, array("d")
            elif row.get("event") == "step" and "train_loss" in row:
                losses.append(number(row["train_loss"]))
    return num_bytes, last, num_validations, losses


def rows_of(
    values: Mapping[str, float], losses: Sequence[float], seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of what was logged for a step, and what they say.

    ``losses`` were logged since the last validation, in ``seconds``.
    """
    of_validation = {k: v for k, v in values.items() if k.startswith("val_")}
    of_step = {
        name if name in OF_STEP else f"train_{name}": value
        for name, value in values.items()
        if name not in of_validation
    }
    if of_step:
        yield "step", of_step
    if of_validation:
        counts = ("train_samples", "val_samples", "skipped_samples", "skipped_steps")
        train_loss = sum_exactly(losses) / len(losses) if losses else None
        known = {"stage": "train", "train_loss": train_loss, "epoch_seconds": seconds}
        unknown = {**dict.fromkeys(counts, 0), "samples_per_second": None}
        yield "epoch", {**known, **unknown, **of_validation}

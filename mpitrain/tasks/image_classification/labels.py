"""Cross-entropy and accuracy; errors for labels and outputs that do not fit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpitrain.data.samples import BadRow, kind_of
from mpitrain.errors import DataError

NOT_IGNORED = -(2**31)  # as ``ignore_index``: no label is ignored, not even -100


def cross_entropy(outputs: Any, targets: Any, label_smoothing: float) -> Tensor:
    """Return torch's loss of each sample, `(N, ...)`; an error says what does not fit.

    Targets are labels int64 `(N, ...)`, or probabilities of the outputs' shape.
    """
    try:
        return F.cross_entropy(
            outputs,
            targets,
            ignore_index=NOT_IGNORED,
            reduction="none",
            label_smoothing=label_smoothing,
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        explain_loss(outputs, targets)
        raise


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return whether the highest score is that of the target, float64 `(N, ...)`."""
    predicted = outputs.argmax(dim=1)
    if targets.shape == outputs.shape:  # probabilities
        targets = targets.argmax(dim=1)
    if targets.shape != predicted.shape:  # they would be broadcast
        explain_loss(outputs, targets)
    return (predicted == targets).double()


def check_targets(outputs: Any, targets: Any, num_classes: int | None) -> None:
    """Check labels `(N, ...)` or probabilities for outputs `(N, C, ...)`.

    Local; waits for the device. ``num_classes`` is of the data set.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    if targets.is_floating_point() and targets.shape == outputs.shape:
        if targets.ndim < len("NC"):  # `(N,)` of both: a regression
            explain_loss(outputs, targets)
        sums = targets.sum(1)
        # Not "where it is wrong": nan is, too. Those of 16 bits are rounded.
        wrong = (~((sums - 1).abs() < 0.01) | ~(targets >= 0).all(1)).nonzero()
        if len(wrong):
            raise BadRow(
                int(wrong[0, 0]),
                f"the {_part()} data has targets {kind_of(targets)} of sum "
                f"{sums[tuple(wrong[0])]:g} over the classes; expected labels, or "
                "probabilities of sum 1. For several labels a sample, or a regression, "
                "pass loss= to mpitrain.Trainer",
            )
        return
    fits = outputs.ndim > 1 and targets.shape == outputs.shape[:1] + outputs.shape[2:]
    if not fits or targets.is_floating_point():
        return
    num_outputs = outputs.shape[1]
    if num_classes is not None and num_outputs < num_classes:
        raise DataError(
            f"the model returned {num_outputs} outputs per sample, "
            f"{kind_of(outputs)}, and the data set has {num_classes} classes; expected "
            "one output for each class: let its last layer have as many as the "
            "num_classes that it is given"
        )
    wrong = ((targets < 0) | (targets >= num_outputs)).nonzero()
    if len(wrong):
        label = int(targets[tuple(wrong[0])])
        raise BadRow(
            int(wrong[0, 0]),
            f"the {_part()} data has label {label}, and the model has {num_outputs} "
            f"outputs; expected labels from 0 to {num_outputs - 1}. Number the classes "
            "from 0 in the data set, or give the model an output for each; to ignore a "
            "label, pass a loss= to mpitrain.Trainer that returns values and weights",
        )


def explain_loss(outputs: Any, targets: Any) -> None:
    """Raise a `DataError` that says why cross-entropy failed, if it is known."""
    other_loss = "or pass loss= to mpitrain.Trainer"
    if not isinstance(outputs, Tensor) or outputs.ndim < len("NC"):
        raise DataError(
            f"the model returned {kind_of(outputs)}; expected one tensor of scores, "
            "float (N, num_classes). Return that alone in its forward(), " + other_loss
        )
    check_targets(outputs, targets, None)
    shape = tuple(outputs.shape[:1] + outputs.shape[2:])
    if kind_of(targets) == f"int64 {shape}":
        return
    raise DataError(
        f"the targets of the {_part()} data are {kind_of(targets)}, with outputs "
        f"{kind_of(outputs)}; expected labels int64 {shape} for these outputs, or "
        "int64 (N,) for outputs (N, num_classes): an int with each input of the set. "
        f"For targets of another kind {other_loss.removeprefix('or ')}"
    )


def _part() -> str:
    return "training" if torch.is_grad_enabled() else "validation"

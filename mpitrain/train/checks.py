"""The default loss and metric; errors for what a model, data set or loss returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError

logger = logging.getLogger("mpitrain")

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
NOT_IGNORED = -(2**31)  # as ``ignore_index``: no label is ignored, not even -100


class WrongLabel(DataError):
    """A label out of range; `named` adds the number of the sample."""

    def __init__(self, row: int, found: str) -> None:
        super().__init__(f"a sample of {found}")
        self.row, self.found = row, found

    def named(self, indices: Indices) -> DataError:
        """Return the error with the number of the sample."""
        if self.row >= len(indices):
            return self
        return DataError(f"sample {indices[self.row]} of {self.found}")


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


def warn_of_scalars(
    values: Mapping[str, Tensor], warned: set[str]
) -> Mapping[str, Tensor]:
    """Return the values; warn of those that are one number for a batch, once."""
    found = {name for name, it in values.items() if getattr(it, "ndim", 0) == 0}
    if dist.get_rank() == 0 and (new := found - warned):
        warned.update(new)
        logger.warning(
            "%s is a scalar for a whole batch, and averaged over batches, which in "
            "training depend on the number of ranks: right for a mean over samples, "
            "not with class weights or for F1. Return one value per sample, (N,), as "
            'with reduction="none"',
            ", ".join(sorted(new)),
        )
    return values


def check_targets(outputs: Any, targets: Any, num_classes: int | None) -> None:
    """Check labels `(N, ...)` or probabilities for outputs `(N, C, ...)`.

    Local; waits for the device. ``num_classes`` is of the data set.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return
    if targets.is_floating_point() and targets.shape == outputs.shape:
        if targets.ndim < len("NC"):
            explain_loss(outputs, targets)
        sums = targets.sum(1)
        # Not "where it is wrong": nan is, too. Those of 16 bits are rounded.
        wrong = (~((sums - 1).abs() < 0.01) | ~(targets >= 0).all(1)).nonzero()
        if len(wrong):
            raise WrongLabel(
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
        raise WrongLabel(
            int(wrong[0, 0]),
            f"the {_part()} data has label {label}, and the model has {num_outputs} "
            f"outputs; expected labels from 0 to {num_outputs - 1}. Number the classes "
            "from 0 in the data set, or give the model an output for each; to ignore a "
            "label, pass a loss= that does",
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


def explain_call(model: nn.Module, inputs: Any, error: Exception) -> None:
    """Add the inputs to an error of ``forward``, or say that it takes other ones."""
    if isinstance(error, TypeError):
        signature = inspect.signature(model.forward)
        names = ", ".join(signature.parameters)
        try:
            signature.bind(inputs)
        except TypeError as why:
            raise DataError(
                f"{type(model).__name__}.forward({names}) was called with the inputs "
                f"alone, {kind_of(inputs)}: {why}. Expected a model of one argument: "
                f"let samples be pairs (({names}), target), and forward(self, inputs) "
                f"begin with {names} = inputs"
            ) from None
    note = f"{type(model).__name__} was called with {kind_of(inputs)}"
    if getattr(inputs, "dtype", None) in INTEGERS:
        note += (
            ". For a model of floats convert them in the data set (.float()), or ask "
            "for images: Trainer's mean_std=, or --normalize imagenet"
        )
    error.add_note(note)


def _part() -> str:
    return "training" if torch.is_grad_enabled() else "validation"


def kind_of(value: Any) -> str:
    """Describe a value.

    >>> kind_of((torch.zeros(2, 3), {"a": 1}))
    "tuple of float32 (2, 3), dict of 'a'"
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} of {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        more = ", ..." * (len(value) > 3)
        return f"{kind} of {', '.join(map(kind_of, value[:3]))}{more}"
    return kind

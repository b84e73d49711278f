"""Errors for what the user's model, data set or loss returns: found and expected."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError

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


def check_labels(outputs: Any, targets: Any, num_classes: int | None) -> None:
    """Check labels `(N, ...)` for outputs `(N, C, ...)`; waits for the device; local.

    Other outputs and targets are not checked. ``num_classes`` is of the data set.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
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
    check_labels(outputs, targets, None)
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
                f"alone, {kind_of(inputs)}: {why}. Expected a model of one argument; "
                "for others override Trainer.compute_loss (examples/custom_loss.py)"
            ) from None
    note = f"{type(model).__name__} was called with {kind_of(inputs)}"
    if getattr(inputs, "dtype", None) in INTEGERS:
        note += (
            ". For a model of floats convert them in the data set (.float()), or ask for "
            "images: Trainer's mean_std=, on the command line --normalize imagenet"
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

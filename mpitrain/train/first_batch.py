"""What a training sees first: images to look at, and whether data and model fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.data.pixels import NUM_DIMENSIONS, Statistics, as_bytes
from mpitrain.data.samples import Array
from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError
from mpitrain.train.feed import Batch

NUM_IMAGES = 16
"""That are shown."""

CHANNELS = (1, 3)
"""Of what can be shown: grey, or colours."""


def show_images(
    show: Callable[[str, Array], object], statistics: Statistics | None
) -> Callable[[Batch], bool]:
    """Return what looks at batches until it has seen images.

    Args:
        show: Called once, with a name, and images uint8 `(N, H, W, C)`.
        statistics: What is taken off the pixels; ``None``: nothing.
    """

    def look(batch: Batch) -> bool:
        images = batch.inputs
        if not len(batch) or not isinstance(images, Tensor):
            return False
        if images.ndim != NUM_DIMENSIONS or images.shape[1] not in CHANNELS:
            return False
        some = images[: min(len(batch), NUM_IMAGES)]
        show("train/images", as_bytes(some, statistics).numpy())
        return True

    return look


IGNORED = -100
"""A label that cross-entropy leaves out, as torch has it."""


class WrongLabel(DataError):
    """A label that is no number of a class.

    Args:
        row: Of the batch.
        found: What is wrong, in words that follow the sample's name.
    """

    def __init__(self, row: int, found: str) -> None:
        super().__init__(f"a sample of {found}")
        self.row, self.found = row, found

    def named(self, indices: Indices) -> DataError:
        """Return the error with the sample's number, of those of the batch."""
        if self.row >= len(indices):
            return self
        return DataError(f"sample {indices[self.row]} of {self.found}")


def check_labels(outputs: Any, targets: Any, num_classes: int | None) -> None:
    """Refuse labels that are no number of an output. Waits for the device; local.

    Args:
        outputs: The model's, `(N, num_classes, ...)`; others are left to torch.
        targets: Labels `(N, ...)`; others likewise.
        num_classes: Of the data set; ``None``: not known.

    Raises:
        DataError: On the rank that has them.
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
            f"{_shown(outputs)}, and the data set has {num_classes} classes; expected "
            "one output for each class: let its last layer have as many as the "
            "num_classes that it is given"
        )
    is_wrong = ((targets < 0) | (targets >= num_outputs)) & (targets != IGNORED)
    wrong = is_wrong.nonzero()
    if len(wrong):
        label = int(targets[tuple(wrong[0])])
        raise WrongLabel(
            int(wrong[0, 0]),
            f"the {_part()} data has label {label}, and the model has {num_outputs} "
            f"outputs; expected labels from 0 to {num_outputs - 1}. Number the classes "
            "from 0 in the data set, or give the model an output for each",
        )


def explain_loss(outputs: Any, targets: Any) -> None:
    """Raise a `DataError` where cross-entropy failed for a reason that we know; local.

    Args:
        outputs: The model's.
        targets: Of the same samples.
    """
    own_loss = "or give mpitrain.Trainer a loss of your own"
    if not isinstance(outputs, Tensor) or outputs.ndim < len("NC"):
        raise DataError(
            f"the model returned {_shown(outputs)}; expected one tensor of scores, "
            "float (N, num_classes). Return that alone in its forward(), " + own_loss
        )
    check_labels(outputs, targets, None)
    shape = tuple(outputs.shape[:1] + outputs.shape[2:])
    if _shown(targets) == f"int64 {shape}":
        return
    raise DataError(
        f"the targets of the {_part()} data are {_shown(targets)}, with outputs "
        f"{_shown(outputs)}; expected labels int64 {shape} for these outputs, or int64 "
        "(N,) for outputs (N, num_classes): an int with each input of the set. For "
        f"targets of another kind {own_loss.removeprefix('or ')}"
    )


def explain_call(model: nn.Module, inputs: Any, error: Exception) -> None:
    """Say what a model was called with that raised; local.

    Raises:
        DataError: Its ``forward`` does not take one argument.
    """
    if isinstance(error, TypeError):
        signature = inspect.signature(model.forward)
        names = ", ".join(signature.parameters)
        try:
            signature.bind(inputs)
        except TypeError as why:
            raise DataError(
                f"{type(model).__name__}.forward({names}) was called with the inputs "
                f"alone, {_shown(inputs)}: {why}. Expected a model of one argument; "
                "for others override Trainer.step (examples/own_trainer.py)"
            ) from None
    error.add_note(f"{type(model).__name__} was called with {_shown(inputs)}")


def _part() -> str:
    return "training" if torch.is_grad_enabled() else "validation"


def _shown(value: Any) -> str:
    """Word what something is.

    >>> _shown((torch.zeros(2, 3), {"a": 1}))
    "tuple of float32 (2, 3), dict of 'a'"
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} of {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        more = ", ..." * (len(value) > 3)
        return f"{kind} of {', '.join(map(_shown, value[:3]))}{more}"
    return kind

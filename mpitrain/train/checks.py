"""Warnings and errors for what a model or a loss returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.data.samples import kind_of
from mpitrain.errors import DataError

logger = logging.getLogger("mpitrain")

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


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

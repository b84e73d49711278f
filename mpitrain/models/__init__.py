"""Models by name: the default network (`convnet`), or anybody's own."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.convnet import ConvNet
from mpitrain.plugins import call_with_known, is_reference, load_reference


def build_model(
    name: str, *, num_classes: int, in_channels: int, image_size: int, seed: int
) -> nn.Module:
    """Build a model with the same weights on every rank.

    Args:
        name: ``"convnet"``, or ``"package.module:callable"``: called with those of
            `num_classes`, `in_channels` and `image_size` that it takes by name, it
            returns an `nn.Module`.
        num_classes: Size of the last layer's output.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: W of an input.
        seed: Of the generators of torch, numpy and Python, before weights are drawn.

    Returns:
        The model, float32, on the CPU.

    Raises:
        UsageError: There is no model of that name.
        DataError: What the callable returned is no module.
    """
    known: dict[str, object] = {
        "num_classes": num_classes,
        "in_channels": in_channels,
        "image_size": image_size,
    }
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if name == "convnet":
        return ConvNet(num_classes, in_channels, image_size)
    if not is_reference(name):
        raise UsageError(
            f"--model {name!r} is not known. Expected convnet, or "
            "package.module:callable for a model of your own."
        )
    model = call_with_known(load_reference(name, "--model"), known, "--model")
    if not isinstance(model, nn.Module):
        raise DataError(
            f"--model {name} returned {type(model).__name__!r}; "
            "expected a torch.nn.Module"
        )
    return model

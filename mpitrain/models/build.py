"""From a name to a model, with the same weights on every rank."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models import from_timm, hub, zoo
from mpitrain.models.convnet import ConvNet
from mpitrain.models.fetch import is_own
from mpitrain.models.weight_files import is_file_name, read_state
from mpitrain.models.weights import LoadedWeights, load_state, load_weights
from mpitrain.plugins import call_with_known, load_reference


def build_model(
    name: str,
    *,
    num_classes: int | None,
    in_channels: int,
    image_size: int,
    seed: int,
    weights: str | None = None,
) -> nn.Module:
    """Build a model with the same weights on every rank.

    Args:
        name: ``"convnet"``; a classification model of torchvision; ``"timm:NAME"``;
            ``"hub:REPO_OR_DIR:ENTRY"``; or ``"package.module:callable"``: called with
            those of `num_classes`, `in_channels` and `image_size` that it takes by
            name, it returns an `nn.Module`.
        num_classes: Size of the last layer's output; ``None`` if there are no classes,
            which only a callable of the user's can serve: it is then not given any.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: H and W of an input, in pixels.
        seed: Of the generators of torch, numpy and Python, before weights are drawn.
        weights: A file, or a name that the model's library knows (``"default"``): what
            the model begins with; ``None`` for random ones.

    Returns:
        The model, float32, on the CPU.

    Raises:
        UsageError: There is no model of that name, or none for such images; no such
            weights.
        DataError: What the callable returned is no module; the weights cannot be had,
            or are those of another architecture.
    """
    model, _ = build_and_load(
        name,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        seed=seed,
        weights=weights,
    )
    return model


def build_and_load(
    name: str,
    *,
    num_classes: int | None,
    in_channels: int,
    image_size: int,
    seed: int,
    weights: str | None = None,
) -> tuple[nn.Module, LoadedWeights | None]:
    """Build a model as `build_model` does, and tell what became of its weights.

    Returns:
        The model, and the report to be shown; ``None`` without `weights`. The same on
        every rank.
    """
    file = Path(weights) if weights is not None and is_file_name(weights) else None
    of_library = weights if file is None else None
    if of_library is not None and is_own(name):
        raise UsageError(
            f"--weights {weights!r} is no file, and there are none to download for "
            f"--model {name}; expected a file, such as runs/NAME/model.pt"
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    sizes: dict[str, int] = {"in_channels": in_channels, "image_size": image_size}
    if is_own(name) and name != "convnet":
        known = sizes if num_classes is None else {"num_classes": num_classes, **sizes}
        model = build_own(name, known)
    elif num_classes is None:
        raise UsageError(
            f"--model {name} needs classes, and the data has none (its targets are "
            "numbers); expected a model of your own: --model package.module:callable"
        )
    else:
        model, loaded = build_known(name, of_library, num_classes, sizes)
        if loaded is not None:
            return model, loaded
    return model, None if file is None else load_weights(model, file)


def build_own(name: str, known: dict[str, int]) -> nn.Module:
    """Build a model by the user's own code."""
    model = call_with_known(load_reference(name, "--model"), known, "--model")
    if not isinstance(model, nn.Module):
        raise DataError(
            f"--model {name} returned {type(model).__name__!r}; "
            "expected a torch.nn.Module"
        )
    return model


def build_known(
    name: str, weights: str | None, num_classes: int, sizes: dict[str, int]
) -> tuple[nn.Module, LoadedWeights | None]:
    """Build our own model or that of a library, with the library's weights if named."""
    if name == "convnet":
        return ConvNet(num_classes, **sizes), None
    if name.startswith((from_timm.PREFIX, hub.PREFIX)):
        library = from_timm if name.startswith(from_timm.PREFIX) else hub
        model, fitted = library.build(
            name, num_classes=num_classes, weights=weights, **sizes
        )
        if weights is None:
            return model, None
        return model, LoadedWeights(source=f"{name} {weights}", fitted=fitted)
    model = zoo.build(name, num_classes=num_classes, **sizes)
    if weights is None:
        return model, None
    state = read_state(zoo.weights_file(name, weights))
    return model, load_state(model, state, f"{name} {weights}")

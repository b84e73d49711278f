"""From ``--model`` and ``--weights`` to a model with equal weights on every rank."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpitrain.errors import UsageError
from mpitrain.models import hub, timm, torchvision
from mpitrain.models.layers import Sizes, check_is_module, try_one_image
from mpitrain.models.weight_files import is_file_name, read_state
from mpitrain.models.weights import load_state, unknown_weights
from mpitrain.plugins import call_with_known, is_reference, load_reference
from mpitrain.torch_compat import without_compile_wrappers


def build_model(
    name: str, *, num_classes: int | None, in_channels: int, image_size: int, seed: int
) -> nn.Module:
    """Build a model with random weights; see `build_and_load`."""
    sizes: Any = {"in_channels": in_channels, "image_size": image_size}
    return build_and_load(name, num_classes=num_classes, seed=seed, **sizes)[0]


def build_and_load(
    name: str,
    *,
    num_classes: int | None,
    in_channels: int,
    image_size: int,
    seed: int,
    weights: str | None = None,
) -> tuple[nn.Module, str | None]:
    """Build a model, and load weights into it; a line for the user says which.

    Not collective; equal on every rank. A user-defined callable is given those of
    `num_classes`, `in_channels` and `image_size` that it takes by name. `weights` is a
    file or a name that the model's library knows; ``None`` for random ones.
    """
    named = _named(name, weights)
    file = Path(weights) if weights is not None and named is None else None
    library = library_of(name)
    if named is not None and library is None:
        raise unknown_weights(name, named)
    # All three: a user-defined model may draw from any. So the ranks need not send it.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if name != "convnet" and library is None:
        known = {"in_channels": in_channels, "image_size": image_size}
        if num_classes is not None:
            known["num_classes"] = num_classes
        made = call_with_known(load_reference(name, "--model"), known, "--model")
        model = without_compile_wrappers(check_is_module(name, made))
    elif num_classes is None:
        raise UsageError(
            f"--model {name} needs classes, and the data has none (its targets are "
            "numbers); expected a custom model: --model package.module:callable"
        )
    elif library is None:
        model = ConvNet(num_classes, in_channels, image_size)
    else:
        sizes = Sizes(num_classes, in_channels, image_size)
        model, changes = library.build(name, sizes, named)
        if named is not None:
            return model, f"weights from {name} {named}: {changes}".rstrip(": ")
    if file is None:
        return model, None
    state, average = read_state(file)
    changes = load_state(model, state, str(file))
    averaged = f", averages ({average})" if average else ""
    return model, f"weights from {file}{averaged}: {changes}"


def check_takes(name: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse images `(C, H, W)` that are not square, if a named model takes none."""
    if name != "convnet" and library_of(name) is None:
        return  # a user-defined model takes what it takes
    channels, height, width = shape
    if height == width:
        return
    try:
        try_one_image(model, Sizes(0, channels, width), height)
    except Exception as error:  # what any model may raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UsageError(
            f"--model {name} takes no images of {height}x{width} pixels, height by "
            f"width ({reason}); expected square ones: --image-size {width}"
        ).on_all_ranks() from error


def fetch_weights(name: str, weights: str | None, *, progress: bool = False) -> None:
    """Download what ``--model`` and ``--weights`` need; errors as `build_and_load`."""
    if library := library_of(name):
        library.fetch(name, _named(name, weights), progress=progress)


def is_cached(name: str, weights: str | None) -> bool:
    """Whether `fetch_weights` has nothing to download, as far as is known."""
    library = library_of(name)
    return library is None or bool(library.is_cached(name, _named(name, weights)))


def library_of(name: str) -> ModuleType | None:
    """Return the adapter for a model; ``None`` for convnet and user-defined models."""
    for library in (timm, hub):
        if name.startswith(library.PREFIX):
            return library
    return None if name == "convnet" or is_reference(name) else torchvision


def _named(name: str, weights: str | None) -> str | None:
    """Return weights that are no file; a known name is none, if a file has it, too."""
    if weights is None or is_file_name(weights):
        return None
    if not Path(weights).exists():
        return weights
    library = library_of(name)
    with contextlib.suppress(UsageError):  # the library does not know it
        if library is not None and library.is_cached(name, weights) is not None:
            return weights
    return None


class ConvNet(nn.Module):
    """The default model: no batch norm or dropout, the same at any world size."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1)
        pooled_size = -(-image_size // 2)
        self.hidden = nn.Linear(32 * pooled_size * pooled_size, 40)
        self.head = nn.Linear(40, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(N, C, H, W)` to scores `(N, num_classes)`."""
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(x)  # type: ignore[no-any-return]

"""The classification models of torchvision, by name.

torchvision is imported inside functions: it costs a second and more on every rank.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain.errors import DataError, UsageError, did_you_mean
from mpitrain.models.layers import Sizes, fit_first_conv, try_one_image
from mpitrain.models.weight_files import read_state
from mpitrain.models.weights import (
    cached_file,
    load_state,
    not_downloaded,
    unknown_weights,
)

SMALL = 96  # a model is tried with images of fewer pixels; inception_v3 needs most, 75


def names() -> list[str]:
    """Return the names of all classification models of the installed torchvision."""
    models = _torchvision()
    return list(models.list_models(module=models))


def build(name: str, sizes: Sizes, weights: str | None) -> tuple[nn.Module, str]:
    """Return a model, and what was changed of its pretrained weights, in words.

    Its output is one tensor `(N, num_classes)`, also in training.
    """
    _check_name(name)
    try:
        model = _create(name, sizes)
    except Exception as error:
        size = sizes.image_size
        works = (s for s in (32, 64, 96) if s > size and _works(name, sizes, s))
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UsageError(
            f"--model {name} does not work with images of {size}x{size} pixels "
            f"({reason}); resize them: --image-size {next(works, 224)}"
        ) from error
    if weights is None:
        return model, ""
    state, _ = read_state(Path(fetch(name, weights)))
    return model, load_state(model, state, f"{name} {weights}")


def _create(name: str, sizes: Sizes) -> nn.Module:
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # transform_input is what their pretrained weights want; the model is the same
        # whatever weights it starts with.
        options = {"aux_logits": False, "init_weights": True}
        options["transform_input"] = sizes.in_channels == 3
    if name.startswith(("resnet", "resnext", "wide_resnet")):
        # Goyal et al. 2017 (arXiv:1706.02677), 5.1. Without it the first gradients of
        # a ResNet-50 have norms of 500 and more, and it diverges.
        options["zero_init_residual"] = True
    if name.startswith("vit_"):
        options["image_size"] = sizes.image_size
    if name.startswith("maxvit_"):
        options["input_size"] = (sizes.image_size, sizes.image_size)
    get_model = _torchvision().get_model
    model: nn.Module = get_model(name, num_classes=sizes.num_classes, **options)
    fit_first_conv(model, sizes.in_channels)
    if sizes.image_size < SMALL:
        try_one_image(model, sizes)
    return model


def _works(name: str, sizes: Sizes, image_size: int) -> bool:
    with contextlib.suppress(Exception), torch.device("meta"):
        _create(name, sizes._replace(image_size=image_size))
        return True
    return False


def fetch(name: str, weights: str | None, *, progress: bool = False) -> str:
    """Return the file of pretrained weights, downloaded if torch's cache has none."""
    if weights is None:
        return ""
    url = _url_of(name, weights)
    try:
        return cached_file(url, local=False, progress=progress)
    except Exception as error:
        raise not_downloaded(name, weights, error) from error


def is_cached(name: str, weights: str | None) -> bool:
    """Whether `fetch` has nothing to download."""
    return weights is None or bool(cached_file(_url_of(name, weights)))


def _check_name(name: str) -> None:
    known = names()
    if name not in known:
        raise UsageError(
            f"--model {name!r} is not known.{did_you_mean(name, ['convnet', *known])} "
            "Expected convnet, a classification model of torchvision (resnet50), "
            "timm:NAME, hub:REPO_OR_DIR:ENTRY, or package.module:callable for a custom "
            "model."
        )


def _url_of(name: str, weights: str) -> str:
    _check_name(name)
    known = _torchvision().get_model_weights(name)
    members = known.__members__
    entry = weights.rpartition(".")[2]  # of ResNet18_Weights.IMAGENET1K_V1
    if weights == "default" and members:
        entry = known.DEFAULT.name
    if entry not in members:
        raise unknown_weights(name, weights, ["default", *members] if members else ())
    return str(known[entry].url)


def _torchvision() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # built for another torch, it fails in many ways
        raise DataError(
            f"torchvision cannot be imported ({type(error).__name__}: {error}); "
            "expected the version that belongs to this torch: pip install torchvision"
        ) from error

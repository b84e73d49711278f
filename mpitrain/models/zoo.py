"""The classification models of torchvision, by its names for them.

torchvision is imported inside functions: it costs a second and more on every rank.
"""

from __future__ import annotations

import importlib
import re
from bisect import bisect_left
from pathlib import Path
from typing import Any

from torch import nn

from mpitrain.errors import DataError, UsageError, did_you_mean
from mpitrain.models.layers import fit_first_layer, try_one_image
from mpitrain.models.weight_files import State, cached_path, download

ENOUGH = 96
"""Pixels with which all of them work, but for those that want a multiple of something;
inception_v3 wants most, 75."""

PARTITIONS = {"vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32}
PARTITIONS |= {"vit_h_14": 14, "maxvit_t": 224}
"""What the image size must be a multiple of, in pixels."""


def names() -> list[str]:
    """Return the names of all classification models of the installed torchvision."""
    models = _torchvision()
    return list(models.list_models(module=models))


def build(
    name: str, *, num_classes: int, in_channels: int, image_size: int
) -> nn.Module:
    """Build a model with random weights.

    Args:
        name: One of `names`.
        num_classes: Size of the output.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: H and W, in pixels.

    Returns:
        The model; its output is one tensor `(N, num_classes)`, also in training.

    Raises:
        UsageError: There is no such model, or none for images of this size.
    """
    refuse_unknown(name)
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # transform_input is what their pretrained weights want; without them it does no
        # harm, and the model is the same whatever weights it begins with.
        options = {"aux_logits": False, "init_weights": True}
        options["transform_input"] = in_channels == 3
    partition = PARTITIONS.get(name, 1)
    if image_size % partition or image_size < 1:
        larger = -(-image_size // partition) * partition
        raise UsageError(
            f"--model {name} takes images of a multiple of {partition} pixels, found "
            f"{image_size}x{image_size}; resize them: --image-size {larger}"
        )
    if name.startswith("vit_"):
        options["image_size"] = image_size
    if name.startswith("maxvit_"):
        options["input_size"] = (image_size, image_size)
    model: nn.Module = _torchvision().get_model(
        name, num_classes=num_classes, **options
    )
    fit_first_layer(model, in_channels)
    if partition == 1 and not works(model, in_channels, image_size):
        sizes = range(ENOUGH)
        least = bisect_left(
            sizes, True, lo=image_size, key=lambda size: works(model, in_channels, size)
        )
        raise UsageError(
            f"--model {name} needs images of at least {least}x{least} pixels, found "
            f"{image_size}x{image_size}; enlarge them: --image-size {least}"
        )
    return model


def refuse_unknown(name: str) -> None:
    """Raise UsageError unless torchvision has a model of that name."""
    known = names()
    if name not in known:
        raise UsageError(
            f"--model {name!r} is not known.{did_you_mean(name, ['convnet', *known])} "
            "Expected convnet, a classification "
            "model of torchvision (resnet50), timm:NAME, hub:REPO_OR_DIR:ENTRY, or "
            "package.module:callable for a model of your own."
        )


def works(model: nn.Module, in_channels: int, image_size: int) -> bool:
    """Whether a model takes images of a size; said without trying from `ENOUGH` on."""
    if image_size >= ENOUGH:
        return True
    try:
        try_one_image(model, in_channels, image_size)
    except RuntimeError:  # "Output size is too small", and the like
        return False
    return True


def url_of(name: str, weights: str) -> str:
    """Return the address of pretrained weights.

    Args:
        name: One of `names`.
        weights: ``"default"``, or a name of torchvision's, such as ``"IMAGENET1K_V1"``.

    Raises:
        UsageError: There is no such model, or no such weights for it.
    """
    refuse_unknown(name)
    known = _torchvision().get_model_weights(name)
    if weights == "default" and list(known):
        return str(known.DEFAULT.url)
    wanted = weights.rpartition(".")[2]  # ResNet18_Weights.IMAGENET1K_V1
    if wanted not in known.__members__:
        has = ", ".join(["default", *known.__members__]) if list(known) else "none"
        raise UsageError(
            f"--weights {weights!r} is no file, and no weights that torchvision has "
            f"for {name}; it has {has}"
        )
    return str(known[wanted].url)


def weights_file(name: str, weights: str, *, progress: bool = False) -> Path:
    """Return the file of pretrained weights, downloaded where it is not there yet.

    Raises:
        UsageError: There is no such model, or no such weights for it.
        DataError: It cannot be downloaded.
    """
    url = url_of(name, weights)
    return download(url, model=name, weights=weights, progress=progress)


def is_cached(name: str, weights: str) -> bool:
    """Whether the file of pretrained weights is there.

    Raises:
        UsageError: There is no such model, or no such weights for it.
    """
    return cached_path(url_of(name, weights)).exists()


def translate(model: nn.Module, state: State) -> State:
    """Bring older names, and position embeddings of other image sizes, up to date.

    Args:
        model: A model of torchvision's.
        state: Weights of the same architecture.

    Returns:
        Weights as this model has them.
    """
    if type(model).__name__ == "DenseNet":
        # The files still have norm.1 for norm1, as in torchvision.models.densenet.
        old = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")
        return {old.sub(r"\1\2", name): value for name, value in state.items()}
    if type(model).__name__ == "VisionTransformer" and "encoder.pos_embedding" in state:
        vision_transformer = _torchvision().vision_transformer
        return dict(
            vision_transformer.interpolate_embeddings(
                model.image_size, model.patch_size, dict(state)
            )
        )
    return state


def _torchvision() -> Any:
    try:
        return importlib.import_module("torchvision.models")
    except Exception as error:  # built for another torch, it fails in many ways
        raise DataError(
            f"torchvision cannot be imported ({type(error).__name__}: {error}); "
            "expected the version that belongs to this torch: pip install torchvision"
        ) from error

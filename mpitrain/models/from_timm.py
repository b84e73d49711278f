"""Models of timm: ``timm:NAME``, or ``timm:NAME.TAG`` for one of its sets of weights.

timm is imported inside functions: it costs seconds, and need not be there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import nn

from mpitrain.errors import DataError, UsageError, did_you_mean
from mpitrain.models.layers import first_layer, try_one_image
from mpitrain.models.weight_files import State, cached_path, download, not_downloaded

PREFIX = "timm:"
HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def build(
    name: str,
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    weights: str | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a model; timm itself fits head, channels and position embeddings.

    Args:
        name: ``timm:NAME``.
        num_classes: Size of the output.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: H and W, in pixels.
        weights: ``"default"`` or a tag of timm's; ``None`` for random ones.

    Returns:
        The model, and what was changed of its weights, in words.

    Raises:
        UsageError: No timm, no such model or weights, or none for images of this size.
        DataError: The weights cannot be had.
    """
    timm = _timm()
    named = tagged(name, weights)
    made_for = timm.get_pretrained_cfg(named, allow_unregistered=True)
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": in_channels}
    if weights is not None:
        path = weights_file(name, weights)
        # The file as it is: timm would ask Hugging Face again, on every rank.
        overlay = {"file": str(path), "custom_load": False, "source": ""}
        options |= {"pretrained": True, "pretrained_cfg_overlay": overlay}
    try:
        try:
            model: nn.Module = timm.create_model(named, img_size=image_size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            model = timm.create_model(named, **options)
        try_one_image(model, in_channels, image_size)
    except Exception as error:
        size = made_for.input_size[-1] if made_for else 224
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if size == image_size:
            raise DataError(f"timm cannot build --model {name} ({why})") from error
        raise UsageError(
            f"--model {name} does not work with {in_channels} channels of {image_size}x"
            f"{image_size} pixels ({why}); it was made for {size}x{size}: "
            f"--image-size {size}"
        ) from error
    if weights is None:
        return model, ()
    return model, tuple(_fitted(model, made_for, num_classes, in_channels))


def _fitted(
    model: nn.Module, made_for: Any, num_classes: int, in_channels: int
) -> list[str]:
    """Say what timm changed of pretrained weights."""
    words = []
    if made_for.num_classes != num_classes:
        words.append(f"head new ({num_classes} classes, not {made_for.num_classes})")
    channels = made_for.input_size[0]
    first = first_layer(model)
    if first and channels != in_channels:
        words.append(f"{first[0]} from {channels} channels to {in_channels}")
    return words


def tagged(name: str, weights: str | None = None) -> str:
    """Return timm's own name for a model, with the tag of its weights.

    Args:
        name: ``timm:NAME`` or ``timm:NAME.TAG``.
        weights: A tag; ``"default"`` or ``None`` for the one in the name, or timm's
            choice.

    Returns:
        ``NAME`` or ``NAME.TAG``.

    Raises:
        UsageError: No timm, no such model, or no such tag.
    """
    timm = _timm()
    named = name.removeprefix(PREFIX)
    architecture, _, tag = named.partition(".")
    known = timm.list_models()
    if architecture not in known:
        raise UsageError(
            f"--model {name!r}: timm has no model {architecture!r}."
            f"{did_you_mean(architecture, known)} Expected one of timm.list_models()"
        )
    if weights not in (None, "default"):
        tag = weights
    if not tag:
        return architecture
    full = f"{architecture}.{tag}"
    has = timm.list_pretrained(f"{architecture}*")
    tags = [n.partition(".")[2] for n in has if n.partition(".")[0] == architecture]
    if tag not in tags:
        choice = ", ".join(["default", *tags]) if tags else "none"
        raise UsageError(
            f"--weights {tag!r} is no file, and no weights that timm has for "
            f"{architecture}; it has {choice}"
        )
    return full


def weights_file(name: str, weights: str, *, progress: bool = False) -> Path:
    """Return the file of pretrained weights, downloaded where it is not there yet.

    Raises:
        UsageError: No timm, no such model, or no such weights for it.
        DataError: It cannot be downloaded.
    """
    made_for = _made_for(name, weights)
    cached = _cached(made_for)
    if cached is not None:
        return cached
    if not made_for.hf_hub_id:
        return download(made_for.url, model=name, weights=weights, progress=progress)
    import huggingface_hub

    repository, _, revision = made_for.hf_hub_id.partition("@")
    version = revision or None
    if not progress:
        huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        *better, last = _hub_files(made_for)
        file = next(
            (
                f
                for f in better
                if huggingface_hub.file_exists(repository, f, revision=version)
            ),
            last,
        )
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=version))
    except Exception as error:  # those of whatever speaks HTTP for Hugging Face
        url = f"https://huggingface.co/{repository}"
        folder = huggingface_hub.constants.HF_HUB_CACHE
        raise not_downloaded(name, weights, url, folder, error) from error


def is_cached(name: str, weights: str) -> bool:
    """Whether the file of pretrained weights is there.

    Raises:
        UsageError: No timm, no such model, or no such weights for it.
    """
    return _cached(_made_for(name, weights)) is not None


def cache_folder() -> Path:
    """Return where Hugging Face keeps what timm downloads."""
    import huggingface_hub

    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def _made_for(name: str, weights: str) -> Any:
    """Return timm's notes on weights, which must be there."""
    found = _timm().get_pretrained_cfg(tagged(name, weights), allow_unregistered=True)
    if found is None or not (found.hf_hub_id or found.url):
        raise UsageError(
            f"--weights {weights!r}: timm has none for {name}; expected a file, or no "
            "--weights for random ones"
        )
    return found


def _hub_files(made_for: Any) -> tuple[str, ...]:
    named = made_for.hf_hub_filename
    return (named,) if named else HUB_FILES


def _cached(made_for: Any) -> Path | None:
    """Find the file of weights on this machine."""
    if not made_for.hf_hub_id:
        path = cached_path(made_for.url)
        return path if path.exists() else None
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = made_for.hf_hub_id.partition("@")
    for file in _hub_files(made_for):
        found = try_to_load_from_cache(repository, file, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    return None


def translate(model: nn.Module, state: State) -> State:
    """Let timm convert other spellings of weights, and resize position embeddings.

    Args:
        model: A model of timm's.
        state: Weights of the same architecture.

    Returns:
        Weights as this model has them.
    """
    module = sys.modules[type(model).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    return dict(convert(dict(state), model)) if convert else state


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise UsageError(
            f"--model timm:... wants a package that is not here ({error}): "
            "pip install 'mpitrain[timm]'"
        ) from None
    return timm

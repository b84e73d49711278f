"""Models of timm: ``timm:NAME``, or ``timm:NAME.TAG`` for one of its sets of weights.

timm is imported inside functions: it costs seconds, and is an optional package.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from torch import nn

from mpitrain.errors import DataError, UsageError, did_you_mean
from mpitrain.models.layers import Sizes, try_one_image
from mpitrain.models.weights import cached_file, not_downloaded, unknown_weights
from mpitrain.plugins import require

PREFIX = "timm:"


def build(name: str, sizes: Sizes, weights: str | None) -> tuple[nn.Module, str]:
    """Return a model, and what timm changed of its pretrained weights, in words."""
    timm = _timm()
    num_classes, channels, size = sizes
    full_name, cfg = _resolve(name, weights)
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    if weights is not None:
        # The file itself: timm would ask Hugging Face once more, on every rank.
        file = fetch(name, weights)
        overlay = {"file": file, "custom_load": False, "source": ""}
        options |= {"pretrained": True, "pretrained_cfg_overlay": overlay}
    try:
        try:
            model: nn.Module = timm.create_model(full_name, img_size=size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            model = timm.create_model(full_name, **options)
        try_one_image(model, sizes)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        trained_size = cfg.input_size[-1] if cfg else 224
        if trained_size == size:
            raise DataError(f"timm cannot build --model {name} ({reason})") from error
        raise UsageError(
            f"--model {name} does not work with {channels} channels of {size}x{size} "
            f"pixels ({reason}); it was made for {trained_size}x{trained_size}: "
            f"--image-size {trained_size}"
        ) from error
    changes = []
    if weights is not None and cfg.num_classes != num_classes:
        changes.append(f"head new ({num_classes} classes, not {cfg.num_classes})")
    if weights is not None and cfg.input_size[0] != channels:
        changes.append(f"from {cfg.input_size[0]} channels to {channels}")
    return model, "; ".join(changes)


def fetch(name: str, weights: str | None, *, progress: bool = False) -> str:
    """Return the file of pretrained weights, downloaded if it is not cached."""
    if weights is None:
        return ""
    import huggingface_hub

    if not progress:
        huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]
    cfg = _resolve(name, weights)[1]
    try:  # first without the network, which compute nodes may not have
        return _find_file(cfg) or _find_file(cfg, local=False)
    except Exception as error:  # those of whatever speaks HTTP for Hugging Face
        raise not_downloaded(name, weights, error) from error


def is_cached(name: str, weights: str | None) -> bool:
    """Whether `fetch` has nothing to download."""
    return weights is None or bool(_find_file(_resolve(name, weights)[1]))


def _find_file(cfg: Any, *, local: bool = True) -> str:
    import huggingface_hub

    if not cfg.hf_hub_id:
        return cached_file(cfg.url, local=local)
    repository, _, revision = cfg.hf_hub_id.partition("@")
    named = cfg.hf_hub_filename
    for file in (named,) if named else ("model.safetensors", "pytorch_model.bin"):
        with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
            return huggingface_hub.hf_hub_download(
                repository, file, revision=revision or None, local_files_only=local
            )
    return ""


def _resolve(name: str, weights: str | None) -> tuple[str, Any]:
    """Return timm's own name, ``NAME`` or ``NAME.TAG``, and its configuration."""
    timm = _timm()
    architecture, _, tag = name.removeprefix(PREFIX).partition(".")
    known = timm.list_models()
    if architecture not in known:
        raise UsageError(
            f"--model {name!r}: timm has no model {architecture!r}."
            f"{did_you_mean(architecture, known)} Expected one of timm.list_models()"
        )
    if weights not in (None, "default"):
        tag = weights
    full_name = f"{architecture}.{tag}" if tag else architecture
    pretrained = timm.list_pretrained(f"{architecture}.*")
    if (tag and full_name not in pretrained) or (weights and not pretrained):
        tags = [known.partition(".")[2] for known in pretrained]
        has = ["default", *tags] if tags else ()
        raise unknown_weights(PREFIX + architecture, tag or str(weights), has)
    return full_name, timm.get_pretrained_cfg(full_name, allow_unregistered=True)


def _timm() -> Any:
    require("timm", "--model timm:...", "'mpitrain[timm]'")
    return importlib.import_module("timm")

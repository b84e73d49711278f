"""Models from repositories with a ``hubconf.py``: ``hub:REPO_OR_DIR:ENTRY``.

REPO is ``owner/name`` or ``owner/name:ref`` on GitHub (a branch, tag or commit), DIR a
clone on this machine. The code in it is run, as `torch.hub` does.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mpitrain.errors import DataError, UsageError
from mpitrain.models.layers import (
    HEAD_NAMES,
    Sizes,
    WithHead,
    check_is_module,
    fit_first_conv,
    try_one_image,
)
from mpitrain.models.weights import not_downloaded, unknown_weights

PREFIX = "hub:"
FORM = "expected hub:OWNER/NAME:ENTRY, hub:OWNER/NAME:REF:ENTRY or hub:FOLDER:ENTRY"


def build(name: str, sizes: Sizes, weights: str | None) -> tuple[nn.Module, str]:
    """Return a model built by a repository's code, and what was changed, in words."""
    model = _load(name, weights)
    conv = fit_first_conv(model, sizes.in_channels, pretrained=weights is not None)
    outputs: dict[nn.Module, object] = {}
    hook = register_module_forward_hook(
        lambda module, _, output: outputs.update({module: output})
    )
    try:
        output = try_one_image(model, sizes)
    except Exception as error:
        size = sizes.image_size
        raise DataError(
            f"--model {name} fails on an image of {sizes.in_channels} channels and "
            f"{size}x{size} pixels ({type(error).__name__}: {error}); "
            "another size may do: --image-size 224"
        ) from error
    finally:
        hook.remove()
    if not isinstance(output, Tensor) or output.ndim != 2:
        shape = f" of shape {tuple(output.shape)}" if hasattr(output, "shape") else ""
        raise DataError(
            f"--model {name} returned {type(output).__name__}{shape} for one image; "
            "expected one tensor (N, classes), or features (N, F)"
        )
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    last = next((n for n, m in modules if outputs.get(m) is output), None)
    model, head = _fit_head(model, last, output.shape[1], sizes.num_classes)
    return model, "; ".join(filter(None, (conv, head)))


def _fit_head(
    model: nn.Module, last: str | None, width: int, num_classes: int
) -> tuple[nn.Module, str | None]:
    """Replace the layer that makes the output, or put one on top."""
    if last:
        model.head_name = last  # type: ignore[assignment]
        if width == num_classes:
            return model, None
        old = model.get_submodule(last)
        assert isinstance(old, nn.Linear)
        new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
        model.set_submodule(last, new)
        return model, f"{last} new ({num_classes} classes instead of {width})"
    is_bare = any(isinstance(getattr(model, n, None), nn.Identity) for n in HEAD_NAMES)
    if width == num_classes and not is_bare:
        return model, None
    with_head = WithHead(model, nn.Linear(width, num_classes))
    return with_head, f"head new ({num_classes} classes from {width} features)"


def _load(name: str, weights: str | None) -> nn.Module:
    _check_weights(name, weights)
    repository, entry = _parse(name)
    # A clone in torch's cache as a folder: else torch.hub asks GitHub for the branch.
    folder = _clone_of(repository)
    load = partial(
        torch.hub.load,
        str(folder or repository),
        entry,
        source="local" if folder else "github",
        trust_repo=True,
        skip_validation=True,  # the validation asks GitHub, on every rank
        verbose=False,
    )
    try:
        try:
            model = load(pretrained=weights is not None)
        except TypeError as error:
            if "'pretrained'" not in str(error):
                raise
            model = None if weights else load()
    except Exception as error:
        has_weights = weights is None or not isinstance(error, OSError)
        if _clone_of(repository) is None or not has_weights:
            raise not_downloaded(name, weights, error) from error
        cure = f"; pip install {error.name}" if isinstance(error, ImportError) else ""
        raise DataError(
            f"--model {name}: torch.hub could not load it from {repository} "
            f"({type(error).__name__}: {error}){cure}"
        ) from error
    if model is None:
        raise UsageError(
            f"--weights default: {entry} of {repository} does not take pretrained; "
            "expected a file, or no --weights (it may get its own)"
        )
    return check_is_module(name, model)


def _check_weights(name: str, weights: str | None) -> None:
    if weights not in (None, "default"):
        raise unknown_weights(name, weights, ["default"])


def _parse(name: str) -> tuple[str, str]:
    repository, _, entry = name.removeprefix(PREFIX).rpartition(":")
    if not repository or not entry:
        raise UsageError(f"--model {name!r}: {FORM}")
    return repository, entry


def _clone_of(repository: str) -> Path | None:
    """Find a folder, or a repository in torch's cache, without asking GitHub."""
    if Path(repository).is_dir():
        return Path(repository).resolve()
    on_github = re.fullmatch(r"(\w[\w.-]*)/([\w.-]+)(?::(.+))?", repository)
    if on_github is None:
        raise UsageError(
            f"--model {PREFIX}{repository}:...: there is no folder {repository!r}, "
            f"seen from {Path.cwd()}, and that is not a name on GitHub; {FORM}"
        )
    owner, project, ref = on_github.groups()
    cache = Path(torch.hub.get_dir())
    refs = [ref.replace("/", "_")] if ref else ["main", "master"]
    folders = [cache / f"{owner}_{project}_{ref}" for ref in refs]
    return next((folder for folder in folders if folder.is_dir()), None)


def fetch(name: str, weights: str | None, *, progress: bool = False) -> None:  # noqa: ARG001
    """Download a repository, and the weights that its entry would get."""
    if not is_cached(name, weights):
        _load(name, weights)


def is_cached(name: str, weights: str | None) -> bool:
    """Whether nothing need be downloaded; only the entry's code knows its weights."""
    _check_weights(name, weights)
    return _clone_of(_parse(name)[0]) is not None and weights is None

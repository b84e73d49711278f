"""Downloads ahead of a run: by one rank for all, or where there is internet."""

from __future__ import annotations

from pathlib import Path

from mpitrain.models import from_timm, hub, zoo
from mpitrain.models.weight_files import is_file_name
from mpitrain.plugins import is_reference


def fetch_weights(name: str, weights: str | None, *, progress: bool = False) -> None:
    """Download what a model needs, unless it is on this machine already.

    For ``hub:`` that is the repository, too.

    Args:
        name: ``--model``.
        weights: ``--weights``; a file or ``None`` needs no download.
        progress: Draw a bar on the terminal, where the library has one.

    Raises:
        UsageError: There is no such model, or no such weights for it.
        DataError: It cannot be downloaded.
    """
    if weights is not None and is_file_name(weights):
        weights = None
    if name.startswith(hub.PREFIX):
        hub.fetch(name, weights)
    elif weights is None or is_own(name):
        return
    elif name.startswith(from_timm.PREFIX):
        from_timm.weights_file(name, weights, progress=progress)
    else:
        zoo.weights_file(name, weights, progress=progress)


def is_cached(name: str, weights: str | None) -> bool:
    """Whether a model needs no download, as far as can be known.

    Args:
        name: ``--model``.
        weights: ``--weights``.

    Returns:
        ``False`` also where only the model's own code knows (``hub:`` with weights).

    Raises:
        UsageError: There is no such model, or no such weights for it.
    """
    if weights is not None and is_file_name(weights):
        weights = None
    if name.startswith(hub.PREFIX):
        return hub.is_cached(name, weights)
    if weights is None or is_own(name):
        return True
    if name.startswith(from_timm.PREFIX):
        return from_timm.is_cached(name, weights)
    return zoo.is_cached(name, weights)


def cache_folder(name: str) -> Path:
    """Return where the downloads of a model are kept.

    Args:
        name: ``--model``.
    """
    import torch

    if name.startswith(from_timm.PREFIX):
        return from_timm.cache_folder()
    return Path(torch.hub.get_dir())


def is_own(name: str) -> bool:
    """Whether a model is ours or the user's, so that no library has weights for it.

    >>> is_own("convnet"), is_own("my_models:small"), is_own("timm:resnet18")
    (True, True, False)
    """
    of_library = name.startswith((from_timm.PREFIX, hub.PREFIX))
    return name == "convnet" or (is_reference(name) and not of_library)

"""Files of weights: read without running anything in them; downloaded where need be."""

from __future__ import annotations

import http.client
import importlib
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpitrain.errors import DataError, UsageError

SUFFIXES = frozenset({".pt", ".pth", ".safetensors", ".bin", ".ckpt", ".tar"})
NESTED = (
    *("model", "state_dict", "model_state_dict", "model_state", "model_ema"),
    *("module", "net", "network", "weights", "state"),
)
"""Keys under which programs save a ``state_dict``, in any case (`MODEL_STATE`)."""
EXPECTED = "expected a state_dict: torch.save(model.state_dict(), 'model.pt')"

State = dict[str, Any]
"""Weights by name; a few values may be no tensors (`_extra_state`)."""


def is_file_name(weights: str) -> bool:
    """Whether ``--weights`` names a file, and not weights that a library knows.

    >>> is_file_name("runs/a/model.pt"), is_file_name("default")
    (True, False)
    """
    path = Path(weights)
    return path.suffix in SUFFIXES or "/" in weights or path.is_file()


def read_state(path: Path) -> State:
    """Read the weights in a file.

    Args:
        path: Of ``torch.save`` (.pt, .pth, ...) or .safetensors; a plain
            ``state_dict``, or one under a key such as ``"model"`` or ``"state_dict"``.

    Returns:
        The tensors by name, on the CPU.

    Raises:
        UsageError: There is no such file.
        DataError: It cannot be read, holds no weights, or holds code besides.
    """
    if not path.is_file():
        what = (
            "is a folder" if path.is_dir() else f"is not there, seen from {Path.cwd()}"
        )
        raise UsageError(
            f"--weights {str(path)!r} {what}; expected a file of weights, such as "
            "runs/NAME/model.pt"
        )
    try:
        if path.suffix == ".safetensors":
            return dict(_safetensors().load_file(path, device="cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles by other means than torch's
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # a broken file can fail in any way
        raise DataError(f"--weights {path} {_why_not_read(path, error)}") from error
    return _weights_in(found, path)


def _weights_in(found: object, path: Path) -> State:
    """Find the weights in what a file holds."""
    if isinstance(found, Mapping):
        by_key = {str(key).lower(): value for key, value in found.items()}
        for key in NESTED:
            if isinstance(by_key.get(key), Mapping):
                return _weights_in(by_key[key], path)
        state = {str(key): value for key, value in found.items()}
        if any(isinstance(value, torch.Tensor) for value in state.values()):
            return state
        what = (
            f"a {type(found).__name__} with {', '.join(list(state)[:10]) or 'nothing'}"
        )
    else:
        what = f"a {type(found).__name__}"
    raise DataError(
        f"--weights {path} holds no weights: found {what}; {EXPECTED}, or it under one "
        f"of the keys {', '.join(NESTED)}"
    )


def _why_not_read(path: Path, error: Exception) -> str:
    """Tell a file that holds code from one that is broken, or no file of torch's."""
    # In torch 2.15's message: "Unsupported global: GLOBAL posix.system was not ...".
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is not None:
        return (
            f"holds more than weights, and was not opened: it wants {named[1]} of "
            f"Python, which could run anything; {EXPECTED}, where the file comes from"
        )
    why = str(error).partition("\n")[0].partition(". ")[0]
    return (
        f"cannot be read ({type(error).__name__}: {why}): it has "
        f"{path.stat().st_size:,} bytes, and is no file of weights, or not the whole "
        "of one.\nCopy or download it again."
    )


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise UsageError(
            "--weights of the kind .safetensors want a package that is not here: "
            "pip install safetensors"
        ) from None


def cached_path(url: str) -> Path:
    """Return where torch keeps the file of an address, be it there or not."""
    return Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]


def download(url: str, *, model: str, weights: str, progress: bool = False) -> Path:
    """Download a file of weights into torch's cache, unless it is there.

    Args:
        url: Its address; a ``-0a1b2c3d.`` in its name is its SHA-256, which is checked.
        model: ``--model``, for messages.
        weights: ``--weights``, for messages.
        progress: Draw a bar on the terminal.

    Returns:
        The file, whole.

    Raises:
        DataError: It cannot be had.
    """
    path = cached_path(url)
    if path.exists():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(
            url, str(path), hash_prefix=digest and digest[1], progress=progress
        )
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise not_downloaded(model, weights, url, path.parent, error) from error
    return path


def not_downloaded(
    model: str, weights: str | None, url: str, folder: Path | str, error: Exception
) -> DataError:
    """Make the error for something that could not be downloaded.

    Args:
        model: ``--model``.
        weights: ``--weights``.
        url: From where.
        folder: Where it would have been kept.
        error: What happened.

    Returns:
        The error, to be raised.
    """
    of_weights = f" --weights {weights}" if weights else ""
    why = str(error).strip().partition("\n")[0]
    return DataError(
        f"--model {model}{of_weights} could not be downloaded from {url} "
        f"({type(error).__name__}: {why}).\nFetch it where there is internet: "
        f"python -m mpitrain fetch {model}{of_weights}\nIt is kept in {folder}, which "
        "this machine must see, too."
    )

"""Models from repositories with a ``hubconf.py``: ``hub:REPO_OR_DIR:ENTRY``.

REPO is ``owner/name`` or ``owner/name:branch`` on GitHub, DIR a clone on this machine.
The code in it is run, as ``torch.hub`` would.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.head import HEAD_NAMES, WithHead
from mpitrain.models.layers import fit_first_layer, try_one_image
from mpitrain.models.weight_files import not_downloaded
from mpitrain.plugins import call_with_known

PREFIX = "hub:"
FORM = "expected hub:OWNER/NAME:ENTRY, hub:OWNER/NAME:BRANCH:ENTRY or hub:FOLDER:ENTRY"


def build(
    name: str,
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    weights: str | None = None,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a model by a repository's own code, and fit its two ends to the data.

    A model whose last linear layer gives its output gets another in its place if the
    number of classes is not the same; a bare backbone gets one on top.

    Args:
        name: ``hub:REPO_OR_DIR:ENTRY``; the repository is downloaded if need be.
        num_classes: Size of the output.
        in_channels: C of an input `(N, C, H, W)`.
        image_size: H and W, in pixels.
        weights: ``"default"`` for those that the entry itself can get, or ``None``.

    Returns:
        The model, and what was changed, in words.

    Raises:
        UsageError: There is no such repository or entry.
        DataError: Its code fails, or what it returns is no such model.
    """
    known = {
        "num_classes": num_classes,
        "in_channels": in_channels,
        "image_size": image_size,
    }
    model = call_entry(name, weights, known)
    words = [fit_first_layer(model, in_channels, pretrained=weights is not None)]
    try:
        return fit_head(name, model, words, known)
    except (DataError, UsageError):
        raise
    except Exception as error:
        raise DataError(
            f"--model {name} fails on an image of {in_channels} channels and "
            f"{image_size}x{image_size} pixels ({type(error).__name__}: {error}); "
            "another size may do: --image-size 224"
        ) from error


def call_entry(name: str, weights: str | None, known: dict[str, int]) -> nn.Module:
    """Let the repository build its model, with its own weights or with none."""
    repository, entry_name = parse(name)
    folder = clone_of(repository) or download_clone(name, repository)
    options: dict[str, object] = {"pretrained": weights is not None}
    if weights is None:
        options |= known
    elif weights != "default":
        raise UsageError(
            f"--weights {weights!r} is no file; for --model {name} expected a file, or "
            "default for the weights that the repository itself gets"
        )
    with importing(folder, name) as hubconf:
        entry = find_entry(hubconf, entry_name, folder)
        takes = inspect.signature(entry).parameters
        if weights is not None and "pretrained" not in takes:
            if "weights" not in takes:
                raise UsageError(
                    f"--weights default: {entry_name} of {folder} takes neither "
                    "pretrained nor weights; expected a file, or no --weights (it may "
                    "get its own without being asked)"
                )
            options["weights"] = "DEFAULT"  # as torchvision's own hubconf.py has it
        try:
            model = call_with_known(entry, options, f"--model {name}")
        except OSError as error:
            if weights is None:
                raise
            cache = torch.hub.get_dir()
            source = f"where {repository} has it"
            raise not_downloaded(name, weights, source, cache, error) from error
    if not isinstance(model, nn.Module):
        raise DataError(
            f"--model {name} returned {type(model).__name__!r}; "
            "expected a torch.nn.Module"
        )
    return model


def fit_head(
    name: str, model: nn.Module, words: list[str | None], known: dict[str, int]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Give a model the right number of outputs: a new last layer, or one on top."""
    made: dict[str, object] = {}
    hooks = [
        module.register_forward_hook(
            lambda _, _args, scores, part=part: made.update({part: scores})
        )
        for part, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        output = try_one_image(model, known["in_channels"], known["image_size"])
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor) or output.ndim != 2:
        found = getattr(output, "shape", None)
        raise DataError(
            f"--model {name} returned {type(output).__name__}"
            f"{'' if found is None else f' of shape {tuple(found)}'} for one image; "
            "expected one tensor (N, classes), or features (N, F)"
        )
    width, num_classes = output.shape[1], known["num_classes"]
    last = next((part for part, scores in made.items() if scores is output), None)
    if last:
        model.head_name = last  # type: ignore[assignment]
        if width != num_classes:
            old = model.get_submodule(last)
            assert isinstance(old, nn.Linear)
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None)
            model.set_submodule(last, new)
            words.append(f"{last} new ({num_classes} classes instead of {width})")
    elif width != num_classes or is_bare(model):
        model = WithHead(model, nn.Linear(width, num_classes))
        words.append(f"head new ({num_classes} classes from {width} features)")
    return model, tuple(word for word in words if word)


def is_bare(model: nn.Module) -> bool:
    """Whether a model has an empty place where its head would be."""
    return any(isinstance(getattr(model, n, None), nn.Identity) for n in HEAD_NAMES)


def parse(name: str) -> tuple[str, str]:
    """Split a name into repository and entry.

    >>> parse("hub:facebookresearch/dinov2:main:dinov2_vits14")
    ('facebookresearch/dinov2:main', 'dinov2_vits14')
    """
    repository, _, entry = name.removeprefix(PREFIX).rpartition(":")
    if not repository or not entry:
        raise UsageError(f"--model {name!r}: {FORM}")
    return repository, entry


def clone_of(repository: str) -> Path | None:
    """Find a repository on this machine: a folder, or what was downloaded before.

    Args:
        repository: A folder, ``owner/name`` or ``owner/name:branch``.

    Returns:
        Its folder; ``None`` if it must be downloaded.

    Raises:
        UsageError: It is no folder that is there, and no name on GitHub.
    """
    if Path(repository).is_dir():
        return Path(repository).resolve()
    on_github = re.fullmatch(r"(\w[\w.-]*)/([\w.-]+)(?::(.+))?", repository)
    if on_github is None:
        raise UsageError(
            f"--model {PREFIX}{repository}:...: there is no folder {repository!r}, "
            f"seen from {Path.cwd()}, and it is no name on GitHub; {FORM}"
        )
    owner, project, branch = on_github.groups()
    branches = [branch.replace("/", "_")] if branch else ["main", "master"]
    cache = Path(torch.hub.get_dir())
    folders = [cache / f"{owner}_{project}_{branch}" for branch in branches]
    return next((folder for folder in folders if folder.is_dir()), None)


def download_clone(name: str, repository: str) -> Path:
    """Download a repository into torch's cache.

    Raises:
        DataError: It cannot be had.
    """
    failure: Exception = FileNotFoundError("nothing was downloaded")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            torch.hub.list(  # type: ignore[no-untyped-call]
                repository, skip_validation=True, trust_repo=True, verbose=False
            )
    except Exception as error:  # also of its code, which is told better when it is used
        failure = error
    folder = clone_of(repository)
    if folder is None:
        url, cache = f"https://github.com/{repository}", torch.hub.get_dir()
        raise not_downloaded(name, None, url, cache, failure) from failure
    return folder


@contextlib.contextmanager
def importing(folder: Path, name: str) -> Iterator[ModuleType]:
    """Import the ``hubconf.py`` of a clone, whose modules can be imported meanwhile.

    Raises:
        UsageError: There is none.
        DataError: Its code fails, in the block, too.
    """
    path = folder / "hubconf.py"
    if not path.is_file():
        raise UsageError(
            f"--model {name}: there is no hubconf.py in {folder}; expected a clone of "
            "a repository made for torch.hub"
        )
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("hubconf", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    except (DataError, UsageError):
        raise
    except ImportError as error:
        raise DataError(
            f"--model {name}: {folder} needs a package that is not here ({error}); "
            f"install what it needs: pip install {error.name or '...'}"
        ) from error
    except Exception as error:
        raise DataError(
            f"--model {name}: the code of {folder} failed with {type(error).__name__}: "
            f"{error}"
        ) from error
    finally:
        sys.path.remove(str(folder))


def find_entry(
    hubconf: ModuleType, entry_name: str, folder: Path
) -> Callable[..., Any]:
    """Find a callable of a ``hubconf.py``.

    Raises:
        UsageError: There is none of that name.
        DataError: The repository says that it needs packages which are not here.
    """
    needed = getattr(hubconf, "dependencies", [])
    missing = [package for package in needed if not importlib.util.find_spec(package)]
    if missing:
        raise DataError(
            f"{folder}/hubconf.py needs packages that are not here: "
            f"pip install {' '.join(missing)}"
        )
    entry = getattr(hubconf, entry_name, None)
    if not callable(entry):
        entries = [n for n, v in vars(hubconf).items() if callable(v) and n[0] != "_"]
        raise UsageError(
            f"{folder}/hubconf.py has no entry {entry_name!r}; it has "
            f"{', '.join(entries) or 'none'}"
        )
    return entry  # type: ignore[no-any-return]


def fetch(name: str, weights: str | None) -> None:
    """Download a repository, and the weights that its entry would get.

    Raises:
        UsageError: There is no such repository or entry.
        DataError: It cannot be had, or its code fails.
    """
    repository, _ = parse(name)
    if clone_of(repository) is None:
        download_clone(name, repository)
    if weights is not None:
        call_entry(name, weights, {})


def is_cached(name: str, weights: str | None) -> bool:
    """Whether nothing need be downloaded, as far as can be known without asking it."""
    return clone_of(parse(name)[0]) is not None and weights is None

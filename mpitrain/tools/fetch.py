"""`python -m mpitrain fetch`: data sets and weights from the internet. Needs no MPI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpitrain.config import DATA_DIR
from mpitrain.errors import UsageError
from mpitrain.settings import setting

DATA_SETS = ("mnist", "fashion-mnist", "cifar10", "cifar100")

KNOWN = (
    f"Expected one or more of {', '.join(DATA_SETS)}, or a model with weights to "
    "download, as --model names it: resnet50, timm:NAME, hub:REPO:ENTRY"
)


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Download data sets and weights where there is internet: jobs then need none."""

    names: tuple[str, ...] = setting((), metavar="NAME [NAME ...]", is_positional=True)
    """Which: mnist, fashion-mnist, cifar10, cifar100; or a model by its --model."""
    data_dir: Path = DATA_DIR
    """Folder to put data sets in; trainings are then given the same."""
    mirror: str | None = None
    """Address of a folder with copies of the files (http, https or file:///). Default:
    the addresses that torchvision knows."""
    weights: str = "default"
    """Which weights of a model, as --weights names them. default: its best."""

    def __post_init__(self) -> None:
        if not self.names:
            raise UsageError(f"fetch: missing name. {KNOWN}")


def fetch(config: FetchConfig) -> None:
    """Fetch what is not there yet, look at it, and print a line for each name."""
    from mpitrain.models.build import fetch_weights

    # All before the first download: a misspelt one is told at once.
    for name in config.names:
        if name not in DATA_SETS:
            _check_model(name, config)
    for name in config.names:
        if name in DATA_SETS:
            found = _data_set(name, config)
        else:
            fetch_weights(name, config.weights, progress=True)
            found = f"weights {config.weights} are in the cache"
        print(f"{name}: {found}", flush=True)


def _data_set(name: str, config: FetchConfig) -> str:
    from mpitrain.tasks.image_classification.datasets import torchvision_sets

    torchvision_sets.fetch(name, config.data_dir, config.mirror)
    arrays = torchvision_sets.read(name, config.data_dir)
    train, val = (len(arrays[f"{part}_labels"]) for part in ("train", "val"))
    return (
        f"{torchvision_sets.find(name, config.data_dir)}, {train} samples to train and "
        f"{val} to validate, {torchvision_sets.NUM_CLASSES[name]} classes"
    )


def _check_model(name: str, config: FetchConfig) -> None:
    from mpitrain.models.build import is_cached, library_of

    if library_of(name) is None:
        raise UsageError(f"fetch {name!r}: it has no weights to download. {KNOWN}")
    try:
        is_cached(name, config.weights)
    except UsageError as error:
        raise UsageError(f"fetch {name!r} is not known. {KNOWN}\n{error}") from None

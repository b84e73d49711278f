"""MNIST, Fashion-MNIST and CIFAR, as torchvision reads and downloads them.

CIFAR's files are pickles, which can run code: torchvision unpickles only files whose
MD5 is the published one.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import shlex
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.data.samples import Array
from mpitrain.errors import DataError, UsageError
from mpitrain.flags import PROGRAM
from mpitrain.tasks.image_classification.datasets.index import check_labels

CLASSES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
"""Names of torchvision's classes."""

NUM_CLASSES = {"mnist": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100}

TIMEOUT_SECONDS = 30.0  # how long a server may be silent

SCHEMES = ("http://", "https://", "file:///")

# What a download raises besides errors of the disk. RuntimeError: a wrong MD5.
_NETWORK_ERRORS = (
    *(RuntimeError, urllib.error.URLError, http.client.HTTPException),
    *(ConnectionError, TimeoutError),
)


def find(name: str, data_dir: Path) -> Path | None:
    """Return the folder with all files of a set; ``None``: not there.

    The names of files decide, not their content.
    """
    kind = _torchvision_class(name)
    if _is_mnist(kind):
        folder = data_dir / kind.__name__ / "raw"
        files = [file.removesuffix(".gz") for file, _ in kind.resources]
    else:
        folder = data_dir / kind.base_folder
        files = [file for file, _ in (*kind.train_list, *kind.test_list)]
    return folder if all((folder / file).is_file() for file in files) else None


def read(name: str, data_dir: Path) -> dict[str, Array]:
    """Read a set whole; the published test images are the validation part.

    Returns:
        ``train_inputs`` and ``val_inputs``, uint8 `(N, C, H, W)`; ``train_labels`` and
        ``val_labels``, int64 `(N,)`; ``classes``, names in lines, uint8 `(N,)`.
    """
    place = find(name, data_dir)
    how = (
        f"\nTo fetch {name} where there is internet, such as on the login node: "
        f"{_fetch_command(name, data_dir)}"
    )
    if place is None:
        raise DataError(f"{name} is not in {data_dir}.{how}")
    kind = _torchvision_class(name)
    try:
        parts = {
            "train": kind(data_dir, train=True),
            "val": kind(data_dir, train=False),
        }
    except Exception as error:  # it asserts, too, that a file makes sense
        raise DataError(
            f"{place}: torchvision cannot read {name}: {error!r}. A file is broken or "
            f"missing, or, of CIFAR's pickles, its MD5 is not the published one.{how}"
        ) from None
    # MNIST's are named "0 - zero".
    classes = [names.partition(" - ")[0] for names in parts["train"].classes]
    names = "\n".join(classes).encode()
    arrays: dict[str, Array] = {"classes": np.frombuffer(names, np.uint8)}
    for part, found in parts.items():
        images = torch.as_tensor(found.data).numpy()
        labels = torch.as_tensor(found.targets, dtype=torch.int64).numpy()
        try:
            where = f"{place}, the {part} labels"
            check_labels(labels, len(images), NUM_CLASSES[name], where)
        except DataError as error:
            raise DataError(f"{error}.{how}") from None
        images = images[:, None] if _is_mnist(kind) else images.transpose(0, 3, 1, 2)
        arrays |= {f"{part}_labels": labels, f"{part}_inputs": images}
    return arrays


def fetch(name: str, data_dir: Path, mirror: str | None) -> None:
    """Download what is missing of a set, or broken, into torchvision's layout.

    Files are read in a folder beside their place and moved when they are whole: readers
    and other jobs that fetch see each file as a whole or not at all.
    """
    if mirror is not None and not mirror.startswith(SCHEMES):
        raise UsageError(
            f"--mirror {mirror!r}: expected the address of a folder: "
            "http://HOST/FOLDER, https://HOST/FOLDER or file:///FOLDER"
        )
    if find(name, data_dir):
        with contextlib.suppress(DataError):
            read(name, data_dir)
            return
    from torchvision.datasets import utils  # type: ignore[import-untyped]

    kind = _torchvision_class(name)
    archives = {kind.filename: kind.tgz_md5} if not _is_mnist(kind) else {}
    for file, md5 in kind.resources if _is_mnist(kind) else ():
        archives[f"{kind.__name__}/raw/{file}"] = md5
    names = [Path(file).name for file in archives]
    where = (mirror or "").rstrip("/")
    at_mirror = {"mirrors": [f"{where}/"], "url": f"{where}/{names[0]}"}
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=data_dir) as beside:
            for file, md5 in archives.items():  # torchvision leaves whole ones alone
                archive = Path(beside, file)
                archive.parent.mkdir(parents=True, exist_ok=True)
                if utils.check_integrity(data_dir / file, md5):
                    archive.symlink_to((data_dir / file).absolute())
                elif where.startswith("file:"):  # it downloads by HTTP alone
                    urllib.request.urlretrieve(f"{where}/{archive.name}", archive)
                    if not utils.check_integrity(archive, md5):
                        raise RuntimeError(f"{archive.name}: expected MD5 {md5}")
            with _silent_download():
                here = type(kind.__name__, (kind,), at_mirror if mirror else {})
                here(beside, download=True)
            for path in sorted(Path(beside).rglob("*")):
                if path.is_file() and not path.is_symlink():
                    target = data_dir / path.relative_to(beside)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
    except _NETWORK_ERRORS as error:
        raise DataError(
            f"{name} could not be fetched from {mirror or 'where torchvision looks'}: "
            f"{error}\nFetch it where there is internet, such as on the login node: "
            f"{_fetch_command(name, data_dir)}\n"
            "Or say --mirror URL: the address (http, https, file) of a folder with "
            f"{', '.join(names)}"
        ) from None
    except OSError as error:
        raise DataError(
            f"{error.filename or data_dir}: cannot be written: "
            f"{error.strerror or error}. Expected room for {name}; "
            "choose another --data-dir"
        ) from None


def _torchvision_class(name: str) -> Any:
    from torchvision import datasets  # type: ignore[import-untyped]

    return getattr(datasets, CLASSES[name])


def _is_mnist(kind: Any) -> bool:
    return hasattr(kind, "resources")


def _fetch_command(name: str, data_dir: Path) -> str:
    return f"{PROGRAM} fetch {name} --data-dir {shlex.quote(str(data_dir))}"


@contextlib.contextmanager
def _silent_download() -> Iterator[None]:
    """Let downloads give up on a silent server, and print no progress bar."""
    # torchvision passes no timeout to urllib, whose default this is.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)

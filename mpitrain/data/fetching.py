"""Small data sets from the internet, by torchvision's addresses and check sums.

Files come into a folder beside their place, are checked there, and are moved when they
are whole: no name that is read ever names a part of a file.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import shutil
import socket
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpitrain.data import cifar, idx
from mpitrain.data.samples import Table
from mpitrain.data.tables import beginning, fetch_command
from mpitrain.errors import DataError, UsageError

TIMEOUT_SECONDS = 30.0
"""How long a server may be silent."""

SCHEMES = ("http://", "https://", "file:///")

GZIP = b"\x1f\x8b"
"""How the files begin, which are all compressed."""

NOT_REACHED = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
    RecursionError,  # torchvision's, for too many redirections
)
"""What a server or the way to it can do; other errors are of this machine's disk."""


class Format(Protocol):
    """What each module that reads sets has."""

    def find(self, name: str, data_dir: Path) -> Path | None:
        """Return where a set is, by the names of its files; ``None``: nowhere."""
        ...

    def lacking(self, name: str, data_dir: Path) -> list[Path]:
        """Return the files that must be fetched."""
        ...

    def read(self, name: str, data_dir: Path) -> Table:
        """Read a set whole."""
        ...


FORMATS: Mapping[str, Format] = {
    "mnist": idx,
    "fashion-mnist": idx,
    "cifar10": cifar,
    "cifar100": cifar,
}
"""Who reads each set that can be fetched."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a set comes from, and where it goes."""

    mirrors: Sequence[str]
    """Addresses of folders that have the files, the first one first."""
    files: Sequence[tuple[str, str]]
    """Each file's name there, and its md5 sum."""
    folder: Path
    """Where torchvision keeps them, below the data folder."""


def missing(name: str, data_dir: Path) -> list[Path]:
    """Return what must be fetched before a set can be read, by existence alone.

    Args:
        name: A name of `FORMATS`.
        data_dir: Where the set's files are, or shall be.

    Returns:
        The files, where they will be; empty if there is nothing to fetch.
    """
    return FORMATS[name].lacking(name, data_dir)


def fetch(name: str, data_dir: Path, mirror: str | None) -> None:
    """Download what is missing of a set, or broken, into torchvision's layout.

    Args:
        name: A name of `FORMATS`.
        data_dir: Folder for the set; made if need be.
        mirror: Address of a folder with the files, by http, https or file, in place of
            the ones that torchvision knows; ``None`` for those.

    Raises:
        UsageError: `mirror` is no such address.
        DataError: The files cannot be had, or cannot be written. What was there is
            still there, and no part of a file is.
    """
    if mirror is not None:
        check_mirror(mirror)
    if _is_readable(name, data_dir):
        return
    source = source_of(name)
    mirrors = source.mirrors if mirror is None else [mirror]
    folder = data_dir / source.folder
    utils = torchvisions_datasets().utils
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, md5 in source.files:
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as beside:
                here = folder / file
                if not utils.check_integrity(here, md5):
                    here = Path(beside, file)
                    if tried := _download(mirrors, here, md5):
                        raise _not_to_be_had(name, data_dir, file, tried)
                utils.extract_archive(here, beside)
                _move(Path(beside), folder, first=file)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written: "
            f"{error.strerror or error}. Expected room for {name}; "
            "choose another --data-dir"
        ) from None


def check_mirror(mirror: str) -> None:
    """Make sure that a mirror is an address.

    Raises:
        UsageError: It is none.
    """
    if not mirror.startswith(SCHEMES):
        raise UsageError(
            f"--mirror {mirror!r}: expected the address of a folder: "
            "http://HOST/FOLDER, https://HOST/FOLDER or file:///FOLDER"
        )


def torchvisions_datasets() -> Any:
    """Import torchvision's data sets: only when needed, for it takes seconds."""
    from torchvision import datasets  # type: ignore[import-untyped]

    return datasets


def source_of(name: str) -> Source:
    """Return what torchvision knows of a set.

    Args:
        name: A name of `FORMATS`.
    """
    datasets = torchvisions_datasets()
    if name in idx.FOLDERS:
        kind = getattr(datasets, idx.FOLDERS[name])
        folder = Path(idx.FOLDERS[name], "raw")
        return Source(mirrors=kind.mirrors, files=kind.resources, folder=folder)
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    mirror = kind.url.rpartition("/")[0]
    files = [(kind.filename, kind.tgz_md5)]
    return Source(mirrors=[mirror], files=files, folder=Path())


def _is_readable(name: str, data_dir: Path) -> bool:
    if missing(name, data_dir):
        return False
    try:
        FORMATS[name].read(name, data_dir)
    except DataError:
        return False
    return True


def _download(mirrors: Sequence[str], to: Path, md5: str) -> list[str]:
    """Download a file from the first mirror that has it.

    Returns:
        Nothing; if none has it, each address and what was wrong there.
    """
    tried = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{to.name}"
        try:
            with _silence(), _patience():
                _retrieve(url, to)
        except NOT_REACHED as error:
            tried.append(f"{url}: {_reason(error)}")
            continue
        found = torchvisions_datasets().utils.calculate_md5(to)
        if found == md5:
            return []
        with to.open("rb") as stream:
            start = stream.read(100)
        what = "found another file" if start.startswith(GZIP) else beginning(start)
        size = to.stat().st_size
        tried.append(f"{url}: {what}, {size} bytes, md5 {found}, expected {md5}")
    return tried


def _retrieve(url: str, to: Path) -> None:
    """Download a file as torchvision does, which cannot open ``file:``."""
    to.unlink(missing_ok=True)  # from another mirror; torchvision would keep it
    if url.startswith("file:"):
        with urllib.request.urlopen(url) as source, to.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    else:
        torchvisions_datasets().utils.download_url(url, to.parent, to.name)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", "")
    if isinstance(error, urllib.error.HTTPError) or not reason:
        return str(error) or type(error).__name__
    return str(getattr(reason, "strerror", None) or reason)


def _not_to_be_had(
    name: str, data_dir: Path, file: str, tried: Sequence[str]
) -> DataError:
    return DataError(
        f"{name} could not be fetched. Tried\n  "
        + "\n  ".join(tried)
        + "\nFetch it where there is internet, such as on the login node: "
        f"{fetch_command(name, data_dir)}\n"
        f"Or say --mirror URL: the address (http, https, file) of a folder with {file}"
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep torchvision's progress bar out of a batch log."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        yield
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            yield


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Let no server be silent for longer than `TIMEOUT_SECONDS`; torchvision waits."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _move(beside: Path, folder: Path, *, first: str) -> None:
    """Move files to their places, each at once; first the one that has all others."""
    found = [path.relative_to(beside) for path in beside.rglob("*") if path.is_file()]
    for file in sorted(found, key=lambda path: path != Path(first)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(beside / file, folder / file)

"""What every small set must hold, and how one that does not is refused."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpitrain.data.samples import Array, Table
from mpitrain.errors import DataError
from mpitrain.flags import PROGRAM


@dataclass(frozen=True, kw_only=True)
class Part:
    """The images and labels of one part, and the files that hold them."""

    inputs: Array
    """Images, uint8 `(N, C, H, W)`."""
    labels: Array
    """Classes, int64 `(N,)`."""
    inputs_from: str
    """Where the images come from, for messages."""
    labels_from: str
    """Where the labels come from, for messages."""


def table(train: Part, val: Part, classes: Sequence[str]) -> Table:
    """Make a table of two parts.

    Args:
        train: What the weights are fitted to.
        val: What they are judged by; its images as large as those of `train`.
        classes: Names of the classes, by label.

    Returns:
        The table, of ``train_inputs``, ``train_labels``, ``val_inputs`` and
        ``val_labels``.

    Raises:
        DataError: A part has no samples, labels and images do not fit together, or a
            class has no sample to train on.
    """
    for part in (train, val):
        if not len(part.inputs):
            raise DataError(f"{part.inputs_from}: has no samples")
        check_labels(part.labels, len(part.inputs), len(classes), part.labels_from)
    if val.inputs.shape[1:] != train.inputs.shape[1:]:
        raise DataError(
            f"{val.inputs_from}: images of shape {val.inputs.shape[1:]}, expected "
            f"{train.inputs.shape[1:]} as in {train.inputs_from} (channels, height, "
            "width)"
        )
    counts = np.bincount(train.labels, minlength=len(classes))
    lacking = [
        f"{label} ({name!r})" for label, name in enumerate(classes) if not counts[label]
    ]
    if lacking:
        raise DataError(
            f"{train.labels_from}: there is no sample to train on of class "
            f"{', '.join(lacking)}. Expected some of each of {len(classes)} classes"
        )
    return Table(
        arrays={
            "train_inputs": train.inputs,
            "train_labels": train.labels,
            "val_inputs": val.inputs,
            "val_labels": val.labels,
        },
        classes=tuple(classes),
    )


def check_labels(labels: Array, num_images: int, num_classes: int, where: str) -> None:
    """Make sure that labels fit the images and the classes.

    Args:
        labels: Integers `(N,)`.
        num_images: What N must be.
        num_classes: Labels are 0 to ``num_classes - 1``.
        where: The file they come from, for messages.

    Raises:
        DataError: They do not.
    """
    if len(labels) != num_images:
        raise DataError(
            f"{where}: found {len(labels)} labels, expected {num_images}: one for each "
            "image"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} at sample {wrong[0]}; expected 0 to "
            f"{num_classes - 1}"
        )


def fetch_command(name: str, data_dir: Path) -> str:
    """Return the command that fetches a set.

    >>> fetch_command("mnist", Path("my data"))
    "python -m mpitrain fetch mnist --data-dir 'my data'"
    """
    return f"{PROGRAM} fetch {name} --data-dir {shlex.quote(str(data_dir))}"


@contextlib.contextmanager
def advised(name: str, data_dir: Path) -> Iterator[None]:
    """Say below the error of a set how to fetch it.

    Args:
        name: The data set.
        data_dir: Where it is.

    Raises:
        DataError: What was raised within, with the command.
    """
    try:
        yield
    except (DataError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            place = error.filename or data_dir
            text = f"{place}: cannot be read: {error.strerror or error}"
        raise DataError(
            f"{text}.\nTo fetch it, where there is internet, such as on the login "
            f"node: {fetch_command(name, data_dir)}"
        ) from None


def not_there(
    name: str, data_dir: Path, files: Sequence[str], lacking: Mapping[Path, list[str]]
) -> DataError:
    """Return the error for a set that is whole in none of its places.

    Args:
        name: The data set.
        data_dir: Where it should be.
        files: All files of the set.
        lacking: Those that each place lacks.
    """
    if not data_dir.is_dir():
        return DataError(f"{name} is not in {data_dir}: there is no folder {data_dir}")
    some = [place for place in lacking if len(lacking[place]) < len(files)]
    none = [str(place) for place in lacking if place not in some]
    found = [f"no {', '.join(lacking[place])} in {place}" for place in some]
    if none:
        what = "its files" if some else ", ".join(files)
        found.append(f"none of {what} in {' or '.join(none)}")
    return DataError(f"{name} is not in {data_dir}: found {'; '.join(found)}")


def beginning(raw: bytes) -> str:
    r"""Describe how a file begins that is not what it should be.

    >>> beginning(b"<html>")
    "found a file that begins with b'<html>' (a web page, it seems)"
    """
    if not raw:
        return "found an empty file"
    page = " (a web page, it seems)" if raw.lstrip().startswith(b"<") else ""
    return f"found a file that begins with {raw[:16]!r}{page}"

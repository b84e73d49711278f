"""Pickles of numpy arrays, read without running what they ask for.

A pickle is a program: ``pickle.load`` runs whatever function it names. Here it gets
only stand-ins that note what numpy would be told; the arrays are made from those notes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Literal

import numpy as np

from mpitrain.data.samples import Array
from mpitrain.data.tables import beginning
from mpitrain.errors import DataError


class NotedDtype:
    """Stands for a numpy dtype."""

    def __init__(self, kind: object, *_: object) -> None:
        self.kind = kind

    def __setstate__(self, state: object) -> None:
        """Take no notice: byte order and the like, none for single bytes."""


class NotedArray:
    """Stands for a numpy array: what numpy would make it from."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        """Note it."""
        self.state = state

    def __str__(self) -> str:
        match self.state:
            case (_, shape, NotedDtype(kind=kind), *_):
                return f"an array of {_text(kind):.20} and shape {shape!r:.80}"
        return "an array without content"


def encode(text: object, encoding: object = "latin1") -> bytes:
    """Return the bytes that Python 3 wrote as text, for readers of old protocols."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"encodes by {encoding!r}, expected 'latin1'")
    return text.encode("latin1")


ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): NotedArray,
    ("numpy._core.multiarray", "_reconstruct"): NotedArray,
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): NotedDtype,
    ("_codecs", "encode"): encode,
}
"""All that pickles of arrays ask for, and what they get."""


class Forbidden(pickle.UnpicklingError):
    """A pickle asks for something that no array needs."""


class Unpickler(pickle.Unpickler):
    """Reads pickles of arrays, lists, dictionaries, numbers and text; nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for what a pickle asks for."""
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise Forbidden(f"{module}.{name}") from None


def load(raw: bytes, where: str) -> dict[str, Any]:
    """Read a pickled dictionary, of Python 2 or 3.

    Args:
        raw: The file's content.
        where: The file's name, for messages.

    Returns:
        Its values by name; bytes for what was Python 2's text, `NotedArray` for arrays.

    Raises:
        DataError: It is no such pickle, not whole, or asks for anything else to be run.
    """
    stream = io.BytesIO(raw)
    try:
        loaded = Unpickler(stream, encoding="bytes").load()
    except Forbidden as error:
        raise DataError(
            f"{where}: the pickle asks for {error}, which no array needs; it was not "
            "run. Do not trust the file"
        ) from None
    # A broken pickle may raise anything, says the manual of `pickle`.
    except Exception as error:
        if not raw or raw.lstrip().startswith(b"<"):
            raise DataError(f"{where}: expected a pickle, {beginning(raw)}") from None
        if isinstance(error, EOFError) or "truncated" in str(error):
            raise DataError(
                f"{where}: found {len(raw)} bytes, ends in the middle of its pickle"
            ) from None
        raise DataError(f"{where}: no pickle that can be read: {error}") from None
    left = len(raw) - stream.tell()
    if left:
        raise DataError(f"{where}: {left} bytes too many after its pickle")
    if not isinstance(loaded, dict):
        raise DataError(f"{where}: expected a dictionary, found {_kind(loaded)}")
    return {_text(key): value for key, value in loaded.items()}


def _text(name: object) -> str:
    return name.decode("latin1") if isinstance(name, bytes) else str(name)


def bytes_array(noted: object, num_columns: int, where: str) -> Array:
    """Make an array from what a pickle told about it.

    Args:
        noted: A value that `load` returned.
        num_columns: What its second dimension must be.
        where: The file's name and what it is there, for messages.

    Returns:
        A uint8 array `(N, num_columns)`.

    Raises:
        DataError: It is none.
    """
    wanted = f"expected a uint8 array of shape (N, {num_columns})"
    match noted.state if isinstance(noted, NotedArray) else None:
        case (
            _,
            (int(rows), int(columns)),
            NotedDtype(kind="u1" | b"u1"),
            is_fortran,
            bytes(raw),
        ) if columns == num_columns:
            pass
        case _:
            found = str(noted) if isinstance(noted, NotedArray) else _kind(noted)
            raise DataError(f"{where}: {wanted}, found {found}")
    if len(raw) != rows * columns:
        raise DataError(
            f"{where}: found {len(raw)} bytes, expected {rows * columns} for an array "
            f"of shape {(rows, columns)}"
        )
    order: Literal["F", "C"] = "F" if is_fortran else "C"
    return np.frombuffer(raw, np.uint8).reshape((int(rows), columns), order=order)


def _kind(value: object) -> str:
    return type(value).__name__

"""One HDF5 file: groups train and val, maybe test, each with `images` and `labels`.

The file is opened without a lock: network file systems often have none to give, and
readers need none. Nor SWMR, which is for files that are written meanwhile.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mpitrain.data.classes import name_classes
from mpitrain.data.images import Uniform, cut, decode
from mpitrain.data.samples import MOST_BYTES, PARTS, Array, BadSample, Table
from mpitrain.data.tables import check_labels
from mpitrain.errors import DataError, UsageError

ENCODED = "encoded"
"""The layout of images that are files, such as JPEG, each as its bytes."""

LAYOUTS = (
    "uint8 (N, H, W), (N, H, W, C) with C up to 4, or (N, C, H, W) with C less than H "
    "and W; or N encoded images as uint8 of variable length, or opaque"
)


class HDF5Reader:
    """Reads the samples of one part.

    A file that was opened before a fork is closed and opened anew: the two processes
    would go on with copies of one library's notes about it.

    Args:
        path: The file.
        part: The group.
        layout: ``"NHW"``, ``"NHWC"``, ``"NCHW"`` or ``"encoded"``.
        labels: int64 `(N,)`.
        image_size: Height and width of what is read, in pixels.
    """

    def __init__(
        self,
        path: Path,
        part: str,
        layout: str,
        labels: npt.NDArray[np.int64],
        image_size: int,
    ) -> None:
        self.path = path
        self.part = part
        self.layout = layout
        self.labels = labels
        self.image_size = image_size
        self._file: Any = None
        self._images: Any = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_images": None}  # files do not travel

    def close(self) -> None:
        """Close the file; the next `read` opens it."""
        if self._file is not None:
            self._file.close()
        self._file = self._images = None

    def where(self, index: int) -> str:
        """Return the file of a sample, and its place there."""
        return f"{self.path}, {self.part}/images[{index}]"

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(C, image_size, image_size)` and its label.

        Raises:
            BadSample: It cannot be read, or is encoded and no image.
        """
        try:
            stored = self._open()[index]
        except (OSError, KeyError, ValueError) as error:
            raise BadSample(self.where(index), str(error)) from error
        return self._pixels(stored, index, uniform), int(self.labels[index])

    def _pixels(self, stored: Any, index: int, uniform: Uniform | None) -> Tensor:
        """Return a stored image as a tensor of the wanted size."""
        if self.layout == ENCODED:
            return decode(stored.tobytes(), self.image_size, uniform, self.where(index))
        if self.layout == "NHW":
            stored = stored[None]
        elif self.layout == "NHWC":
            stored = stored.transpose(2, 0, 1)
        return cut(stored, self.image_size, uniform)

    def _open(self) -> Any:
        """Return the data set of images, opened in this process."""
        if self._pid != os.getpid():
            self.close()
            self._pid = os.getpid()
        if self._images is None:
            self._file = _h5py().File(self.path, "r", locking=False)
            self._images = self._file[f"{self.part}/images"]
        return self._images


def scan(data_dir: Path) -> Table:
    """Read the labels of all parts, and what their images are.

    Args:
        data_dir: The file, or a folder with one, named .h5 or .hdf5.

    Returns:
        The labels. Among the facts are ``channels``, and ``size``: height and width in
        pixels where all images have the same and are square, else ``None``.

    Raises:
        DataError: There is no such file, or it holds something else.
        UsageError: h5py is not installed.
    """
    h5py = _h5py()
    path = _find(data_dir)
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        if not isinstance(error, PermissionError) and not h5py.is_hdf5(path):
            raise DataError(
                f"{path}: no HDF5 file, {path.stat().st_size} bytes"
            ) from error
        raise DataError(
            f"{path}: cannot be opened, {error}. If it is truncated, copy it anew."
        ) from error
    with file:
        try:
            return _read_table(h5py, path, file)
        except OSError as error:
            raise DataError(f"{path}: broken, {error}. Copy it anew.") from error


def readers(data_dir: Path, table: Table, image_size: int) -> dict[str, HDF5Reader]:
    """Return a reader for each part.

    Args:
        data_dir: As given to `scan`.
        table: What `scan` returned, on any rank.
        image_size: Height and width of what is read, in pixels; images that have it are
            left as they are.

    Raises:
        UsageError: h5py is not installed.
    """
    _h5py()
    name = table.facts["file"]
    path = data_dir / name if data_dir.is_dir() else data_dir
    return {
        part: HDF5Reader(path, part, layout, table.arrays[f"{part}_labels"], image_size)
        for part, layout in table.facts["layouts"].items()
    }


def _h5py() -> Any:
    """Import h5py, which not everybody has."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise UsageError(
            f"--data hdf5 needs h5py ({error}): pip install 'mpitrain[hdf5]'"
        ) from error


def _find(data_dir: Path) -> Path:
    """Return the one file that is meant."""
    if data_dir.is_file():
        return data_dir
    if not data_dir.is_dir():
        raise DataError(
            f"{data_dir}: no such file or folder. Expected an HDF5 file, or a folder "
            "with one: --data-dir FILE"
        )
    found = sorted(
        path
        for path in data_dir.iterdir()
        if path.suffix in (".h5", ".hdf5") and not path.name.startswith(".")
    )
    if len(found) != 1:
        names = ", ".join(repr(path.name) for path in found)
        raise DataError(
            f"{data_dir}: expected one file *.h5 or *.hdf5, found {names or 'none'}. "
            "Name the file: --data-dir FILE"
        )
    return found[0]


def _read_table(h5py: Any, path: Path, file: Any) -> Table:
    """Read all but the images."""
    arrays: dict[str, Array] = {}
    layouts: dict[str, str] = {}
    shapes: dict[str, tuple[int, int, int]] = {}
    classes: tuple[str, ...] = ()
    for part in PARTS:
        if part == "test" and file.get(part, getlink=True) is None:
            continue
        images, labels = _data_sets(h5py, path, file, part)
        where = f"{path}, {part}/labels"
        if labels.size is not None and labels.size > path.stat().st_size:
            raise DataError(
                f"{where}: says {labels.size} labels, in a file of "
                f"{path.stat().st_size} bytes"
            )
        arrays[f"{part}_labels"] = _labels(labels, where)
        layouts[part], shapes[part] = _layout(h5py, images, f"{path}, {part}/images")
        if part == "train":
            names = _class_names((file, labels), path)
            classes = name_classes(arrays["train_labels"], names, where)
        check_labels(arrays[f"{part}_labels"], len(images), len(classes), where)
        if shapes[part][0] != shapes["train"][0]:
            raise DataError(
                f"{path}, {part}/images: {shapes[part][0]} channels, expected "
                f"{shapes['train'][0]} as in train"
            )
    channels, height, width = shapes["train"]
    alike = len(set(shapes.values())) == 1 and height == width and height > 0
    facts = {
        "file": path.name,
        "layouts": layouts,
        "channels": channels,
        "size": height if alike else None,
    }
    return Table(arrays=arrays, classes=classes, facts=facts)


def _data_sets(h5py: Any, path: Path, file: Any, part: str) -> tuple[Any, Any]:
    """Return the data sets of the images and labels of one part, unread."""
    group = _own(h5py, path, file, part)
    if not isinstance(group, h5py.Group):
        raise DataError(
            f"{path}: no group {part!r}. Expected train and val, maybe test, each "
            f"with images and labels; found {_names(file)}"
        )
    for name in ("images", "labels"):
        if not isinstance(_own(h5py, path, group, name), h5py.Dataset):
            raise DataError(
                f"{path}, {part}: no data set {name!r}. Expected images and labels; "
                f"found {_names(group)}"
            )
    return group["images"], group["labels"]


def _own(h5py: Any, path: Path, group: Any, name: str) -> Any:
    """Return a member of a group that lies in this file; ``None`` if there is none.

    Raises:
        DataError: It would be read from other files.
    """
    link = group.get(name, getlink=True)
    found = group.get(name) if isinstance(link, h5py.HardLink) else None
    if (
        (link is not None and found is None)
        or getattr(found, "external", None)
        or getattr(found, "is_virtual", False)
    ):
        raise DataError(
            f"{path}, {group.name}: {name!r} lies in another file or behind a link; "
            "expected it in this file itself"
        )
    return found


def _names(group: Any) -> str:
    return ", ".join(map(repr, group)) or "nothing"


def _labels(labels: Any, where: str) -> npt.NDArray[np.int64]:
    """Read the labels of one part."""
    if labels.dtype.kind not in "iu":
        raise DataError(f"{where}: {labels.dtype}, expected integers from 0")
    if labels.ndim != 1:
        expected = (labels.shape or (1,))[:1]
        raise DataError(f"{where}: shape {labels.shape}, expected {expected}")
    if not len(labels):
        raise DataError(f"{where}: no samples, expected one at least")
    found: npt.NDArray[np.int64] = labels[()].astype(np.int64)
    return found


def _layout(h5py: Any, images: Any, where: str) -> tuple[str, tuple[int, int, int]]:
    """Return how images are stored, and (C, H, W); encoded ones are (3, 0, 0)."""
    found = f"{images.dtype} of shape {images.shape}"
    opaque = images.dtype.kind == "V" and images.dtype.names is None
    if images.ndim == 1 and (opaque or h5py.check_vlen_dtype(images.dtype) == np.uint8):
        return ENCODED, (3, 0, 0)
    if images.dtype != np.uint8:
        hint = ""
        if images.dtype.kind == "f":
            hint = ". From 0 to 1: (images * 255).round().astype('uint8')"
        raise DataError(f"{where}: {found}, expected {LAYOUTS}{hint}")
    shape = images.shape or ()
    if shape and math.prod(shape) and math.prod(shape[1:]) <= MOST_BYTES:
        if len(shape) == 3:
            return "NHW", (1, *shape[1:])
        if len(shape) == 4 and shape[3] <= 4:
            return "NHWC", (shape[3], *shape[1:3])
        if len(shape) == 4 and shape[1] < min(shape[2:]):
            return "NCHW", shape[1:]
    raise DataError(f"{where}: {found}, expected {LAYOUTS}")


def _class_names(holders: tuple[Any, ...], path: Path) -> tuple[str, ...] | None:
    """Return the attribute `classes` of the first that has it."""
    for holder in holders:
        attributes: Mapping[str, Any] = holder.attrs
        if "classes" in attributes:
            found = attributes["classes"]
            names = found.tolist() if isinstance(found, np.ndarray) else found
            if not (
                isinstance(names, list)
                and names
                and all(isinstance(name, str | bytes) for name in names)
            ):
                raise DataError(
                    f"{path}, attribute classes: {found!r}, expected a list of strings"
                )
            return tuple(n.decode() if isinstance(n, bytes) else n for n in names)
    return None

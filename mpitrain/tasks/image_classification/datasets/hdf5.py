"""One HDF5 file: groups train and val, maybe test, each with `images` and `labels`.

The file is opened without a lock, which network file systems often do not have.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpitrain.data.samples import PARTS, Array, BadSample
from mpitrain.errors import DataError
from mpitrain.plugins import require
from mpitrain.tasks.image_classification.datasets.images import Uniform, crop, decode
from mpitrain.tasks.image_classification.datasets.index import (
    MAX_BYTES,
    FileIndex,
    ImageReader,
    check_labels,
    name_classes,
)

ENCODED = "encoded"  # the layout of images that are files, such as JPEG, as bytes

LAYOUTS = (
    "uint8 (N, H, W), (N, H, W, C) with C up to 4, or (N, C, H, W) with C less than H "
    "and W; or N encoded images as uint8 of variable length, or opaque"
)


class HDF5Reader(ImageReader):
    """Reads the samples of one part."""

    def set_up(self, index: FileIndex) -> None:
        """Take the file and its layout from the index."""
        _h5py()
        _open_images.cache_clear()  # the file may have changed since the last scan
        self.path = self.data_dir
        if self.path.is_dir():
            self.path /= index.facts["file"]
        self.layout = index.facts["layouts"][self.part]

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(C, image_size, image_size)` and its label."""
        where = f"{self.path}, {self.part}/images[{index}]"
        label = int(self.labels[index])
        try:
            stored = _open_images(self.path, self.part)[index]
        except (OSError, KeyError, ValueError) as error:
            hint = "; try pip install hdf5plugin" * ("plugin" in str(error))
            raise BadSample(where, f"{error}{hint}") from error
        if self.layout == ENCODED:
            return decode(stored.tobytes(), self.image_size, uniform, where), label
        if self.layout == "NHW":
            stored = stored[None]
        elif self.layout == "NHWC":
            stored = stored.transpose(2, 0, 1)
        return crop(stored, self.image_size, uniform), label


@functools.lru_cache(maxsize=len(PARTS))
def _open_images(path: Path, part: str) -> Any:
    return _h5py().File(path, "r", locking=False)[f"{part}/images"]


# A file that is open across a fork would share state with the parent process.
os.register_at_fork(after_in_child=_open_images.cache_clear)


def scan(data_dir: Path) -> FileIndex:
    """Read the labels of all parts, and the layout of their images.

    `data_dir` is the file, or a folder with one, named .h5 or .hdf5. The fact ``size``
    is height and width in pixels if all images have the same and are square.
    """
    path = _find(data_dir)
    try:
        with _h5py().File(path, "r", locking=False) as file:
            return _build_index(path, file)
    except OSError as error:
        # HDF5 marks a file that is open for writing, until it is closed.
        is_open = "h5clear" in str(error)
        cure = f"no program writes it any more: h5clear -s {path}"
        raise DataError(
            f"{path}: cannot be read as HDF5, {error}. If "
            f"{cure if is_open else 'it is truncated, copy it anew'}"
        ) from error


def _h5py() -> Any:
    require("h5py", "--data hdf5", "'mpitrain[hdf5]'")
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # registers filters: blosc, zstd
    return importlib.import_module("h5py")


def _find(data_dir: Path) -> Path:
    if data_dir.is_file():
        return data_dir
    found = sorted([*data_dir.glob("[!.]*.h5"), *data_dir.glob("[!.]*.hdf5")])
    if len(found) != 1:
        names = ", ".join(repr(path.name) for path in found)
        raise DataError(
            f"{data_dir}: expected one file *.h5 or *.hdf5, found {names or 'none'}. "
            "Name the file: --data-dir FILE"
        )
    return found[0]


def _build_index(path: Path, file: Any) -> FileIndex:
    h5py = _h5py()
    arrays: dict[str, Array] = {}
    layouts: dict[str, str] = {}
    shapes: dict[str, tuple[int, int, int]] = {}
    classes: tuple[str, ...] = ()
    for part in PARTS:
        if part == "test" and part not in file:
            continue
        group = _member(path, file, part, h5py.Group)
        images = _member(path, group, "images", h5py.Dataset)
        labels = _member(path, group, "labels", h5py.Dataset)
        where = f"{path}, {part}/labels"
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels):
            raise DataError(
                f"{where}: {labels.dtype} of shape {labels.shape}, expected integers "
                "of shape (N,)"
            )
        layouts[part], shapes[part] = _layout(h5py, images, f"{path}, {part}/images")
        names = _class_names(path, file.attrs, labels.attrs) if not classes else None
        labels = arrays[f"{part}_labels"] = np.asarray(labels[()], np.int64)
        classes = classes or name_classes(labels, names, where)
        check_labels(labels, len(images), len(classes), where)
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
    return FileIndex(arrays=arrays, classes=classes, facts=facts)


def _member(path: Path, group: Any, name: str, kind: type) -> Any:
    """Return a member that lies in this file itself; links would read other files."""
    link = group.get(name, getlink=True)
    found = group[name] if isinstance(link, _h5py().HardLink) else None
    elsewhere = getattr(found, "external", None) or getattr(found, "is_virtual", False)
    if not isinstance(found, kind) or elsewhere:
        names = ", ".join(map(repr, group)) or "nothing"
        found = None  # a virtual one, alive in the traceback, crashes HDF5 at exit
        raise DataError(
            f"{path}, {group.name}: no {kind.__name__.lower()} {name!r} in this file "
            f"itself, found {names}. Expected groups train and val, maybe test, each "
            "with images and labels, and no links"
        )
    return found


def _layout(h5py: Any, images: Any, where: str) -> tuple[str, tuple[int, int, int]]:
    """Return how images are stored, and (C, H, W); encoded ones are (3, 0, 0)."""
    opaque = images.dtype.kind == "V" and images.dtype.names is None
    if images.ndim == 1 and (opaque or h5py.check_vlen_dtype(images.dtype) == np.uint8):
        return ENCODED, (3, 0, 0)
    shape: Any = images.shape or ()
    if images.dtype == np.uint8 and 0 < math.prod(shape[1:]) <= MAX_BYTES:
        if len(shape) == 3:
            return "NHW", (1, *shape[1:])
        if len(shape) == 4 and shape[3] <= 4:
            return "NHWC", (shape[3], *shape[1:3])
        if len(shape) == 4 and shape[1] < min(shape[2:]):
            return "NCHW", shape[1:]
    raise DataError(
        f"{where}: {images.dtype} of shape {images.shape}, expected {LAYOUTS}. Floats "
        "from 0 to 1: (images * 255).round().astype('uint8')"
    )


def _class_names(path: Path, *places: Any) -> tuple[str, ...] | None:
    """Return the names in the attribute `classes` of the first place that has it."""
    for attributes in places:
        if "classes" in attributes:
            found = np.asarray(attributes["classes"])
            if found.ndim == 1 and found.dtype.kind in "OSU":
                try:
                    names = [
                        name.decode() if isinstance(name, bytes) else str(name)
                        for name in found.tolist()
                    ]
                    "".join(names).encode()  # h5py reads other bytes as surrogates
                except UnicodeError:
                    raise DataError(
                        f"{path}, attribute classes: {found!r:.100}, expected names "
                        "in UTF-8"
                    ) from None
                return tuple(names)
            raise DataError(
                f"{path}, attribute classes: {found!r:.100}, expected a list of strings"
            )
    return None

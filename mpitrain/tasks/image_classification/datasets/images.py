"""Images from bytes to a tensor of one size, by Pillow.

Every crop is one `resize` with a box: what is outside is not computed.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mpitrain.data.samples import BadSample

Uniform = npt.NDArray[np.float64]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels, fractions allowed."""

EXTENSIONS = frozenset(
    ("bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")
)
"""Extensions of image files, in lower case."""

RESIZE_RATIO = 256 / 224  # of resize to crop in evaluation, as in torchvision
MIN_AREA = 0.08  # smallest fraction of an image's area that a random crop shows


def decode(data: bytes, size: int, uniform: Uniform | None, where: str) -> Tensor:
    """Decode an image and crop it to a square.

    Gray, palette, CMYK and transparent images become RGB uint8 `(3, size, size)`, and
    the orientation in EXIF is ignored, as in torchvision. A JPEG is decoded at a
    reduced scale if that still leaves a pixel for each of the result. `uniform` chooses
    the crop, see `crop_box`; `where` is the file and the place in it, for `BadSample`.
    """
    if not data:
        raise BadSample(where, "empty, 0 bytes")
    if data.startswith(b"\xff\xd8"):  # JPEG: libjpeg would take zeros at the end for
        data = data.rstrip(b"\0")  # pixels, but they are padding or lost data
    try:
        opened = Image.open(io.BytesIO(data))
        box = crop_box(*opened.size, size, uniform)
        scale = _reduce(opened, box, size)
        image = _rgb(opened)
    except UnidentifiedImageError as error:
        reason = f"not an image to Pillow {PIL.__version__}, {len(data)} bytes"
        raise BadSample(where, reason) from error
    except Exception as error:  # its parsers raise whatever they run into
        reason = f"cannot be decoded, {type(error).__name__}: {error}"
        raise BadSample(where, reason) from error
    pixels = _resize(image, size, box, scale).transpose(2, 0, 1)
    # A copy: Pillow's memory is read-only, and torch warns of that.
    return torch.from_numpy(np.array(pixels, order="C"))


def crop(array: npt.NDArray[np.uint8], size: int, uniform: Uniform | None) -> Tensor:
    """Crop a decoded image `(C, H, W)` to `(C, size, size)`, as `decode` does; copy."""
    _, height, width = array.shape
    box = crop_box(width, height, size, uniform)
    if uniform is None and width == height == size:
        return torch.from_numpy(np.array(array, order="C"))
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in array]
    return torch.from_numpy(np.stack([_resize(p, size, box) for p in planes]))


def crop_box(width: int, height: int, size: int, uniform: Uniform | None) -> Box:
    """Return the part of an image that is resized to `size` by `size` pixels.

    Without `uniform`: torchvision's evaluation, the shorter side resized to 256/224 of
    `size`, then a center crop. An image that has the size already is kept whole.

    With `uniform`, float64 `(4,)` from 0 to 1: a random resized crop, area from 0.08 to
    1 of the image's, width over height from 3/4 to 4/3, then place from top and from
    left. One that does not fit shrinks until it does, at the same ratio.
    """
    if uniform is not None:
        return _random_box(width, height, uniform)
    if width == height == size:
        return 0, 0, width, height
    short, long = min(width, height), max(width, height)
    shorter = round(size * RESIZE_RATIO)
    longer = int(shorter * long / short)
    wide, high = (shorter, longer) if width <= height else (longer, shorter)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    x, y = width / wide, height / high
    return left * x, top * y, (left + size) * x, (top + size) * y


def _random_box(width: int, height: int, uniform: Uniform) -> Box:
    area, log_ratio, from_top, from_left = (float(number) for number in uniform)
    pixels = width * height * (MIN_AREA + (1 - MIN_AREA) * area)
    ratio = (3 / 4) ** (1 - 2 * log_ratio)
    wide, high = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    fit = min(1.0, width / wide, height / high)
    wide, high = wide * fit, high * fit
    left, top = (width - wide) * from_left, (height - high) * from_top
    # Rounding may exceed an edge by the last bit, which Pillow refuses.
    return (
        max(left, 0.0),
        max(top, 0.0),
        min(left + wide, float(width)),
        min(top + high, float(height)),
    )


def _reduce(image: Image.Image, box: Box, size: int) -> float:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8, if the box has `size` pixels then, too.

    Returns the file's pixels per decoded pixel.
    """
    width, height = image.size
    left, top, right, bottom = box
    wanted = (
        math.ceil(width * size / (right - left)),
        math.ceil(height * size / (bottom - top)),
    )
    reduced = image.draft(None, wanted)  # None: not a JPEG
    return width / reduced[1][2] if reduced else 1.0


def _rgb(image: Image.Image) -> Image.Image:
    sixteen_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    # convert() would clip 16 bits at 255.
    if image.mode.startswith("I;16") or sixteen_bits:
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode!r}, expected 8 or 16 bits per channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")  # would copy it


def _resize(
    image: Image.Image, size: int, box: Box, scale: float = 1.0
) -> npt.NDArray[Any]:
    """Resize a part of an image, bilinear with antialias.

    `box` is of the image in the file, which has `scale` pixels per pixel of `image`.
    """
    left, top, right, bottom = (edge / scale for edge in box)
    inside = (left, top, min(right, image.width), min(bottom, image.height))
    resized = image.resize((size, size), Image.Resampling.BILINEAR, inside)
    return np.asarray(resized)

"""Image transforms on whole batches, on the device.

What is random is random for each sample, and chosen by its number (`randomness`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpitrain.data.randomness import uniform
from mpitrain.data.sharding import Indices

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

NUM_DIMENSIONS = 4  # of a batch of images

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation by channel, in the range 0 to 1."""

SCALED: Statistics = ((0.0,), (1.0,))  # of any channels: bytes become 0 to 1

LARGE_PIXELS = 64 * 64  # from here on a call of NumPy for each image costs little

ROUNDING = 1e-2  # how far 16-bit floats may be outside the range of pixels


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """Crops, flips, normalizes and resizes a batch of images `(N, C, H, W)`.

    With `mean` and `std`, bytes are scaled to the range 0 to 1 and normalized. Of other
    inputs, floats are converted to `dtype`, and the rest stays as it is.
    """

    dtype: torch.dtype  # floating-point type of the model's inputs
    seed: int  # the run's seed
    mean: tuple[float, ...] = ()
    """Per channel, in the range 0 to 1; empty: the inputs are no images of bytes."""
    std: tuple[float, ...] = ()  # per channel
    size: int | None = None  # height and width to resize to; ``None``: do not resize
    border: int = 0
    """Black pixels around, from which an image of the old size is cropped at random."""
    flip: bool = False  # whether half of the images are flipped left to right
    channels_last: bool = False
    """Whether memory holds the channels of a pixel side by side."""

    def deterministic(self) -> ImageTransform:
        """Return the same without anything random, for evaluation."""
        return replace(self, border=0, flip=False)

    @property
    def is_deterministic(self) -> bool:
        """Whether nothing is random."""
        return not (self.border or self.flip)

    def __call__(self, inputs: Tensor, indices: Indices, epoch: int) -> Tensor:
        """Transform a batch `(N, ...)` on its device; `indices` are int64 `(N,)`."""
        if inputs.ndim != NUM_DIMENSIONS:
            return inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        if self._is_for_one_thread(inputs):
            images = self._flip_and_normalize(inputs, indices, epoch)
        else:
            images = self._normalize(self._augment(inputs, indices, epoch))
        if self.size is not None and images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(
                images, (self.size, self.size), mode="bilinear", antialias=True
            )
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def _is_for_one_thread(self, images: Tensor) -> bool:
        """Whether these are large images of bytes on the CPU, without a border."""
        is_large = images.shape[-2] * images.shape[-1] >= LARGE_PIXELS
        is_bytes = images.dtype == torch.uint8 and images.device.type == "cpu"
        is_float = self.dtype in (torch.float32, torch.float64)
        has_channels = len(self.mean) > 1
        return is_large and is_bytes and is_float and has_channels and not self.border

    def _flip_and_normalize(
        self, images: Tensor, indices: Indices, epoch: int
    ) -> Tensor:
        """Do the same as `_augment` and `_normalize`, to the bit, by NumPy."""
        # One thread, an image at a time: torch's threads would wait for cores that the
        # data workers have. NumPy asks for huge pages, so its new memory costs less.
        mean, std = (
            _per_channel(values, self.dtype, images.device)[0].numpy()
            for values in (self.mean, self.std)
        )
        is_flipped = np.zeros(len(images), bool)
        if self.flip and len(images):
            is_flipped = uniform(self.seed, epoch, indices, 3, "pixels")[:, 2] < 0.5
        result = np.empty(images.shape, mean.dtype)
        for image, out, flip in zip(images.numpy(), result, is_flipped, strict=True):
            shown = image[..., ::-1] if flip else image
            np.subtract(shown, mean, out=out, dtype=mean.dtype)
            np.divide(out, std, out=out)
        return torch.from_numpy(result)

    def _augment(self, images: Tensor, indices: Indices, epoch: int) -> Tensor:
        """Flip and crop: a gather of rows, many times as fast as one of pixels."""
        if self.is_deterministic or not len(images):
            return images
        numbers = uniform(self.seed, epoch, indices, 3, "pixels")
        num, border, size = len(images), self.border, images.shape[-2:]
        if border:
            images = F.pad(images, (border,) * 4)
        sources = np.arange(num)
        corners = np.floor(numbers[:, :2] * (2 * border + 1)).astype(np.int64)
        if self.flip:
            flipped = np.flatnonzero(numbers[:, 2] < 0.5)
            chosen = images.index_select(0, _like(flipped, images))
            images = torch.cat([images, chosen.flip(-1)])
            sources[flipped] = num + np.arange(len(flipped))
            # The corner was drawn in the image before the flip.
            corners[flipped, 1] = 2 * border - corners[flipped, 1]
        if not border:
            return images.index_select(0, _like(sources, images))
        return _crop(images, sources, corners, size)

    def _normalize(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8 or not len(self.mean):
            return images.to(self.dtype) if images.is_floating_point() else images
        if len(self.mean) == 1:
            scale = 1 / (255 * self.std[0])
            shift = -self.mean[0] / self.std[0]
            return images.to(self.dtype).mul_(scale).add_(shift)
        scaled = images.to(self.dtype)
        mean, std = (
            _per_channel(values, self.dtype, images.device)
            for values in (self.mean, self.std)
        )
        return scaled.sub_(mean).div_(std)


def _crop(
    images: Tensor, sources: Indices, corners: Indices, size: Sequence[int]
) -> Tensor:
    """Crop windows of `size` (height, width) out of images `(M, C, H, W)`.

    `sources` says which image each window is of, int64 `(N,)`; `corners` the row and
    column of its first pixel, int64 `(N, 2)`.
    """
    height, width = size
    _, channels, high, wide = images.shape
    # A row of a window is so many neighbours in memory, from anywhere on.
    flat = images.contiguous().view(-1)
    runs = flat.as_strided((len(flat) - width + 1, width), (1, 1))
    first = (sources * channels * high + corners[:, 0]) * wide + corners[:, 1]
    inner = (np.arange(channels)[:, np.newaxis] * high + np.arange(height)) * wide
    starts = _like(first, images)[:, None] + _like(inner.reshape(-1), images)
    cut = runs.index_select(0, starts.view(-1))
    return cut.view(len(sources), channels, height, width)


def _like(indices: Indices, images: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(images.device, non_blocking=True)


@functools.lru_cache(maxsize=8)
def _per_channel(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return 255 times each value, `(1, C, 1, 1)`; cached on the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1) * 255


def imagenet_statistics(channels: int) -> Statistics:
    """Return ImageNet's mean and deviation; their means if there are not 3 channels."""
    if channels == len(IMAGENET_MEAN):
        return IMAGENET_MEAN, IMAGENET_STD
    mean, std = (sum(of) / len(of) for of in (IMAGENET_MEAN, IMAGENET_STD))
    return (mean,) * channels, (std,) * channels


def to_uint8(images: Tensor, statistics: Statistics | None) -> Tensor:
    """Return images to look at, uint8 `(N, H, W, C)` on the CPU, from model inputs.

    The normalization by `statistics` is undone. If pixels are outside of the range 0 to
    1 nevertheless, the smallest value becomes black, the largest white.
    """
    shown = images.detach().cpu().permute(0, 2, 3, 1)
    if shown.dtype == torch.uint8:
        return shown
    shown = shown.float()
    if statistics is not None:
        mean, std = (torch.tensor(values) for values in statistics)
        shown = shown * std + mean
    low, high = shown.min(), shown.max()
    if low < -ROUNDING or high > 1 + ROUNDING:
        shown = (shown - low) / (high - low).clamp(min=ROUNDING)
    return shown.nan_to_num().clamp(0, 1).mul(255).round().byte()


def mean_and_std(images: Tensor) -> Statistics:
    """Return mean and standard deviation by channel of images uint8 `(N, C, H, W)`.

    In the range 0 to 1, exact; a channel without contrast has deviation 1.
    """
    means, stds = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256).double()
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = float((counts * values).sum() / counts.sum())
        variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
        means.append(mean)
        stds.append(variance**0.5 if variance > 0 else 1.0)
    return tuple(means), tuple(stds)

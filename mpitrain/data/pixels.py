"""From bytes to what a model sees: whole batches at once, on the device.

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

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation by channel, in the range 0 to 1."""

NUM_DIMENSIONS = 4
"""Of a batch of images."""

ROUNDING = 1e-2
"""How far 16 bits may be from the range of pixels."""

FLIP_SHARE = 0.5
"""Share of the images that are mirrored, where any are."""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """What is done to the images of a batch.

    Images `(N, C, H, W)` are cut, mirrored and resized; those of bytes are brought to
    the range 0 to 1, and then to mean 0 and deviation 1. Other inputs are handed on as
    they are, in the precision asked for.
    """

    dtype: torch.dtype
    """Floating point of what the model sees."""
    seed: int
    """The run's."""
    mean: tuple[float, ...] | None = None
    """Per channel, in the range 0 to 1; ``None`` to leave that range."""
    std: tuple[float, ...] | None = None
    """Per channel."""
    size: int | None = None
    """Height and width to resize to; ``None`` for as they are."""
    border: int = 0
    """Black pixels around, from which an image of the old size is cut at random."""
    flip: bool = False
    """Whether half of the images are mirrored."""
    channels_last: bool = False
    """Whether memory holds the channels of a pixel side by side."""

    def still(self) -> Pixels:
        """Return the same without anything random, for evaluation."""
        return replace(self, border=0, flip=False)

    @property
    def is_still(self) -> bool:
        """Whether nothing is random."""
        return not (self.border or self.flip)

    def __call__(self, inputs: Tensor, indices: Indices, epoch: int) -> Tensor:
        """Prepare a batch where it lies.

        Args:
            inputs: `(N, ...)`.
            indices: The samples' numbers, int64 `(N,)`.
            epoch: The epoch's number.

        Returns:
            `(N, ...)`, floating point in `dtype` where inputs are images or floating
            point.
        """
        if inputs.ndim != NUM_DIMENSIONS:
            return inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        images = self._cut(inputs, indices, epoch)
        images = self._scaled(images)
        if self.size is not None and images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(
                images, (self.size, self.size), mode="bilinear", antialias=True
            )
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def _cut(self, images: Tensor, indices: Indices, epoch: int) -> Tensor:
        """Mirror images and cut them out of their borders, as each one's number says.

        A gather of whole rows: many times as fast as one of pixels.
        """
        if self.is_still or not len(images):
            return images
        numbers = uniform(self.seed, epoch, indices, 3, "pixels")
        num, border, size = len(images), self.border, images.shape[-2:]
        if border:
            images = F.pad(images, (border,) * 4)
        sources = np.arange(num)
        corners = np.floor(numbers[:, :2] * (2 * border + 1)).astype(np.int64)
        if self.flip:
            flipped = np.flatnonzero(numbers[:, 2] < FLIP_SHARE)
            chosen = images.index_select(0, _moved(flipped, images))
            images = torch.cat([images, chosen.flip(-1)])
            sources[flipped] = num + np.arange(len(flipped))
            # The place was drawn in the image as it is.
            corners[flipped, 1] = 2 * border - corners[flipped, 1]
        if not border:
            return images.index_select(0, _moved(sources, images))
        return _windows(images, sources, corners, size)

    def _scaled(self, images: Tensor) -> Tensor:
        if images.dtype != torch.uint8:
            return images.to(self.dtype)
        scale, shift = 1 / 255, 0.0
        if self.mean is None or self.std is None:
            return images.to(self.dtype).mul_(scale)
        if len(self.mean) == 1:
            scale = 1 / (255 * self.std[0])
            shift = -self.mean[0] / self.std[0]
            return images.to(self.dtype).mul_(scale).add_(shift)
        scaled = images.to(self.dtype)
        mean, std = (
            _of_channels(values, self.dtype, images.device)
            for values in (self.mean, self.std)
        )
        return scaled.sub_(mean).div_(std)


def _windows(
    images: Tensor, sources: Indices, corners: Indices, size: Sequence[int]
) -> Tensor:
    """Cut windows out of images.

    Args:
        images: `(M, C, H, W)`.
        sources: Which image each window is cut from, int64 `(N,)`.
        corners: Row and column of each window's first pixel, int64 `(N, 2)`.
        size: Height and width of the windows in pixels.

    Returns:
        `(N, C, height, width)`.

    >>> grid = torch.arange(9).view(1, 1, 3, 3)
    >>> corners = np.array([[0, 1], [1, 0]])
    >>> _windows(grid, np.array([0, 0]), corners, (2, 2)).flatten(1).tolist()
    [[1, 2, 4, 5], [3, 4, 6, 7]]
    """
    height, width = size
    _, channels, high, wide = images.shape
    # A row of a window is so many neighbours in memory, from anywhere on.
    flat = images.contiguous().view(-1)
    runs = flat.as_strided((len(flat) - width + 1, width), (1, 1))
    first = (sources * channels * high + corners[:, 0]) * wide + corners[:, 1]
    inner = (np.arange(channels)[:, np.newaxis] * high + np.arange(height)) * wide
    starts = _moved(first, images)[:, None] + _moved(inner.reshape(-1), images)
    cut = runs.index_select(0, starts.view(-1))
    return cut.view(len(sources), channels, height, width)


def _moved(indices: Indices, images: Tensor) -> Tensor:
    """Bring indices to where the images are."""
    return torch.from_numpy(indices).to(images.device, non_blocking=True)


@functools.lru_cache(maxsize=8)
def _of_channels(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return 255 times a value of each channel, `(1, C, 1, 1)`; kept on the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1) * 255


def of_imagenet(channels: int) -> Statistics:
    """Return ImageNet's mean and deviation, spread over other numbers of channels."""
    if channels == len(IMAGENET_MEAN):
        return IMAGENET_MEAN, IMAGENET_STD
    mean, std = (sum(of) / len(of) for of in (IMAGENET_MEAN, IMAGENET_STD))
    return (mean,) * channels, (std,) * channels


def as_bytes(images: Tensor, statistics: Statistics | None) -> Tensor:
    """Return images for people, from those that a model sees.

    Args:
        images: Floating point or uint8 `(N, C, H, W)`.
        statistics: What was taken off; ``None``: nothing. Where pixels are outside of
            the range 0 to 1 all the same, the least of them becomes black, and the
            greatest white.

    Returns:
        uint8 `(N, H, W, C)`, on the CPU.

    >>> as_bytes(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1), ((0.5,), (0.5,))).flatten()
    tensor([  0, 255], dtype=torch.uint8)
    >>> as_bytes(torch.tensor([-3.0, 1.0]).view(2, 1, 1, 1), None).flatten()
    tensor([  0, 255], dtype=torch.uint8)
    """
    shown = images.detach().cpu().permute(0, 2, 3, 1)
    if shown.dtype == torch.uint8:
        return shown
    shown = shown.float()
    if statistics is not None:
        mean, std = (torch.tensor(values) for values in statistics)
        shown = shown * std + mean
    least, greatest = shown.min(), shown.max()
    if least < -ROUNDING or greatest > 1 + ROUNDING:
        shown = (shown - least) / (greatest - least).clamp(min=ROUNDING)
    return shown.nan_to_num().clamp(0, 1).mul(255).round().byte()


def mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and deviation over a set of images, exactly.

    Args:
        images: uint8 `(N, C, H, W)`.

    Returns:
        In the range 0 to 1; a channel without contrast has deviation 1.

    >>> mean_and_std(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    ((0.5,), (0.5,))
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

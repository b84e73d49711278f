"""Synthetic images, to try a machine or a network without any files."""

from __future__ import annotations

import numpy as np

from mpitrain.data.samples import Array
from mpitrain.errors import UsageError

GRID = 4  # rows and columns of coloured fields in an image
NOISE_DIVISOR = 4  # a quarter of a byte's values is noise; the colours have the others


def make(
    num_samples: int, num_classes: int, image_size: int, seed: int = 0
) -> dict[str, Array]:
    """Make images that a small network can learn: coarse coloured fields, and noise.

    There are `num_samples` training images, and a quarter as many, at least one, to
    validate; the same for one seed on every machine. Arrays are as those of
    `torchvision_sets.read`.
    """
    if num_samples < num_classes:
        raise UsageError(
            f"found {num_samples} samples for {num_classes} classes; expected one of "
            "each: more --synthetic-samples, or fewer --synthetic-classes"
        )
    random = np.random.Generator(np.random.PCG64(seed))
    fields = random.integers(
        0, 256 - 256 // NOISE_DIVISOR, (num_classes, 3, GRID, GRID), dtype=np.uint8
    )
    field_of = np.arange(image_size) * GRID // image_size
    patterns = fields[:, :, field_of][..., field_of]
    arrays: dict[str, Array] = {}
    for part, count in (("train", num_samples), ("val", max(1, num_samples // 4))):
        labels = random.permutation(np.arange(count, dtype=np.int64) % num_classes)
        inputs = patterns[labels]
        # Whole bytes are drawn five times as fast as smaller numbers.
        noise = random.integers(0, 256, inputs.shape, dtype=np.uint8)
        noise //= NOISE_DIVISOR
        inputs += noise
        arrays |= {f"{part}_inputs": inputs, f"{part}_labels": labels}
    return arrays

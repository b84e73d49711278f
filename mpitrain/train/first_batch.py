"""The first images that a training sees, for those who want to look at them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mpitrain.data.pixels import NUM_DIMENSIONS, Statistics, as_bytes
from mpitrain.data.samples import Array
from mpitrain.train.feed import Batch

NUM_IMAGES = 16
"""That are shown."""

CHANNELS = (1, 3)
"""Of what can be shown: grey, or colours."""


def show_images(
    show: Callable[[str, Array], object], statistics: Statistics | None
) -> Callable[[Batch], bool]:
    """Return what looks at batches until it has seen images.

    Args:
        show: Called once, with a name, and images uint8 `(N, H, W, C)`.
        statistics: What is taken off the pixels; ``None``: nothing.
    """

    def look(batch: Batch) -> bool:
        images = batch.inputs
        if not len(batch) or not isinstance(images, Tensor):
            return False
        if images.ndim != NUM_DIMENSIONS or images.shape[1] not in CHANNELS:
            return False
        some = images[: min(len(batch), NUM_IMAGES)]
        show("train/images", as_bytes(some, statistics).numpy())
        return True

    return look

"""Segmentation: a U-Net, cross-entropy and Dice, mean IoU over the whole validation.

mpirun -np 4 --oversubscribe python examples/trainings/segmentation.py
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassJaccardIndex

import mpitrain

NUM_CLASSES = 4  # background and three shapes, one of them rare


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Images `(1, 32, 32)` of shapes, with masks `(32, 32)`; made here."""

    def __init__(self, num: int, seed: int, *, flips: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.flips = flips
        self.masks = np.zeros((num, 32, 32), np.int64)
        y, x = np.mgrid[:32, :32]
        for mask in self.masks:
            for label, probability in ((1, 0.9), (2, 0.7), (3, 0.1)):
                row, column = random.integers(6, 26, 2)
                far, high = abs(x - column), abs(y - row)
                distance = (np.hypot(far, high), np.maximum(far, high), far + high)
                if random.random() < probability:
                    mask[distance[label - 1] < random.integers(3, 7)] = label
        noise = random.normal(0.5, 0.1, self.masks.shape)
        self.images = (noise + 0.3 * self.masks).astype(np.float32)[:, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.from_numpy(self.images[index])
        mask = torch.from_numpy(self.masks[index])
        if self.flips and torch.rand(()) < 0.5:  # seeded for each sample and epoch
            image, mask = image.flip(-1), mask.flip(-1)
        return image, mask


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [block(1, width), block(width, 2 * width), block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](F.max_pool2d(first, 2))
        found = self.down[2](F.max_pool2d(second, 2))
        for up, skip in zip(self.up, (second, first), strict=True):
            found = up(torch.cat([F.interpolate(found, scale_factor=2), skip], 1))
        return self.head(found)


def loss(logits: Tensor, masks: Tensor) -> dict[str, Tensor]:
    """Return losses of each image, `(N,)`: their sum is minimized, all are recorded."""
    found, true = logits.softmax(1), F.one_hot(masks, NUM_CLASSES).movedim(-1, 1)
    overlap, size = (found * true).sum((2, 3)), (found + true).sum((2, 3))
    dice = 1 - ((2 * overlap + 1) / (size + 1)).mean(1)
    entropy = F.cross_entropy(logits, masks, reduction="none").mean((1, 2))
    return {"loss": entropy + dice, "cross_entropy": entropy, "dice": dice}


DEFAULTS = mpitrain.TrainConfig(
    epochs=3, global_batch_size=8, optimizer="adamw", lr=1e-2
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        UNet(),
        Shapes(80, seed=1, flips=True),
        Shapes(37, seed=2),
        config,
        world=world,
        loss=loss,
        metrics={"miou": MulticlassJaccardIndex(NUM_CLASSES)},
    )


if __name__ == "__main__":
    build().fit()

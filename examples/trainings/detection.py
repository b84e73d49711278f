"""Detection: torchvision's Faster R-CNN, boxes of any number, mean average precision.

mpirun -np 4 --oversubscribe python examples/trainings/detection.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import mpitrain

SIZE = 64  # of an image


class Squares(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images with one to three squares of two classes; made here."""

    def __init__(self, num: int, seed: int) -> None:
        self.num, self.seed = num, seed

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        random = torch.Generator().manual_seed(self.seed * 10**6 + index)
        image = 0.1 * torch.rand(3, SIZE, SIZE, generator=random)
        num = int(torch.randint(1, 4, (), generator=random))
        labels = torch.randint(1, 3, (num,), generator=random)
        sizes = torch.randint(12, 24, (num, 1), generator=random)
        corners = torch.randint(0, SIZE - 24, (num, 2), generator=random)
        boxes = torch.cat([corners, corners + sizes], 1)
        for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
            image[label, top:bottom, left:right] = 1.0
        return image, {"boxes": boxes.float(), "labels": labels}


def detector() -> FasterRCNN:
    sizes = ((3, 16), (16, 32), (32, 32))
    body: Any = nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.GroupNorm(4, o), nn.ReLU())
            for i, o in sizes
        )
    )
    body.out_channels = 32
    return FasterRCNN(
        body,
        num_classes=3,
        min_size=SIZE,
        max_size=SIZE,
        rpn_anchor_generator=AnchorGenerator(((12, 18, 24),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2),
        rpn_post_nms_top_n_train=50,
        rpn_post_nms_top_n_test=20,
        box_detections_per_img=10,
    )


def collate(samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detection(mpitrain.Task):
    """The model computes its losses itself: of one image in each micro-batch."""

    def training_step(self, model: Any, batch: mpitrain.Batch) -> dict[str, Tensor]:
        found = model(batch.inputs, batch.targets)
        losses = {name: loss.reshape(1) for name, loss in found.items()}
        return {"loss": sum(losses.values(), torch.zeros(1)), **losses}

    def validation_step(self, model: Any, batch: mpitrain.Batch) -> dict[str, Tensor]:
        found = model(batch.inputs)
        if len(batch):
            self.update_metrics(found, batch.targets)
        return {}


# Anchors are drawn at random: with `bitwise` the same for each micro-batch.
DEFAULTS = mpitrain.TrainConfig(
    epochs=3,
    global_batch_size=8,
    optimizer="adamw",
    lr=3e-3,
    micro_batch_size=1,
    bitwise=True,
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        detector(),
        Squares(64, seed=1),
        Squares(21, seed=2),
        config,
        world=world,
        collate_fn=collate,
        task=Detection(),
        metrics={"map": MeanAveragePrecision()},
    )


if __name__ == "__main__":
    build().fit()

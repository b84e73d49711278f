"""A model of 1,370 weights, so that its checkpoints are small enough to commit."""

from __future__ import annotations

from torch import Tensor, nn


class SmallModel(nn.Module):
    """One convolution and one linear layer, for images of 8x8 pixels."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        side = image_size // 2
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * side**2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class LargeOutputs(SmallModel):
    """Gradients are too large for fp16 at the first loss scales: steps are skipped."""

    def forward(self, images: Tensor) -> Tensor:
        return 100 * super().forward(images)

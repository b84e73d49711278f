"""The default network: without batch norm or dropout, the same at any world size."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: 26 thousand weights on the digits."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1)
        pooled_size = -(-image_size // 2)
        self.hidden = nn.Linear(32 * pooled_size * pooled_size, 40)
        self.head = nn.Linear(40, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(N, C, H, W)` to scores `(N, num_classes)`."""
        x = F.relu(self.conv1(images))
        x = F.relu(self.conv2(x))
        x = F.relu(self.hidden(x.flatten(1)))
        return self.head(x)  # type: ignore[no-any-return]

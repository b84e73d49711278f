"""A custom model: one class, named on the command line.

mpirun -np 4 --oversubscribe python -m mpitrain --model examples.custom_model:TwoLayers
"""

from torch import Tensor, nn


class TwoLayers(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, 128),
            nn.ReLU(),
            nn.Linear(128, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

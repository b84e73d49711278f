"""The CNN for MNIST of PyTorch's own examples: dropout, log-softmax.

mpirun -np 4 python -m mpitrain --data mnist --model examples.mnist_cnn:Net
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * (image_size // 2 - 2) ** 2, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        # Cross-entropy of log-softmax is the same as NLL: log-softmax twice is once.
        return F.log_softmax(self.fc2(x), dim=1)

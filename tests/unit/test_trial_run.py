"""One image through a model leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpitrain.models.build import build_model
from mpitrain.models.layers import Sizes, try_one_image

SIZES = Sizes(num_classes=4, in_channels=3, image_size=16)


class Shared(nn.Module):
    """A convolution in two parts, and one weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Conv2d(3, 3, 3, padding=1)
        self.first, self.second = nn.Sequential(shared), nn.Sequential(shared)
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other.weight = self.one.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(self.second(self.first(images)))) * self.scale


def test_shared_modules_and_tied_weights_stay() -> None:
    model = Shared()
    before = {id(it) for it in (*model.parameters(), *model.buffers())}
    output = try_one_image(model, SIZES)
    assert isinstance(output, torch.Tensor)
    assert output.is_meta
    assert {id(it) for it in (*model.parameters(), *model.buffers())} == before
    assert model.other.weight is model.one.weight
    assert model.second[0] is model.first[0]
    assert model(torch.ones(1, 3, 16, 16)).shape == (1, 3, 16, 16)


@pytest.mark.parametrize("name", ["timm:coat_lite_tiny", "timm:coat_tiny"])
def test_timms_models_with_shared_modules_have_numbers(name: str) -> None:
    model = build_model(name, num_classes=4, in_channels=3, image_size=32, seed=1)
    assert not any(it.is_meta for it in (*model.parameters(), *model.buffers()))
    assert model.eval()(torch.ones(1, 3, 32, 32)).shape == (1, 4)

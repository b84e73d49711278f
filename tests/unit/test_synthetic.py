"""Synthetic images: the same from the same seed, and such that a network can learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpitrain.errors import UsageError
from mpitrain.tasks.image_classification.datasets.named import make_synthetic


@pytest.mark.parametrize(
    ("num_samples", "num_classes", "image_size", "num_val"),
    [(64, 10, 8, 16), (5, 3, 1, 1), (10, 2, 33, 2)],
)
def test_the_set_has_the_size_asked_for(
    num_samples: int, num_classes: int, image_size: int, num_val: int
) -> None:
    arrays = make_synthetic(num_samples, num_classes, image_size)
    for part, count in (("train", num_samples), ("val", num_val)):
        inputs, labels = arrays[f"{part}_inputs"], arrays[f"{part}_labels"]
        assert inputs.shape == (count, 3, image_size, image_size)
        assert inputs.dtype == np.uint8
        assert labels.shape == (count,)
        assert labels.dtype == np.int64
    assert arrays["train_labels"].max() == num_classes - 1
    counts = np.bincount(arrays["train_labels"], minlength=num_classes)
    assert counts.max() - counts.min() <= 1


def test_the_seed_decides_every_pixel() -> None:
    first, again = make_synthetic(20, 4, 8, seed=3), make_synthetic(20, 4, 8, seed=3)
    other = make_synthetic(20, 4, 8, seed=4)
    for name, array in first.items():
        assert (array == again[name]).all()
        assert (array != other[name]).any()
    train, val = first["train_inputs"], first["val_inputs"]
    assert not any((image == val).all(axis=(1, 2, 3)).any() for image in train)


def test_more_classes_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match=r"found 4 samples for 10 classes; .*--synth"):
        make_synthetic(4, 10, 8)


def test_a_small_convnet_learns_it() -> None:
    made = make_synthetic(256, 10, 16)
    arrays = {name: torch.from_numpy(array) for name, array in made.items()}
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        scores = model(arrays["train_inputs"] / 255)
        torch.nn.functional.cross_entropy(scores, arrays["train_labels"]).backward()
        optimizer.step()
    guessed = model(arrays["val_inputs"] / 255).argmax(dim=1)
    assert (guessed == arrays["val_labels"]).float().mean() > 0.9

"""Sets that can be read and hardly be meant: one class, images that are not square."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from single_process import lone_communicator
from test_data import LONE

from mpitrain.config import DataConfig
from mpitrain.errors import UsageError
from mpitrain.models.build import build_model, check_takes
from mpitrain.tasks.image_classification.datasets.named import load_data


@pytest.mark.parametrize("classes", [("images",), ("cat", "dog")])
def test_a_single_class_causes_a_warning(
    classes: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for part in ("train", "val"):
        for name in classes:
            file = tmp_path / part / name / "cat" / "a.png"
            file.parent.mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
    config = DataConfig(data="folder", data_dir=tmp_path)
    with caplog.at_level(logging.WARNING, "mpitrain"):
        load_data(config, seed=1, world=LONE, ranks=lone_communicator())
    assert len(caplog.messages) == (len(classes) == 1)
    for words in caplog.messages:
        assert "has one class, 'images'" in words
        assert "train/CLASS, not train/images/CLASS" in words


SIZES: dict[str, Any] = {"num_classes": 3, "in_channels": 1, "seed": 1}


@pytest.mark.parametrize("name", ["convnet", "timm:vit_tiny_patch16_224"])
def test_a_model_for_squares_refuses_other_images(name: str) -> None:
    model = build_model(name, image_size=32, **SIZES)
    check_takes(name, model, (1, 32, 32))
    words = f"--model {name} takes no images of 48x32 .*: --image-size 32"
    with pytest.raises(UsageError, match=words):
        check_takes(name, model, (1, 48, 32))


def test_a_model_for_any_images_takes_them() -> None:
    check_takes(
        "resnet18", build_model("resnet18", image_size=32, **SIZES), (1, 48, 32)
    )

"""What an export says of the images that a model takes is what the run did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from single_process import lone_communicator
from test_data import LONE
from test_export_folders import write

from mpitrain.config import DataConfig
from mpitrain.tasks.image_classification.datasets.images import decode
from mpitrain.tasks.image_classification.datasets.named import load_data
from mpitrain.tasks.image_classification.task import _describe_inputs
from mpitrain.tools.export import ExportConfig, export

FILES = {"resize": 37, "center_crop": 32, "classes": ["cat", "dog", "owl"]}
NORMALIZED = {"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]}


def exported(tmp_path: Path, inputs: dict[str, Any], config: dict[str, Any]) -> str:
    """Export a run to the folder ``out``; return what the command prints."""
    library = "timm" if "pretrained_cfg" in config else "transformers"
    found = {"library": library, "files": {"config.json": config}, "tied": []}
    trainer = {"inputs": inputs, "data": {"in_channels": 3, "image_size": 32}}
    write(tmp_path, {"a": torch.ones(2)}, model_config=found, trainer=trainer)
    out = tmp_path / "out"
    return export(ExportConfig(run=tmp_path, output=out, format="huggingface"))


def test_inputs_of_a_custom_task_are_printed_as_they_are(tmp_path: Path) -> None:
    words = exported(tmp_path, {"tokenizer": "gpt2", "max_length": 8}, {})
    assert words.endswith("\ninputs: tokenizer gpt2; max_length 8")


def test_images_of_the_size_are_said_to_be_kept(tmp_path: Path) -> None:
    words = exported(tmp_path, FILES | NORMALIZED, {})
    kept = "kept whole if 32x32 already, but by the folder's config"
    assert f"center crop 32 ({kept})" in words
    output = tmp_path / "out.pt"
    words = export(ExportConfig(run=tmp_path, output=output, format="state_dict"))
    assert "center crop 32 (kept whole if 32x32 already)" in words


@pytest.mark.parametrize(("size", "found"), [(None, (None, None)), (16, (18, 16))])
def test_a_set_of_the_size_has_no_crop(
    size: int | None, found: tuple[int, int | None], tmp_path: Path
) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for part in ("train", "val"):
            file[f"{part}/images"] = np.zeros((2, 8, 8, 3), np.uint8)
            file[f"{part}/labels"] = [0, 1]
    config = DataConfig(data="hdf5", data_dir=tmp_path, image_size=size)
    data = load_data(config, seed=1, world=LONE, ranks=lone_communicator())
    inputs = _describe_inputs(data.train, None, None)
    assert (inputs["resize"], inputs["center_crop"]) == found


def test_timms_config_has_nothing_of_the_pretrained_inputs(tmp_path: Path) -> None:
    pretrained = {"interpolation": "bicubic", "test_input_size": [3, 288, 288]}
    pretrained |= {"test_crop_pct": 1.0, "crop_pct": 0.95, "tag": "a"}
    config = {"pretrained_cfg": pretrained, "num_classes": 3}
    exported(tmp_path, FILES | NORMALIZED, config)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pretrained_cfg"] == NORMALIZED | {
        "input_size": [3, 32, 32],
        "crop_pct": 32 / 37,
        "crop_mode": "center",
        "interpolation": "bilinear",
        "tag": "a",
    }


@pytest.mark.parametrize("size", [(50, 40), (40, 50)])
@pytest.mark.parametrize("is_cropped", [True, False])
def test_transformers_gets_classes_and_what_was_done_to_images(
    size: tuple[int, int], is_cropped: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(num_labels=3, image_size=32)
    as_json = json.loads(config.to_json_string())
    inputs = FILES if is_cropped else FILES | {"resize": 32, "center_crop": None}
    exported(tmp_path, inputs | NORMALIZED, as_json)
    found = transformers.ViTConfig.from_pretrained(tmp_path / "out")
    assert found.id2label == {0: "cat", 1: "dog", 2: "owl"}
    assert found.label2id == {"cat": 0, "dog": 1, "owl": 2}
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    # Coarse: libraries round differently.
    coarse = np.random.default_rng(0).integers(0, 255, (5, 4, 3), np.uint8)
    image = Image.fromarray(coarse).resize(size)
    image.save(tmp_path / "a.png")
    if is_cropped:
        pixels = decode((tmp_path / "a.png").read_bytes(), 32, None, "a.png") / 255
    else:
        resized = image.resize((32, 32), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(it).view(3, 1, 1) for it in NORMALIZED.values())
    shown = processor(image, return_tensors="pt")["pixel_values"][0]
    assert shown.shape == pixels.shape
    assert (shown * std + mean - pixels).abs().max() < 0.03


def test_timm_crops_nothing_of_images_that_had_the_size(tmp_path: Path) -> None:
    config = {"pretrained_cfg": {"crop_pct": 0.95}, "num_classes": 3}
    exported(tmp_path, {"resize": None, "center_crop": None, "mean": None}, config)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pretrained_cfg"]["crop_pct"] == 1.0
    assert written["pretrained_cfg"]["mean"] == [0.0, 0.0, 0.0]


def test_names_that_a_config_has_stay(tmp_path: Path) -> None:
    labels = {"0": "a", "1": "b", "2": "c"}
    exported(tmp_path, FILES | NORMALIZED, {"id2label": labels})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == labels
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()

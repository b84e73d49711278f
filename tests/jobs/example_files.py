"""Small files of the real formats, where the commands of `examples/README.md` look."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
from data_files import idx_bytes, picture
from launcher import ROOT

HUBCONF = '''
"""A vision transformer as DINOv2's: a bare backbone, with an empty place for a head."""
dependencies = ["torch"]

import pathlib

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 14, stride=14)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Identity()

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def dinov2_vitl14(*, pretrained=True):
    model = VisionTransformer()
    if pretrained:
        url = (pathlib.Path(__file__).parent / "tiny.pth").as_uri()
        state = torch.hub.load_state_dict_from_url(url, map_location="cpu")
        model.load_state_dict(state)
    return model
'''


def write_all(home: Path) -> None:
    """Write what the page's commands read, seen from `home`.

    Args:
        home: Gets `data`, `torch` (for TORCH_HOME), `dinov2` and a file of weights.
    """
    for name in ("MNIST", "FashionMNIST"):
        write_idx(home / f"data/{name}/raw", num_train=240, num_val=100)
    write_folder(home / "data/hymenoptera_data")
    write_hub_repository(home / "torch/hub/facebookresearch_dinov2_main")
    write_hub_repository(home / "dinov2")
    (home / "dinov2/tiny.pth").rename(home / "dinov2_vitl14_pretrain.pth")


def write_idx(folder: Path, num_train: int, num_val: int) -> None:
    """Write MNIST's four files: a digit is a bright stripe, at its own height."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for name, num in (("train", num_train), ("t10k", num_val)):
        labels = (np.arange(num) % 10).astype(np.uint8)
        images = random.integers(0, 100, (num, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 6 + 2 * label] += 150
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))


def write_folder(folder: Path, per_class: int = 12) -> None:
    """Write photographs of two classes, all of another size."""
    random = np.random.default_rng(1)
    for part, num in (("train", per_class), ("val", per_class // 2)):
        for name, colour in (("ants", (160, 80, 40)), ("bees", (220, 200, 20))):
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(num):
                height, width = random.integers(40, 90, 2)
                pixels = random.integers(0, 36, (height, width, 3), dtype=np.uint8)
                photo = picture(pixels + np.array(colour, np.uint8), "JPEG")
                (place / f"{number:03}.jpg").write_bytes(photo)


def write_tiles(folder: Path) -> None:
    """Write what `docs/tutorial/custom-model.md` reads: dark and bright tiles."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for part, num in (("train", 60), ("val", 20)):
        labels = np.arange(num) % 2
        images = random.integers(0, 100, (num, 8, 8)) + 120 * labels[:, None, None]
        np.save(folder / f"{part}_images.npy", images[:, None].astype(np.uint8))
        np.save(folder / f"{part}_labels.npy", labels)
        tiles = [
            json.dumps({"pixels": image.tolist(), "label": int(label)})
            for image, label in zip(images, labels, strict=True)
        ]
        for shard in range(3):
            text = "\n".join(tiles[shard::3])
            (folder / f"{part}-{shard}.jsonl").write_text(text)


def own_task() -> str:
    """Return the program of `docs/howto/own-task.md`, `mine.py`."""
    page = (ROOT / "docs/howto/own-task.md").read_text()
    found = re.search(r"```python\n# mine.py\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def own_training() -> dict[str, str]:
    """Return the programs of `docs/tutorial/own-training.md` by file name.

    `plain.py`, `tags.py`, and `step3.py` and so on: `tags.py` as this step and those
    before it change its lines.
    """
    text = (ROOT / "docs/tutorial/own-training.md").read_text()
    programs = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))
    lines = programs["tags.py"].splitlines()
    for number, diff in enumerate(re.findall(r"```diff\n(.*?)```", text, re.DOTALL), 3):
        place = 0
        for line in diff.splitlines():
            if line.startswith("+"):
                lines.insert(place, line[1:])
                place += 1
            elif line.startswith("-"):
                place = lines.index(line[1:], place)
                del lines[place]
            else:
                place = lines.index(line[1:], place) + 1
        programs[f"step{number}.py"] = "\n".join(lines)
    return programs


def write_hub_repository(folder: Path) -> None:
    """Write a clone of a repository for torch.hub, and weights for its model."""
    folder.mkdir(parents=True)
    (folder / "hubconf.py").write_text(HUBCONF)
    names: dict[str, object] = {}
    exec(HUBCONF, names)
    torch.manual_seed(1)
    model = names["VisionTransformer"]()  # type: ignore[operator]
    torch.save(model.state_dict(), folder / "tiny.pth")

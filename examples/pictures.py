"""Draws the pictures of the gallery in `README.md`: what each training has learned.

python examples/pictures.py                       # all; takes two minutes
python examples/pictures.py segmentation gan
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import mpitrain

EPOCHS = {"detection": 12, "segmentation": 12, "gan": 60}
"""More than the examples have, so that there is something to see."""

FOLDER = Path(__file__).parent / "pictures"
sys.path.insert(0, str(FOLDER.parent))


class Curve(mpitrain.Callback):
    """Keeps the loss of each step, and the metrics of each validation."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def on_metrics(self, trainer: mpitrain.Trainer, steps: Any) -> None:
        self.losses += [(it.step, it.loss) for it in steps]

    def on_validation_end(self, trainer: mpitrain.Trainer, epoch: Any) -> None:
        self.metrics.append((trainer.state.step, dict(epoch.values)))


def show(axes: Axes, image: Any, title: str, **settings: Any) -> None:
    axes.imshow(image, **settings)
    axes.set(xticks=(), yticks=(), title=title)


def segmentation(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    images, masks = zip(*(trainer.val_data[i] for i in range(37)), strict=True)
    best = max(range(37), key=lambda i: len(masks[i].unique()))
    found = trainer.predict(trainer.val_data)[best].argmax(0)
    show(axes[0], images[best][0], "image", cmap="gray")
    show(axes[1], found, "prediction", cmap="viridis")


def detection(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    found = trainer.predict(trainer.val_data)
    for place, index in zip(axes, (3, 5), strict=True):
        image, _ = trainer.val_data[index]
        show(place, image.movedim(0, -1), "boxes")
        for box, score in zip(
            found[index]["boxes"], found[index]["scores"], strict=True
        ):
            (left, top, right, bottom) = box.tolist()
            if score > 0.5:
                x, y = [left, right, right, left, left], [top, top, bottom, bottom, top]
                place.plot(x, y, color="white", linewidth=1)


def surrogate(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    day = trainer.val_data[20]
    found = trainer.predict(trainer.val_data)[20]
    scale = {"cmap": "RdBu_r", "vmin": -2, "vmax": 2}
    show(axes[0], day["next_fields"][0], "next day", **scale)
    show(axes[1], found[0], "prediction", **scale)


def gan(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    real = trainer.val_data.points
    with torch.no_grad():
        points = trainer.model.generator(torch.randn(300, 8))
    for place, title, them in zip(
        axes, ("real", "generated"), (real, points), strict=True
    ):
        place.plot(*them.T, ".", markersize=2)
        place.set(title=title, xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
        place.set(xticks=(), yticks=())


def contrastive(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    found = torch.stack(trainer.predict(trainer.val_data))[:, 0]
    for place, title, rows in zip(
        axes, ("samples", "embeddings"), (trainer.val_data.samples, found), strict=True
    ):
        _, _, directions = torch.pca_lowrank(rows, 2)
        place.plot(*(rows @ directions[:, :2]).T, ".", markersize=3)
        place.set(xticks=(), yticks=(), title=title)


def imbalance(axes: list[Axes], trainer: mpitrain.Trainer) -> None:
    matrix = np.asarray(trainer.results["matrix"])
    show(axes[0], matrix / matrix.sum(1, keepdims=True), "confusion", cmap="Blues")
    axes[1].bar(range(len(matrix)), matrix.sum(1))
    axes[1].set(title="samples per class", xticks=range(len(matrix)), yticks=())


OUTPUTS: dict[str, Callable[[list[Axes], mpitrain.Trainer], None]] = {
    it.__name__: it
    for it in (segmentation, detection, surrogate, gan, contrastive, imbalance)
}
"""What is drawn beside the curves: two panels of what the model makes."""


def draw(name: str, world: mpitrain.World) -> None:
    module = importlib.import_module(f"trainings.{name}")
    epochs = EPOCHS.get(name, module.DEFAULTS.epochs)
    trainer = module.build(replace(module.DEFAULTS, epochs=epochs), world)
    curve = Curve()
    trainer.callbacks = [curve]
    trainer.fit()
    figure = Figure(figsize=(6, 2), dpi=100, layout="constrained")
    axes = list(figure.subplots(1, 3, width_ratios=(1.3, 1, 1)).flat)
    axes[0].plot(*zip(*curve.losses, strict=True), linewidth=1, label="train_loss")
    axes[0].set(xlabel="step", title="train_loss")
    if name in OUTPUTS:
        OUTPUTS[name](axes[1:], trainer)
    else:
        names = list(curve.metrics[-1][1])[:2]
        for place, key in zip(axes[1:], names, strict=False):
            points = [(step, values[key]) for step, values in curve.metrics]
            place.plot(*zip(*points, strict=True), ".-", linewidth=1)
            place.set(xlabel="step", title=f"val_{key}")
        for place in axes[1 + len(names) :]:
            place.remove()
    figure.savefig(FOLDER / f"{name}.png")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    every = sorted(it.stem for it in (FOLDER.parent / "trainings").glob("*.py"))
    with mpitrain.init(device="cpu") as world:
        for name in sys.argv[1:] or every:
            draw(name, world)

"""Metrics with a state over the whole data set: the same at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torchmetrics as tm
from reference_training import Net, config_of, some
from torch import Tensor

from mpitrain import Trainer, World

pytestmark = pytest.mark.mpi


def evaluated(world: World, metrics: Any, num: int = 29, **kinds: Any) -> Any:
    trainer = Trainer(
        Net(),
        some(32),
        some(num, "val"),
        config_of(epochs=1, lr=0.01),
        world=world,
        metrics=metrics,
        callbacks=(),
        **kinds,
    )
    trainer.fit()
    return trainer.evaluate()


def alone(metric: Any, num: int = 29) -> Any:
    """Of one process, by the model of that training."""
    raise NotImplementedError


CLASSES = {
    "f1": lambda: tm.classification.MulticlassF1Score(10),
    "auroc": lambda: tm.classification.MulticlassAUROC(10),
    "iou": lambda: tm.classification.MulticlassJaccardIndex(10),
    "matrix": lambda: tm.classification.MulticlassConfusionMatrix(10),
}


class Sums:
    """A metric of one's own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = self.num = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += int((outputs.argmax(1) == targets).sum())
        self.num += len(targets)

    def merge_state(self, other: Any) -> None:
        self.total += other.total
        self.num += other.num

    def compute(self) -> float:
        return self.total / self.num


@pytest.mark.parametrize("num", [29, 2])
def test_each_sample_counts_once(world: World, num: int) -> None:
    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).double()

    metrics = {"right": right, "mine": Sums(), **{k: v() for k, v in CLASSES.items()}}
    metrics["accuracy"] = tm.classification.MulticlassAccuracy(10, average="micro")
    found = evaluated(world, metrics, num)
    assert found.values["mine"] == pytest.approx(found.values["right"], abs=1e-12)
    assert found.values["accuracy"] == pytest.approx(found.values["right"], abs=1e-12)
    assert int(found.results["matrix"].sum()) == num
    assert "matrix" not in found.values

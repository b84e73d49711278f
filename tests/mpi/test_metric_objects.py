"""Metrics with a state over the whole data set: the same at any number of ranks.

All of torchmetrics' are in tests/unit/test_metric_objects.py, joined without MPI.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics as tm
from reference_training import Net, config_of, some
from torch import Tensor

from mpitrain import Callback, Checkpointer, EpochLines, Recorder, Task, Trainer, World
from mpitrain.checkpoint.layout import best_of, list_checkpoints
from mpitrain.data.randomness import random_state
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.record.reading import Run
from mpitrain.tools.report.curves import metric_charts
from mpitrain.tools.report.summary import summary
from mpitrain.train.metric_states import TorchMetric

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::UserWarning")]


def trainer_of(world: World, num: int = 29, **kinds: Any) -> Trainer:
    return Trainer(
        Net(),
        some(32),
        some(num, "val"),
        config_of(**{"epochs": 1, "lr": 0.01, **kinds.pop("config", {})}),
        world=world,
        **{"callbacks": (), **kinds},
    )


class Sums:
    """A metric of another class than torchmetrics'."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros(())
        self.num = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total + (outputs.argmax(1) == targets).sum()
        self.num += len(targets)

    def merge_state(self, other: Any) -> None:
        self.total = self.total + other.total
        self.num += other.num

    def compute(self) -> float:
        return float(self.total) / self.num


class Correlation(tm.PearsonCorrCoef):
    """Has tensors without a reduction."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs.argmax(1).double(), targets.double())


class Boxes(tm.detection.MeanAveragePrecision):
    """Makes boxes of outputs; none of every third target."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        found, expected = [], []
        for row, target in zip(outputs, targets, strict=True):
            corner = torch.tensor([[0.0, 0.0, 5.0, 5.0]])
            found.append(
                {
                    "boxes": corner + row[:1].detach(),
                    "scores": row.softmax(0)[:1],
                    "labels": target[None] % 2,
                }
            )
            boxes = corner if target % 3 else corner[:0]
            expected.append({"boxes": boxes, "labels": target[None][: len(boxes)] % 2})
        super().update(found, expected)


def metrics_of_all_kinds(*, is_exact: bool = False) -> dict[str, Any]:
    found = {
        "f1": tm.classification.MulticlassF1Score(10),
        "matrix": tm.classification.MulticlassConfusionMatrix(10),
        "auroc": tm.classification.MulticlassAUROC(10),
        "recall": tm.wrappers.ClasswiseWrapper(
            tm.classification.MulticlassRecall(10, average=None)
        ),
        "map": Boxes(),
    }
    if not is_exact:
        found["correlation"] = Correlation()
    return found


def alone(trainer: Trainer, metrics: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Return the results of one process, by the trained model."""
    inputs, targets = some(num, "val").tensors
    with torch.no_grad():
        outputs = trainer.model.eval()(inputs.double())
    found = {}
    for name, metric in metrics.items():
        one = TorchMetric(name, metric, "cpu", is_exact=False).metric
        one.update(outputs, targets)
        found[name] = one.compute()
    return found


@pytest.mark.parametrize("num", [29, 2])
def test_ranks_together_have_the_result_of_one_process(world: World, num: int) -> None:
    trainer = trainer_of(world, num, metrics=metrics_of_all_kinds())
    trainer.fit()
    found, again = trainer.evaluate(), trainer.evaluate()
    expected = alone(trainer, metrics_of_all_kinds(), num)
    for each in (found.results, again.results, trainer.results):
        torch.testing.assert_close(
            dict(each), expected, rtol=0, atol=1e-12, equal_nan=True
        )
    assert int(found.results["matrix"].sum()) == num == found.num_samples
    assert found.values["f1"] == float(expected["f1"])
    assert found.values["recall_multiclassrecall_3"] == pytest.approx(
        float(expected["recall"]["multiclassrecall_3"]), nan_ok=True
    )
    assert "matrix" not in found.values


@pytest.mark.parametrize("num", [29, 2])
def test_means_and_objects_agree(world: World, num: int) -> None:
    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).double()

    metrics = {"right": right, "mine": Sums(), "mean": MeanOf()}
    trainer = trainer_of(world, num, metrics=metrics)
    values = trainer.fit().values
    assert values["mine"] == pytest.approx(values["right"], abs=1e-12)
    assert values["mean"] == pytest.approx(values["right"], abs=1e-12)


class MeanOf(tm.MeanMetric):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update((outputs.argmax(1) == targets).double())


def test_fsdp_has_the_same_results(world: World) -> None:
    found = []
    for strategy in ("ddp", "fsdp"):
        metrics = metrics_of_all_kinds()
        trainer = trainer_of(world, metrics=metrics, config={"strategy": strategy})
        found.append(dict(trainer.fit().results))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9, equal_nan=True)


def test_bitwise_has_the_bits_of_any_number_of_ranks(world: World) -> None:
    config = {"bitwise": True, "strategy": "ddp", "micro_batch_size": 4}
    config["global_batch_size"] = 32  # a micro-batch for each of 8 ranks
    metrics = metrics_of_all_kinds(is_exact=True)
    trainer = trainer_of(world, metrics=metrics, config=config)
    found = trainer.fit().results
    inputs, targets = some(29, "val").tensors
    with torch.no_grad():
        outputs = [trainer.model.eval()(it) for it in inputs.double().split(4)]
    for name, metric in metrics_of_all_kinds(is_exact=True).items():
        one = TorchMetric(name, metric, "cpu", is_exact=True).metric
        for output, target in zip(outputs, targets.split(4), strict=True):
            one.update(output, target)
        expected = one.compute()
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=0, equal_nan=True
        )
    with pytest.raises(UsageError, match="Expected a metric that counts"):
        trainer_of(world, metrics={"mean": MeanOf()}, config=config).fit()


# --- collections, names, derived metrics ------------------------------------------


def test_a_collection_is_its_metrics(world: World) -> None:
    kinds = (tm.classification.MulticlassF1Score, tm.classification.MulticlassRecall)
    collection = tm.MetricCollection([kind(10) for kind in kinds], prefix="of_")
    found = trainer_of(world, metrics={"all": collection}).fit().values
    single = {f"of_{kind.__name__}": kind(10) for kind in kinds}
    assert found == trainer_of(world, metrics=single).fit().values


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": Sums()}, "two metrics are named 'loss'"),
        ({"samples": Sums()}, "a metric is named 'samples'"),
        ({"samples": lambda outputs, _: outputs[:, 0]}, "is named 'samples'"),
        (
            {"a": tm.MetricCollection([tm.SumMetric()]), "SumMetric": tm.SumMetric()},
            "two metrics are named 'SumMetric'",
        ),
        ({"f1": tm.wrappers.BootStrapper(tm.MeanMetric())}, "'f1' is a BootStrapper"),
    ],
)
def test_names_and_kinds_that_cannot_be_are_named(
    world: World, metrics: Any, message: str
) -> None:
    with pytest.raises(MpitrainError, match=message):
        trainer_of(world, metrics=metrics).fit()


def test_metrics_are_derived_of_means_and_objects(world: World) -> None:
    def derived(values: Mapping[str, float]) -> dict[str, float]:
        return {"root": values["mine"] ** 0.5, "twice": 2 * values["loss"]}

    trainer = trainer_of(world, metrics={"mine": Sums()}, derived_metrics=derived)
    values = trainer.fit().values
    assert values["root"] == values["mine"] ** 0.5
    assert values["twice"] == 2 * values["loss"]


def test_an_error_of_derived_metrics_is_named(world: World) -> None:
    with pytest.raises(
        MpitrainError, match=r"derived_metrics\(\) failed: KeyError: 'mse'"
    ):
        trainer_of(world, derived_metrics=lambda values: {"a": values["mse"]}).fit()


def test_callbacks_find_matrices(world: World) -> None:
    found = []

    class Keep(Callback):
        def on_epoch_end(self, trainer: Any, epoch: Any) -> None:
            found.append(int(trainer.results["matrix"].sum()))

    metrics = {"matrix": tm.classification.MulticlassConfusionMatrix(10)}
    config = {"epochs": 2}
    trainer_of(world, metrics=metrics, callbacks=[Keep()], config=config).fit()
    assert found == [29, 29]


class Draws(Sums):
    def compute(self) -> float:
        return float(torch.rand(())) + np.random.rand() + random.random()


def test_a_metric_that_draws_changes_no_training(world: World) -> None:
    trainer = trainer_of(world, metrics={"drawn": Draws()})
    first = trainer.fit().values["drawn"]
    before = random_state()
    assert trainer.evaluate().values["drawn"] == first
    assert random_state() == before


# --- errors are those of all ranks ------------------------------------------------


class Fails(Sums):
    def compute(self) -> float:
        raise ZeroDivisionError("nothing")


class Unsendable(Sums):
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs, targets)
        self.keep = lambda: outputs


class Odd(MeanOf):
    """Has a state more on the last rank."""

    def __init__(self, *, is_odd: bool) -> None:
        super().__init__()
        if is_odd:
            self.add_state("more", torch.zeros(2), dist_reduce_fx="sum")


class Lambda(Sums):
    def compute(self) -> Any:
        return lambda: 1


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Fails(), "metric 'm' cannot be computed: ZeroDivisionError: nothing"),
        (Unsendable(), "metric 'm' failed: it cannot be sent"),
        (Lambda(), "metric 'm' cannot be computed"),
        (tm.CatMetric(), "metric 'm' failed: update\\(\\) by outputs, float64"),
    ],
)
def test_an_error_of_a_metric_is_that_of_all_ranks(
    world: World, metric: Any, message: str
) -> None:
    with pytest.raises(MpitrainError, match=message):
        trainer_of(world, metrics={"m": metric}).fit()


class Picky(Sums):
    def __init__(self, *, is_picky: bool) -> None:
        super().__init__()
        self.is_picky = is_picky

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if self.is_picky:
            raise ValueError("not these")
        super().update(outputs, targets)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_fails_on_one_rank_is_an_error_of_all(
    world: World, rank: int
) -> None:
    is_picky = world.rank == min(rank, world.world_size - 1)
    message = r"metric 'm' failed: update\(\) by outputs.*ValueError: not these"
    with pytest.raises(MpitrainError, match=message):
        trainer_of(world, metrics={"m": Picky(is_picky=is_picky)}).fit()


def test_other_states_on_a_rank_are_no_wait(world: World) -> None:
    # Of 8 ranks the last one has no samples here, and no states.
    trainer = trainer_of(world, metrics={"m": Odd(is_odd=world.rank == 1)})
    if world.world_size == 1:
        return
    with pytest.raises(MpitrainError, match="metric 'm' differs between ranks: Odd"):
        trainer.fit()


@pytest.mark.parametrize(
    "other", [{}, {"b": Sums()}, {"a": MeanOf()}, {"a": tm.SumMetric(), "b": Sums()}]
)
def test_other_metrics_on_a_rank_are_no_wait(world: World, other: Any) -> None:
    is_last = world.rank == world.world_size - 1
    metrics = copy.deepcopy(other) if is_last else {"a": Sums()}
    if world.world_size == 1:
        return
    with pytest.raises(UsageError, match="the set of metrics differs between ranks"):
        trainer_of(world, metrics=metrics).fit()


def test_a_metric_that_one_rank_cannot_have_is_no_wait(world: World) -> None:
    is_last = world.rank == world.world_size - 1
    metric = tm.wrappers.Running(tm.SumMetric()) if is_last else tm.SumMetric()
    with pytest.raises(UsageError, match="is a Running, whose result depends"):
        trainer_of(world, metrics={"m": metric}).fit()


class ByTask(Task):
    """Updates metrics by what it finds itself, on some batches only."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric_objects["m"] = metric

    def training_step(self, model: Any, batch: Any) -> Tensor:
        return model(batch.inputs).square().mean(1)

    def validation_step(self, model: Any, batch: Any) -> Mapping[str, Any]:
        outputs = model(batch.inputs)
        if len(batch) and batch.indices[0] > 0:  # not the first, which rank zero has
            self.metric_objects["m"].update(outputs[:, 0])
        return {}


def test_rank_zero_may_be_without_an_update(world: World) -> None:
    trainer = trainer_of(world, 29, task=ByTask(tm.MeanMetric()))
    found = trainer.fit().values
    assert set(found) == {"m"}
    cat = trainer_of(world, 29, task=ByTask(tm.CatMetric())).fit()
    assert found["m"] == pytest.approx(float(cat.results["m"].mean()), abs=1e-12)


# --- records, checkpoints, reports ------------------------------------------------


class UpdatesAlways(Task):
    """Updates the metrics by each batch, also by one of padding alone."""

    def validation_step(self, model: Any, batch: Any) -> Any:
        outputs = model(batch.inputs)
        for metric in self.metric_objects.values():
            metric.update(outputs, batch.targets)
        self.update_metrics(outputs, batch.targets)
        return {"loss": self.loss(outputs, batch.targets)}

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class Count(Sums):
    def compute(self) -> float:
        return self.num


def test_a_row_of_padding_is_no_sample_of_a_metric(world: World) -> None:
    metrics = {"matrix": tm.classification.MulticlassConfusionMatrix(10)}
    trainer = trainer_of(
        world, 1, task=UpdatesAlways(), metrics={**metrics, "num": Count()}
    )
    found = trainer.fit()
    assert found.values["num"] == 2  # it is updated twice
    assert trainer.results["matrix"].sum() == 2
    assert found.num_samples == 1


def recorded(world: World, run_dir: Path, best_by: str | None, **kinds: Any) -> Trainer:
    callbacks = (
        Recorder(run_dir),
        EpochLines(),
        Checkpointer(run_dir, best_by=best_by, keep=1),
        *kinds.pop("callbacks", ()),
    )
    config = {"epochs": 3, "lr": 0.5}
    trainer = trainer_of(world, callbacks=callbacks, config=config, **kinds)
    trainer.fit()
    return trainer


def test_numbers_of_objects_are_recorded_and_choose_the_best(
    world: World, run_dir: Path
) -> None:
    seen: list[float] = []

    class Seen(Callback):
        def on_epoch_end(self, trainer: Any, epoch: Any) -> None:
            seen.append(epoch.values["mine"])

    metrics = {
        "mine": Sums(),
        "num_samples": tm.classification.MulticlassAccuracy(10, average="micro"),
        "recall": tm.classification.MulticlassRecall(10, average=None),
    }
    kinds = {"metrics": metrics, "callbacks": [Seen()]}
    trainer = recorded(world, run_dir, "min:mine", **kinds)
    trainer.test(some(20, "val"))
    if not world.is_rank_zero:
        return
    run = Run(run_dir)
    assert [epoch.values["mine"] for epoch in run.metrics.epochs] == seen
    assert run.metrics.epochs[-1].values["num_samples"] == pytest.approx(seen[-1])
    assert run.result["val_mine"] == seen[-1]
    assert "mine" in run.metrics.test
    best = best_of(list_checkpoints(run_dir))
    assert best is not None
    assert seen[best.epoch - 1] == min(seen)
    assert f"{min(seen):.4f}"[:5] in summary(run, [])["best validation mine"]
    names = [chart.name for chart in metric_charts(run)]
    assert {"val-mine", "val-recall_0"} <= set(names)


class NoLoss(ByTask):
    def validation_step(self, model: Any, batch: Any) -> Mapping[str, Any]:
        outputs = model(batch.inputs)
        if len(batch):
            self.update_metrics(outputs, batch.targets)
        return {}


def test_without_a_loss_no_checkpoint_is_the_best(
    world: World, run_dir: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    recorded(world, run_dir, None, task=NoLoss(Sums()))
    warnings = [it for it in caplog.messages if "neither accuracy nor loss" in it]
    assert len(warnings) == world.is_rank_zero
    assert best_of(list_checkpoints(run_dir)) is None
    if world.is_rank_zero:
        assert "finished: val_m 0." in capsys.readouterr().out
        assert "last validation m" in summary(Run(run_dir), [])


def test_without_a_loss_a_metric_may_choose_the_best(
    world: World, run_dir: Path
) -> None:
    recorded(world, run_dir, "max:m", task=NoLoss(Sums()))
    assert best_of(list_checkpoints(run_dir)) is not None


def test_an_empty_validation_is_no_error(world: World, run_dir: Path) -> None:
    class Nothing(ByTask):
        def validation_step(self, model: Any, batch: Any) -> Mapping[str, Any]:
            model(batch.inputs)
            return {}

    task = Nothing(Sums())
    task.metric_objects.clear()
    assert not recorded(world, run_dir, None, task=task).state.metrics


def test_metrics_are_of_the_average_of_the_weights(world: World) -> None:
    config = {"epochs": 3, "ema_decay": 0.5, "lr": 0.05}
    metrics = {"matrix": tm.classification.MulticlassConfusionMatrix(10)}
    trainer = trainer_of(world, metrics=metrics, config=config)
    found = trainer.fit().results["matrix"]
    model = Net().double()
    model.load_state_dict(trainer.state_dict()) if world.is_rank_zero else None
    inputs, targets = some(29, "val").tensors
    if world.is_rank_zero:
        expected = torch.zeros(10, 10, dtype=torch.int64)
        for target, output in zip(targets, model(inputs.double()), strict=True):
            expected[target, output.argmax()] += 1
        assert torch.equal(found, expected)

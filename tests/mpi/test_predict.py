"""Predictions, and trainings with no or several sets of validation data."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import History
from test_own_loops import Stream
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain import (
    Checkpointer,
    DataError,
    EpochLines,
    Recorder,
    Task,
    TrainConfig,
    Trainer,
    UsageError,
    World,
)
from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.record.reading import Run
from mpitrain.record.run_dir import read_result
from mpitrain.tools.report.report import ReportConfig, report
from mpitrain.tools.watch import WatchConfig, watch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def samples(num: int) -> TensorDataset:
    inputs = torch.arange(num * 3.0, dtype=torch.float64).view(num, 3).sin()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.layer(inputs.reshape(len(inputs), -1)))


def trainer_of(world: World, val_data: Any = None, **options: Any) -> Trainer:
    settings = {"epochs": 2, "global_batch_size": 8, "lr": 0.05, "precision": "fp64"}
    config = TrainConfig(**settings | options.pop("settings", {}))
    options = {
        "callbacks": [],
        "loss": lambda y, t: (y.sum(1) - t[:, 0]) ** 2,
        **options,
    }
    model = options.pop("model", None) or Net()
    return Trainer(model, samples(20), val_data, config, world=world, **options)


@pytest.fixture(scope="module", params=["ddp", "ema", "fsdp"])
def trainer(request: pytest.FixtureRequest, world: World) -> Trainer:
    kinds: dict[str, Any] = {"ema": {"ema_decay": 0.5}, "fsdp": {"strategy": "fsdp"}}
    if world.world_size == 1:
        kinds.pop("fsdp")
    found = trainer_of(world, settings=kinds.get(request.param, {}))
    found.fit()
    return found


def by_hand(trainer: Trainer, inputs: Tensor) -> Tensor:
    state, model = trainer.state_dict(), Net().double().eval()
    if trainer.task.world.is_rank_zero:
        model.load_state_dict(state)
    return model(inputs).detach()


@pytest.mark.parametrize("num", [1, 37, 70])
def test_predictions_are_of_each_sample_once_in_order(
    num: int, world: World, ranks: Communicator, trainer: Trainer
) -> None:
    data = samples(num)
    expected = by_hand(trainer, data.tensors[0])
    found = trainer.predict(data)
    without_targets = trainer.predict(TensorDataset(data.tensors[0]))
    written: dict[int, Tensor] = {}
    nothing = trainer.predict(
        data, lambda at, its: written.update(zip(at.tolist(), its, strict=True))
    )
    of_ranks = ranks.allgather(written)
    assert nothing is None
    assert sorted(i for of_rank in of_ranks for i in of_rank) == list(range(num))
    if not world.is_rank_zero:
        assert found is None
        return
    assert found is not None
    assert without_targets is not None
    everything = {i: it for of_rank in of_ranks for i, it in of_rank.items()}
    for its in (found, without_targets, [everything[i] for i in range(num)]):
        assert torch.allclose(torch.stack(its), expected, rtol=1e-9, atol=1e-12)


def test_a_run_records_its_predictions(world: World, run_dir: Path) -> None:
    trainer = trainer_of(world, callbacks=[Recorder(run_dir)])
    trainer.fit()
    trainer.predict(samples(7))
    trainer.predict(samples(11), lambda *_: None)
    if not world.is_rank_zero:
        return
    found = [it.predicted_samples for it in Run(run_dir).metrics.predicted]
    assert found == [7, 11]
    assert read_result(run_dir)["status"] == "finished"


class Boxes(Task):
    """Outputs of another length for each sample, and parts of several kinds."""

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        return outputs.sum(1)

    def predict_step(self, model: Any, batch: Any) -> Any:
        scores = model(batch.inputs)
        boxes = [torch.arange(int(10 * x.abs().sum()) % 4) for x in batch.inputs]
        names = [f"of {len(it)}" for it in boxes]
        return {"boxes": boxes, "more": (scores, names), "none": None}


def test_outputs_may_be_ragged_and_of_any_kind(world: World) -> None:
    trainer = trainer_of(world, task=Boxes(), loss=None)
    trainer.fit()
    data = samples(41)
    scores = by_hand(trainer, data.tensors[0])
    found = trainer.predict(data)
    for i, it in enumerate(found or ()):
        length = int(10 * data.tensors[0][i].abs().sum()) % 4
        assert it["boxes"].tolist() == list(range(length))
        assert torch.allclose(it["more"][0], scores[i], rtol=1e-9, atol=1e-12)
        assert (it["more"][1], it["none"]) == (f"of {length}", None)
    assert len(found or ()) == 41 * world.is_rank_zero
    trainer.task.predict_step = lambda model, batch: model(batch.inputs).sum()  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"rows are float64 \(\); expected a tensor of"):
        trainer.predict(samples(100 * world.world_size))


class ListNet(Net):
    """Takes a list of inputs, as models of detection do."""

    def forward(self, inputs: Any) -> Tensor:
        assert isinstance(inputs, list)
        return super().forward(torch.stack(inputs))


def test_a_list_of_one_input_stays_a_list(world: World) -> None:
    trainer = trainer_of(
        world,
        settings={"micro_batch_size": 1},
        collate_fn=lambda rows: tuple(map(list, zip(*rows, strict=True))),
        loss=lambda outputs, targets: (
            (outputs.sum(1) - torch.stack(targets)[:, 0]) ** 2
        ),
        model=ListNet(),
    )
    trainer.fit()
    assert len(trainer.predict(samples(7)) or ()) == 7 * world.is_rank_zero


def test_predictions_leave_no_worker_behind(world: World) -> None:
    trainer = trainer_of(world, settings={"num_workers": 2})
    trainer.fit()
    data = [(it[0],) for it in samples(12)]  # each is read, by a worker
    for _ in range(2):
        trainer.predict(data)
        assert not multiprocessing.active_children()


def test_an_evaluation_after_the_training_leaves_no_worker_behind(world: World) -> None:
    data = [tuple(it) for it in samples(12)]  # each is read, by a worker
    trainer = trainer_of(world, data, settings={"num_workers": 2})
    trainer.fit()
    for _ in range(2):
        trainer.evaluate()
        assert not multiprocessing.active_children()


def test_a_stream_is_predicted_in_its_order(world: World) -> None:
    trainer = trainer_of(world)
    trainer.fit()
    trainer.task.predict_step = lambda model, batch: (  # type: ignore[method-assign]
        model(batch.inputs.view(-1, 1).expand(-1, 3)),
        batch.inputs,
    )
    found = trainer.predict(Stream())
    if world.is_rank_zero:
        assert [float(it[1]) for it in found or ()] == [0.0, 1, 2, 3, 4, 5, 6]


class OfFiles:
    """0 to 6; by `shard` every n-th, from the last shard on."""

    def __init__(self, numbers: range = range(7)) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((3,), float(i), dtype=torch.float64) for i in self.numbers)

    def shard(self, num_shards: int, index: int) -> OfFiles:
        return OfFiles(self.numbers[num_shards - 1 - index :: num_shards])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_with_shards_is_predicted_in_its_order(
    world: World, num_workers: int
) -> None:
    trainer = trainer_of(world, settings={"num_workers": num_workers})
    trainer.fit()
    trainer.task.predict_step = lambda model, batch: batch.inputs[:, 0]  # type: ignore[method-assign]
    found = trainer.predict(OfFiles())
    if world.is_rank_zero:
        assert [*map(float, found or ())] == [0, 1, 2, 3, 4, 5, 6]


class Broken:
    """7 samples; 2 and 3 cannot be read."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Tensor:
        if index in (2, 3):
            raise OSError("broken file")
        return torch.full((3,), float(index), dtype=torch.float64)


def test_a_sample_that_is_skipped_has_no_outputs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(world, settings={"on_bad_sample": "skip"})
    trainer.fit()
    trainer.task.predict_step = lambda model, batch: batch.inputs[:, 0]  # type: ignore[method-assign]
    found = trainer.predict(Broken())
    warned = [it.getMessage() for it in caplog.records if "predict" in it.getMessage()]
    assert len(warned) == world.is_rank_zero
    if world.is_rank_zero:
        assert [*map(str, found or ())][2:4] == ["None", "None"]
        kept = [float(it) for it in found or () if it is not None]
        assert kept == [0, 1, 4, 5, 6]
        assert warned[0].startswith("2 samples cannot be read")
        assert "broken file" in warned[0]
    written: list[int] = []
    trainer.predict(Broken(), lambda at, _: written.extend(at.tolist()))
    of_ranks = communicator(world).allgather(written)
    assert sorted(i for it in of_ranks for i in it) == [0, 1, 4, 5, 6]


def test_a_training_needs_no_validation_data(
    world: World, ranks: Communicator, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history, folder = History(), run_dir / "a"
    callbacks = [history, EpochLines(), Recorder(folder), Checkpointer(folder)]
    trainer = trainer_of(world, callbacks=callbacks)
    assert trainer.fit().values == {}
    assert [epoch.values for epoch in history.epochs] == [{}, {}]
    with pytest.raises(UsageError, match="found no val_data"):
        trainer.evaluate()
    with pytest.raises(UsageError, match="best_by='val_f1' without val_data"):
        trainer_of(world, callbacks=[Checkpointer(folder, best_by="val_f1")]).fit()
    ranks.allgather(None)
    if world.is_rank_zero:
        watch(WatchConfig(run=folder, once=True))
        printed = capsys.readouterr().out
        assert "finished: 2 epochs, " in printed
        assert "val_" not in printed
        assert "nan" not in printed
        report(ReportConfig(run=folder, pictures=False))
        page = (folder / "report.html").read_text()
        assert "last training loss" in page
        assert "Validation" not in page
        assert len([*(folder / "checkpoints").iterdir()]) == 2
    ranks.allgather(None)


def test_sets_of_validation_data_have_their_names(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    sets = {"era5": samples(13), "stations": samples(1)}
    alone = [trainer_of(world, it) for it in sets.values()]
    losses = [it.fit().loss for it in alone]
    for best_by, best in ((None, "era5_loss"), ("val_stations_loss", "stations_loss")):
        history, folder = History(), run_dir / f"run-{best}"
        callbacks = [history, Recorder(folder), Checkpointer(folder, best_by=best_by)]
        trainer = trainer_of(world, sets, callbacks=callbacks)
        found = trainer.fit()
        assert found.values == {"era5_loss": losses[0], "stations_loss": losses[1]}
        assert found.num_samples == 14
        assert trainer.evaluate().values == found.values
        if world.is_rank_zero:
            assert read_result(folder)["val_era5_loss"] == losses[0]
            metrics = [(it.metadata()["metric"]) for it in list_checkpoints(folder)]
            expected = [-epoch.values[best] for epoch in history.epochs]
            assert sorted(metrics) == sorted(expected)
    with pytest.raises(UsageError, match="have a metric 'a_b_loss'"):
        trainer_of(
            world,
            {"a": sets["era5"], "a_b": sets["era5"]},
            metrics={"b_loss": lambda y, t: y.sum(1)},
        ).fit()
    with pytest.raises(DataError, match="the validation data b has no samples"):
        trainer_of(world, {"a": sets["era5"], "b": []}).fit()
    ranks.allgather(None)

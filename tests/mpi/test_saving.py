"""Checkpoints of several ranks: each writes its share, and all know how that went."""

from __future__ import annotations

import errno
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_training import Net, Stops, config_of, some
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from mpitrain.checkpoint import checkpointer, layout, storage, training_state
from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.checkpoint.manager import CheckpointManager, WriteResult
from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.checkpoint.resume import check, newest_complete
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.errors import DataError, Stopped, UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.record.run_dir import read_result
from mpitrain.tasks.task import Task
from mpitrain.tools.diff import DiffConfig, diff
from mpitrain.tools.export import read_weights
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import TrainState
from mpitrain.train.trainer import Trainer

NUM = 12


@pytest.fixture
def run_dir(ranks: Communicator) -> Iterator[Path]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(ranks.on_rank_zero(lambda: made, "make a folder"))
        ranks.allgather(None)


def tensors(world: World, value: float = 1.0) -> dict[str, Tensor]:
    """What all have, and what each has alone."""
    found = {f"all/{i}": torch.full((i + 1, 500), value + i) for i in range(NUM)}
    found[f"own/{world.rank}"] = torch.full((7,), float(world.rank))
    return found


def metadata_of(step: int) -> dict[str, Any]:
    return {
        "run": "a", "step": step, "world_size": 2, "extra_state": {}, "metric": None,
        "user_state": None,
        "trainer": {
            "config": {
                "model": "convnet", "data": "digits", "precision": "fp32", "seed": 1,
                "epochs": 9, "probe_epochs": 0, "global_batch_size": 64,
            },
            "data": None, "num_samples": {"train": 96, "val": 40}, "stage": "train",
            "strategy": "ddp", "state": asdict(TrainState(step=step)),
            "loss_scale": [1.0, 0], "callbacks": {},
        },
    }  # fmt: skip


def saver_of(
    run_dir: Path, world: World, ranks: Communicator, **more: Any
) -> CheckpointManager:
    given = {"keep": None, "before_rename": lambda: None, **more}
    return CheckpointManager(run_dir, world, ranks, **given)


def written(saver: CheckpointManager) -> WriteResult:
    outcome = saver.finish("testing")
    assert outcome is not None
    return outcome


def test_each_rank_writes_its_share(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    saver = saver_of(run_dir, world, ranks)
    saver.save(tensors(world), metadata_of(5), 5, 0)
    assert saver.is_busy
    assert written(saver).error == ""
    assert not saver.is_busy
    (found,) = layout.list_checkpoints(run_dir)
    sizes = [file.stat().st_size for file in found.path.glob("rank-*.bin")]
    assert len(sizes) == world.world_size
    assert sum(sizes) < 1.2 * 2000 * NUM * (NUM + 1) / 2  # nothing twice
    assert max(sizes) < 4 * sum(sizes) / world.world_size
    loader = CheckpointReader(found)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors(world).items()}
    loader.load(read)
    for name, tensor in tensors(world).items():
        assert torch.equal(read[name], tensor)
    assert set(loader.stored("own/")) == {str(r) for r in range(world.world_size)}


def test_what_is_written_is_what_was_there_at_the_begin(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    saver = saver_of(run_dir, world, ranks)
    state = tensors(world)
    for step in (1, 2, 3):
        for tensor in state.values():
            tensor.fill_(step)
        saver.save(state, metadata_of(step), step, 0)
        for tensor in state.values():
            tensor.fill_(99)
        assert written(saver).step == step
    for checkpoint in layout.list_checkpoints(run_dir):
        read = {"all/3": torch.zeros(4, 500)}
        CheckpointReader(checkpoint).load(read)
        assert (read["all/3"] == checkpoint.step).all()


@pytest.mark.parametrize("where", ["write", "name"])
def test_a_failure_of_one_rank_is_known_to_all_and_the_next_one_succeeds(
    where: str,
    world: World,
    ranks: Communicator,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty = world.world_size - 1 if where == "write" else 0
    saver = saver_of(run_dir, world, ranks)
    name = "write" if where == "write" else "commit"
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "there")

        if world.rank == faulty:
            patch.setattr(storage.TensorWriter, name, fails)
        for step in (1, 2):
            saver.save(tensors(world), metadata_of(step), step, 0)
            outcome = written(saver)
            assert f"[rank {faulty}/{world.world_size} " in outcome.error
            assert "No space left on device: there" in outcome.error
            assert not saver.is_busy
    saver.save(tensors(world), metadata_of(3), 3, 0)
    assert written(saver).error == ""
    ranks.allgather(None)
    assert [it.step for it in layout.list_checkpoints(run_dir)] == [3]
    check(layout.list_checkpoints(run_dir)[0])
    end = time.monotonic() + 10
    while any((run_dir / layout.FOLDER).glob(".step-*")):
        assert time.monotonic() < end


def test_all_ranks_agree_on_what_is_broken(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    saver = saver_of(run_dir, world, ranks)
    for step in range(1, 4):
        saver.save(tensors(world), metadata_of(step), step, 0)
        written(saver)
    newest, middle, oldest = layout.list_checkpoints(run_dir)
    if world.is_rank_zero:
        last = f"rank-{world.world_size - 1}.bin"
        data = bytearray((newest.path / last).read_bytes())
        data[-1] ^= 128
        (newest.path / last).write_bytes(data)
        (middle.path / "SHA256SUMS").unlink()
    ranks.allgather(None)
    assert newest_complete(run_dir, "a", world, ranks) == oldest
    ranks.allgather(None)
    names = {path.name for path in (run_dir / layout.FOLDER).iterdir()}
    assert names == {
        oldest.path.name,
        f"{middle.path.name}.broken",
        f"{newest.path.name}.broken",
    }
    with pytest.raises(DataError, match=r"(?s)another run wrote it.*: --new-run"):
        newest_complete(run_dir, "b", world, ranks)
    assert oldest.metadata()["run"] == "a"  # it is where it was


def trainer_with_scores(
    world: World, ranks: Communicator, run_dir: Path, scores: list[float], best_by: str
) -> Trainer:
    """A trainer that keeps checkpoints, with a metric that is known beforehand."""
    given = itertools.chain([0.0], scores)  # one batch for each evaluation
    checkpointer = Checkpointer(run_dir, keep=1, best_by=best_by)
    handler = PreemptionHandler(None, time_limit_seconds=None, used_seconds=0.0)
    checkpointer.open(world, run_id="a", handler=handler)
    checkpointer.is_disabled = False  # though there is no run.json
    trainer = Trainer(
        Net(),
        some(64),
        some(world.world_size, "val"),
        config_of(epochs=len(scores), global_batch_size=64),
        world=world,
        metrics=lambda *_: {"score": torch.tensor(next(given)).double()},
        callbacks=[checkpointer],
    )
    next(given)
    return trainer


@pytest.mark.parametrize("best_by", ["score", "min:val_score"])
def test_the_best_epoch_is_kept_though_writes_take_longer_than_epochs(
    best_by: str,
    world: World,
    ranks: Communicator,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = storage.TensorWriter.write
    names = []

    def slowly(self: storage.TensorWriter) -> Any:
        names.append(self.path.name)
        time.sleep(0.6)
        return write(self)

    monkeypatch.setattr(storage.TensorWriter, "write", slowly)
    scores = [0.1, 0.3, 0.5, 0.2, 0.9, 0.4, 0.3, 0.2]
    if best_by.startswith("min"):
        scores = [-score for score in scores]
    trainer = trainer_with_scores(world, ranks, run_dir, scores, best_by)
    trainer.fit()
    assert trainer.best_by == best_by  # which lines and records name
    ranks.allgather(None)
    best = layout.best_of(layout.list_checkpoints(run_dir))
    assert best is not None
    assert best.epoch == 5
    assert best.metadata()["trainer"]["state"]["metrics"]["score"] == pytest.approx(
        scores[4]
    )
    assert len(layout.list_checkpoints(run_dir)) == 2  # and the newest
    assert len(names) < len(scores)  # no epoch waited for another one's write


@pytest.mark.parametrize("every", [3, None])
def test_the_best_epoch_is_saved_between_those_that_are_due(
    world: World, run_dir: Path, every: int | None
) -> None:
    scores = [0.5, 0.9, 0.1, 0.2]

    class Counts(Callback):
        def on_checkpoint(self, trainer: Any, checkpoint: Any) -> None:
            saved.append(checkpoint.step)

    def run(*more: Callback) -> Any:
        saves = Checkpointer(
            run_dir,
            every_epochs=every,
            every_minutes=None,
            keep=1,
            best_by="max:score",
            load_best_at_end=True,
        )

        def score(outputs: Any, _: Any) -> Any:
            now = scores[trainer.state.epoch - 1]
            return {"score": torch.full((len(outputs),), now, dtype=torch.float64)}

        trainer = Trainer(
            Net(),
            some(64),
            some(29, "val"),
            config_of(epochs=4, global_batch_size=64),
            world=world,
            metrics=score,
            callbacks=[Counts(), *more, saves],
        )
        return trainer.fit()

    saved: list[int] = []
    with pytest.raises(Stopped):
        run(Stops(3))
    assert saved == [1, 2, 3]
    saved.clear()
    assert run().values["score"] == pytest.approx(0.9)
    assert saved == [4] if every is None else saved in ([3, 4], [4])
    kept = [it.step for it in layout.list_checkpoints(run_dir)]
    assert kept == [4, 2]


def test_a_metric_that_there_is_not_is_told(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    trainer = trainer_with_scores(world, ranks, run_dir, [1.0], "val_scores")
    with pytest.raises(UsageError, match=r"best_by val_scores: .*loss, score"):
        trainer.fit()


def test_a_checkpoint_of_another_model_is_refused_by_name(
    world: World, run_dir: Path
) -> None:
    checkpointer = Checkpointer(run_dir / "run")
    checkpointer.open(world)
    checkpointer.save(1, model=Net())
    other = Net()
    other.head = nn.Linear(64, 7)
    again = Checkpointer(run_dir / "run")
    again.open(world)
    with pytest.raises(
        UsageError, match=r"head\.weight is of shape \(7, 64\) .*10, 64"
    ):
        again.restore(model=other)
    checkpointer.close()
    again.close()


def test_a_run_keeps_the_metric_of_its_best_checkpoint(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    def run(best_by: str | None, epochs: int = 1, folder: str = "run") -> None:
        checkpointer = Checkpointer(run_dir / folder, best_by=best_by)
        if folder != "run":
            checkpointer = Checkpointer(
                run_dir / folder, best_by=best_by, resume=str(run_dir / "run")
            )
        Trainer(
            Net(),
            some(64),
            some(world.world_size, "val"),
            config_of(epochs=epochs, global_batch_size=64),
            world=world,
            metrics=lambda out, _: {"score": out.double().mean(1)},
            callbacks=[checkpointer],
        ).fit()

    run("score")
    newest = layout.list_checkpoints(run_dir / "run")[0]
    assert newest.metadata()["best_by"] == "max:score"
    run("max:val_score")  # the same one
    for other, now in (("min:score", "min:score"), (None, "min:loss")):
        with pytest.raises(
            UsageError, match=rf"best_by='max:score'; found best_by='{now}'"
        ):
            run(other)
    run("min:loss", epochs=2, folder="another")
    ranks.allgather(None)


@pytest.mark.parametrize("metric", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_none(
    world: World, run_dir: Path, metric: float
) -> None:
    checkpointer = Checkpointer(run_dir / "run")
    checkpointer.open(world)
    checkpointer.save(1, model=Net(), metric=metric)
    again = Checkpointer(run_dir / "run")
    again.open(world)
    assert again.restore(model=Net()) == {"step": 1}
    assert again.reader is None or again.reader.metadata["metric"] is None


def test_numbers_of_numpy_and_torch_are_saved(world: World, run_dir: Path) -> None:
    """Rank zero alone writes them: its error would leave the others waiting."""
    checkpointer: Any = Checkpointer(run_dir / "run")
    checkpointer.open(world)
    checkpointer.save(np.int64(3), model=Net(), metric=torch.tensor(0.5))
    checkpointer.save(np.int64(4), model=Net(), metric=np.float32(0.25))
    found = [it.metadata() for it in layout.list_checkpoints(run_dir / "run")]
    assert [(it["step"], it["metric"]) for it in found] == [(4, 0.25), (3, 0.5)]
    checkpointer.close()


def with_checkpoints(world: World, run_dir: Path, **settings: Any) -> Trainer:
    checkpointer = Checkpointer(run_dir, resume=settings.pop("resume", "auto"))
    config = config_of(global_batch_size=64, **settings)
    return Trainer(
        Net(), some(64), some(29, "val"), config, world=world, callbacks=[checkpointer]
    )


def test_a_run_begins_with_no_checkpoint_beyond_its_epochs(
    world: World, run_dir: Path
) -> None:
    with_checkpoints(world, run_dir / "long", epochs=3).fit()
    resume = str(run_dir / "long")
    other = with_checkpoints(world, run_dir / "short", epochs=2, resume=resume)
    with pytest.raises(UsageError, match=r"after epoch 3.* 2 epochs"):
        other.fit()
    with_checkpoints(world, run_dir / "longer", epochs=4, resume=resume).fit()


def test_a_run_is_not_resumed_with_another_configuration(
    world: World, run_dir: Path
) -> None:
    with_checkpoints(world, run_dir / "run", epochs=1).fit()
    with pytest.raises(UsageError, match=r"another configuration: lr: 0\.05 -> 0\.02"):
        with_checkpoints(world, run_dir / "run", epochs=1, lr=0.02).fit()


def test_a_dry_run_of_a_script_leaves_no_checkpoint(
    world: World, run_dir: Path
) -> None:
    with_checkpoints(world, run_dir / "run", epochs=2, dry_run=True).fit()
    assert not (run_dir / "run").exists()
    with_checkpoints(world, run_dir / "run", epochs=2).fit()
    assert len(layout.list_checkpoints(run_dir / "run")) == 2


def test_a_stop_file_that_came_after_the_last_stop_is_obeyed(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    with_checkpoints(world, run_dir / "run", epochs=1).fit()
    ranks.on_rank_zero((run_dir / "run" / "stop").touch, "ask to stop")
    checkpointer = Checkpointer(run_dir / "run")
    checkpointer.open(world)
    assert (run_dir / "run" / "stop").exists()


class Keeps(Callback):
    """Has a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@pytest.mark.parametrize("state", [{"a": torch.zeros(1)}, {"a": {3: 1}}])
def test_a_state_that_would_come_back_otherwise_is_refused(
    world: World, run_dir: Path, state: Any
) -> None:
    checkpointer = Checkpointer(run_dir / "by-hand")
    checkpointer.open(world)
    with pytest.raises(UsageError, match=r"the state has (a Tensor|the key 3)"):
        checkpointer.save(1, model=Net(), state=state)
    checkpointer.close()
    trainer = with_checkpoints(world, run_dir / "run")
    trainer.callbacks.insert(0, Keeps(state))
    with pytest.raises(UsageError, match=r"Keeps.state_dict\(\) has (a Ten|the key 3)"):
        trainer.fit()


def test_diff_compares_loops_that_have_checkpoints_alone(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    model = Net()
    for name, steps in (("a", (1, 2)), ("b", (2, 3)), ("c", (2,)), ("d", (4,))):
        if name == "c":
            with torch.no_grad():
                next(model.parameters()).add_(1)
        checkpointer = Checkpointer(run_dir / name)
        for step in steps:
            checkpointer.save(step, model=model)
        checkpointer.close()
    if world.is_rank_zero:
        compare = [
            diff(DiffConfig(first=run_dir / "a", second=run_dir / it))
            for it in ("b", "c")
        ]
        assert [differs for _, differs, _ in compare] == [False, True]
        assert "checkpoints: the same (1, up to step 2)" in compare[0][0]
        assert any(it.startswith("checkpoints: step 2 differs") for it in compare[1][0])
        with pytest.raises(UsageError, match="no step and no checkpoint in common"):
            diff(DiffConfig(first=run_dir / "a", second=run_dir / "d"))
        results = [read_result(run_dir / name) for name in ("a", "d")]
        assert results == [{"status": "finished", "steps": step} for step in (2, 4)]
    ranks.allgather(None)


class TwoNames(Net):
    """A layer has two names, and so has a weight; batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.features = nn.Sequential(self.blocks[0], self.norm)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.blocks[1][0].weight

    def forward(self, images: Tensor) -> Tensor:
        inputs = self.features(images.flatten(1))
        return self.head(self.tied(self.blocks(inputs)))


def test_the_average_of_a_weight_is_exported_under_all_of_its_names(
    world: World, run_dir: Path
) -> None:
    config = config_of(ema_decay=0.9)
    callbacks = [Checkpointer(run_dir / "a")]
    trainer = Trainer(
        TwoNames(), some(75), some(29, "val"), config, world=world, callbacks=callbacks
    )
    trainer.fit()
    expected = trainer.state_dict()
    if not world.is_rank_zero:
        return
    reader = CheckpointReader(layout.list_checkpoints(run_dir / "a")[0])
    found = read_weights(reader, average=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    raw = read_weights(reader, average=False)
    assert torch.equal(raw["tied.weight"], raw["blocks.1.0.weight"])
    assert not torch.equal(raw["tied.weight"], found["tied.weight"])
    pointers = {tensor.data_ptr() for tensor in found.values()}
    assert len(pointers) == len(found)  # for safetensors


def with_classes(*classes: str) -> TensorDataset:
    data = some(75)
    data.classes = classes  # type: ignore[attr-defined]
    return data


def resumed(world: World, run_dir: Path, name: str, data: Any) -> Trainer:
    """Train one epoch more than the run "first" did."""
    resume = "auto" if name == "first" else str(run_dir / "first")
    trainer = Trainer(
        Net(),
        data,
        some(29, "val"),
        config_of(epochs=1 + (name != "first")),
        world=world,
        callbacks=[Checkpointer(run_dir / name, resume=resume)],
    )
    trainer.fit()
    return trainer


def test_a_run_is_not_resumed_with_other_classes(world: World, run_dir: Path) -> None:
    resumed(world, run_dir, "first", with_classes("ant", "bee"))
    (first,) = layout.list_checkpoints(run_dir / "first")
    assert first.metadata()["trainer"]["inputs"]["classes"] == ["ant", "bee"]
    assert resumed(world, run_dir, "same", with_classes("ant", "bee")).resumed_from
    for others, words in (
        (("ant", "wasp"), "class 1 is 'wasp', expected 'bee'"),
        (("ant",), "class 1 is None, expected 'bee'"),
        (("ant", "bee", "cow"), "class 2 is 'cow', expected None"),
        (("bee", "ant"), "class 0 is 'bee', expected 'ant'"),
    ):
        with pytest.raises(DataError, match=words):
            resumed(world, run_dir, "-".join(others), with_classes(*others))
    resumed(world, run_dir, "unnamed", some(75))


class Words(Dataset[dict[str, Any]]):
    """Words whose place is a number; some draw."""

    folder = ""  # of their files, and others in each job

    def __init__(self, words: str, *, draws: bool = False) -> None:
        self.words, self.draws = words.split(), draws

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        inputs = torch.rand(64) if self.draws else torch.zeros(64)
        word = self.folder + self.words[index]
        return {"inputs": inputs, "word": word}


def test_a_run_that_resumes_with_another_order_says_so(
    world: World,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(name: str, data: Any, val: Any, epochs: int = 1, **options: Any) -> int:
        trainer = Trainer(
            Net(),
            data,
            val,
            config_of(epochs=epochs, global_batch_size=2),
            world=world,
            task=OfWords(),
            callbacks=[Checkpointer(run_dir / name, **options)],
        )
        caplog.clear()
        trainer.fit()
        return sum("the first sample (" in it for it in caplog.messages)

    words, other = "a b c d", "d c b a"
    new = {"resume": str(run_dir / "a"), "epochs": 2}
    assert run("a", Words(words, draws=True), Words(words)) == 0
    monkeypatch.setattr(Words, "folder", "/tmp/job.2/")
    assert run("a", Words(words, draws=True), Words(words)) == 0
    assert run("a", Words(other, draws=True), Words(words)) == world.is_rank_zero
    assert "(train) is not that" in caplog.text or not world.is_rank_zero
    assert run("b", Words(words, draws=True), Words(other), **new) == world.is_rank_zero
    assert "(val) is not that" in caplog.text or not world.is_rank_zero


class OfWords(Task):
    """Calls the model with the numbers alone."""

    def training_step(self, model: Any, batch: Any) -> Any:
        return model(batch.inputs["inputs"]).square().mean(1)

    def validation_step(self, model: Any, batch: Any) -> Any:
        return {"loss": self.training_step(model, batch)}


def test_a_checkpoint_without_classes_is_resumed(
    world: World, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(*args: Any) -> training_state.Snapshot:
        found = training_state.collect(*args)
        del found.metadata["trainer"]["inputs"]
        return found

    monkeypatch.setattr(checkpointer, "collect", older)
    resumed(world, run_dir, "first", with_classes("ant", "bee"))
    assert resumed(world, run_dir, "next", with_classes("bee", "ant")).resumed_from


class Flushes(Callback):
    """Its first `flush`, in a thread of rank zero, is slow, and may fail."""

    def __init__(self, *, fails: bool = False, fails_at: int | None = None) -> None:
        self.fails, self.fails_at, self.num = fails, fails_at, 0

    def flush(self) -> None:
        self.num += 1
        if self.num == 1:
            time.sleep(0.5)
            if self.fails:
                raise OSError(errno.ENOSPC, "no space")

    def on_step_end(self, trainer: Any) -> None:
        if trainer.state.step == self.fails_at:
            time.sleep(0.4)  # the first write is about to be completed
            raise ArithmeticError("a test")


def fit(world: World, run_dir: Path, *callbacks: Callback) -> Trainer:
    # A checkpoint that is the best waits for one that is being written.
    saves = Checkpointer(run_dir, every_epochs=1, every_steps=2, best_by="min:loss")
    settings = config_of(epochs=2, global_batch_size=16)
    data = some(48), some(5, "val")
    callbacks = (*callbacks, saves)
    trainer = Trainer(Net(), *data, settings, world=world, callbacks=callbacks)
    trainer.fit()
    return trainer


def test_a_failed_write_does_not_repeat_a_newer_one_that_waited(
    world: World, run_dir: Path
) -> None:
    """It would have the same name, which nothing may replace."""
    fit(world, run_dir / "run", Flushes(fails=True))
    (newest, *_) = layout.list_checkpoints(run_dir / "run")
    assert newest.step == 6
    check(newest)


@pytest.mark.parametrize("fails_at", [3, 4, 5])
def test_a_fit_after_a_failed_one_in_the_same_process_resumes_or_begins(
    world: World, run_dir: Path, fails_at: int
) -> None:
    """A thread of the failed one may be completing a checkpoint."""
    with pytest.raises(ArithmeticError):
        fit(world, run_dir / "run", Flushes(fails_at=fails_at))
    trainer = fit(world, run_dir / "run")
    assert trainer.state.step == 6
    for checkpoint in layout.list_checkpoints(run_dir / "run"):
        check(checkpoint)

"""Custom loops with `Checkpointer`, `Recorder` and `DataLoader`."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mpitrain import (
    Callback,
    Checkpointer,
    DataLoader,
    Recorder,
    Stopped,
    StopRequested,
    TrainConfig,
    Trainer,
    UsageError,
    World,
)
from mpitrain.checkpoint import manager
from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.checkpoint.objects import load_objects
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.data.randomness import seeded
from mpitrain.data.sharding import epoch_order
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.record.reading import Run
from mpitrain.record.run_dir import read_result
from mpitrain.tools.diff import DiffConfig, diff
from mpitrain.tools.export import ExportConfig, export
from mpitrain.tools.report.report import ReportConfig, report
from mpitrain.tools.watch import WatchConfig, watch

pytestmark = [pytest.mark.mpi]

SAMPLES, BATCH_SIZE, EPOCHS, NOISE = 23, 6, 2, 4
STEPS = -(-SAMPLES // BATCH_SIZE)


class Ring(Dataset[Any]):
    """Points, and noise that is another in each epoch."""

    def __init__(self) -> None:
        angles = torch.arange(SAMPLES, dtype=torch.float64)
        self.points = torch.stack([angles.cos(), angles.sin()], 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.randn(2, NOISE, dtype=torch.float64)


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Linear(inputs, 8), nn.LeakyReLU(0.2), nn.Linear(8, outputs)
    return nn.Sequential(*layers).double()


class Plateau:
    """An own class with a state of tensors, numbers and keys that are no text."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def step(self, step: int, value: float) -> None:
        self.seen[step] = (
            value,
            torch.tensor([value], dtype=torch.float64),
            [None, float("inf")],
        )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Gan:
    """Two networks, their optimizers, and what belongs to them."""

    def __init__(self, wrap: Any = lambda module: module) -> None:
        torch.manual_seed(5)
        self.g, self.d = wrap(mlp(NOISE, 2)), wrap(mlp(2, 1))
        # Of one more weight than the network, and of two classes.
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        groups = [{"params": self.g.parameters()}, {"params": [self.scale], "lr": 0.05}]
        self.opt_g = torch.optim.Adam(groups, lr=0.02, betas=(0.5, 0.99))
        self.opt_d = torch.optim.SGD(self.d.parameters(), lr=0.1, momentum=0.9)
        self.ema = AveragedModel(getattr(self.g, "module", self.g))
        milestones = torch.optim.lr_scheduler.MultiStepLR(self.opt_g, [3, 6])
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.opt_g,
            [torch.optim.lr_scheduler.ConstantLR(self.opt_g, 0.5, 2), milestones],
            [2],
        )
        self.plateau = Plateau()

    @property
    def objects(self) -> dict[str, Any]:
        return vars(self)

    def step(
        self, real: Tensor, noise: Tensor, weights: Tensor, world_size: int = 1
    ) -> tuple[Tensor, Tensor]:
        def mean(scores: Tensor, target: float) -> Tensor:
            losses = F.binary_cross_entropy_with_logits(
                scores[:, 0], torch.full_like(scores[:, 0], target), reduction="none"
            )
            return (losses * weights).sum()

        with torch.no_grad():
            fake = self.scale * self.g(noise[:, 0])
        both = self.d(torch.cat([real, fake]))
        d_loss = mean(both[: len(real)], 1.0) + mean(both[len(real) :], 0.0)
        d_loss.backward()
        self.opt_d.step()
        self.opt_d.zero_grad()
        plain_d = getattr(self.d, "module", self.d).requires_grad_(False)
        g_loss = mean(plain_d(self.scale * self.g(noise[:, 1])), 1.0)
        g_loss.backward()
        if world_size > 1:
            torch.distributed.all_reduce(self.scale.grad)
            self.scale.grad /= world_size
        self.opt_g.step()
        self.opt_g.zero_grad()
        plain_d.requires_grad_(True)
        self.scheduler.step()
        self.ema.update_parameters(getattr(self.g, "module", self.g))
        return d_loss.detach(), g_loss.detach()

    def weights(self) -> list[Tensor]:
        plain = [getattr(it, "module", it) for it in (self.g, self.d)]
        modules = [*plain, self.ema]
        found = [it.clone() for m in modules for it in m.state_dict().values()]
        return [*found, self.scale.detach().clone()]


def by_hand(gan: Gan | None = None, done: int = 0) -> tuple[list[float], list[Tensor]]:
    """The same training in one process, without any of mpitrain's classes."""
    gan, losses, ring, step = gan or Gan(), [], Ring(), 0
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(SAMPLES, 1, epoch).tolist()
        for start in range(0, SAMPLES, BATCH_SIZE):
            samples, step = [], step + 1
            if step <= done:
                continue
            for index in order[start : start + BATCH_SIZE]:
                with seeded(1, epoch, index):
                    samples.append(ring[index])
            real, noise = (torch.stack(part) for part in zip(*samples, strict=True))
            weights = torch.full((len(real),), 1 / len(real), dtype=torch.float64)
            found = gan.step(real, noise, weights)
            losses += [it.item() for it in found]
    return losses, gan.weights()


def loop(
    world: World, folder: Path, stop_at: int | None = None, **options: Any
) -> tuple[Gan, dict[str, Any] | None]:
    gan = Gan(DistributedDataParallel)
    loader = DataLoader(Ring(), BATCH_SIZE, **options)
    checkpointer, recorder = Checkpointer(folder), Recorder(folder)
    found = checkpointer.restore(**gan.objects, loader=loader)
    step = found["step"] if found else 0
    for epoch in range(loader.epoch, EPOCHS + 1):
        loader.set_epoch(epoch)
        for (real, noise), weights in loader:
            d_loss, g_loss = gan.step(real, noise, weights, world.world_size)
            step += 1
            lr = gan.scheduler.get_last_lr()[0]
            means = recorder.log(step, epoch=epoch, d=d_loss, g=g_loss, lr=lr)
            gan.plateau.step(step, means["d"])
            if step % 3 == 0:
                checkpointer.save(
                    step, **gan.objects, loader=loader, history=[step, "a"]
                )
            if step == stop_at:
                recorder.finish(stopped="as asked")
                return gan, found
        recorder.log(step, val_score=float(epoch))
    recorder.finish()
    checkpointer.close()
    return gan, found


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def steps_of(folder: Path) -> list[float]:
    found = Run(folder).metrics.steps
    assert [it.step for it in found] == list(range(1, EPOCHS * STEPS + 1))
    return [it.losses[name] for it in found for name in ("d", "g")]


def test_a_gan_in_a_custom_loop_is_that_of_one_process(
    world: World, ranks: Communicator, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, weights = by_hand()
    gan, _ = loop(world, run_dir / "a")
    same(gan.weights(), weights)
    if world.is_rank_zero:
        assert steps_of(run_dir / "a") == pytest.approx(losses, rel=1e-9)
        result = read_result(run_dir / "a")
        assert result["status"] == "finished"
        assert (result["steps"], result["val_score"]) == (EPOCHS * STEPS, 2.0)
        watch(WatchConfig(run=run_dir / "a", once=True))
        assert "finished: val_score 2.0000 after 2 epochs" in capsys.readouterr().out
        report(ReportConfig(run=run_dir / "a", pictures=False))
        page = (run_dir / "a" / "report.html").read_text()
        for title in ("Training d", "Training g", "Validation score"):
            assert title in page
        with pytest.raises(UsageError, match=r"has no model, but g, d, scale"):
            export(ExportConfig(run=run_dir / "a", output=run_dir / "model.pt"))
    ranks.allgather(None)
    loop(world, run_dir / "b")
    if world.is_rank_zero:
        lines, differs, _ = diff(DiffConfig(first=run_dir / "a", second=run_dir / "b"))
        assert not differs, lines
        assert "checkpoints: the same (2, up to step 6)" in lines
        assert f"steps: the same ({EPOCHS * STEPS}, up to step 8)" in lines
    ranks.allgather(None)


def test_losses_that_are_infinite_with_both_signs_end_no_loop(
    world: World, run_dir: Path
) -> None:
    recorder = Recorder(run_dir)
    of_rank = math.inf if world.is_rank_zero else -math.inf
    means = recorder.log(1, loss=torch.tensor(of_rank))
    assert math.isnan(means["loss"]) or world.world_size == 1
    for step, loss in ((2, math.inf), (3, -math.inf)):
        recorder.log(step, loss=loss)
    recorder.log(3, val_score=1.0)
    recorder.finish()
    if world.is_rank_zero:
        (epoch,) = Run(run_dir).metrics.epochs
        assert math.isnan(epoch.train_loss)


def test_a_loop_that_logs_some_steps_resumes_at_one_of_them(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    recorder = Recorder(run_dir)
    for step in (10, 20, 30):
        recorder.log(step, loss=1.0)
    recorder.finish(stopped="test")
    recorder.log(30, loss=2.0)  # after the checkpoint of step 20
    recorder.finish()
    if world.is_rank_zero:
        metrics = Run(run_dir).metrics
        assert [it.step for it in metrics.resumed] == [20]
        assert [it.loss for it in metrics.steps] == [1.0, 1.0, 2.0]
    ranks.allgather(None)


@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_custom_loop_resumes_exactly(
    world: World, ranks: Communicator, run_dir: Path, stop_at: int
) -> None:
    losses, weights = by_hand()
    loop(world, run_dir / "a", stop_at)
    if world.is_rank_zero:
        assert read_result(run_dir / "a")["status"] == "stopped"
        # And in one process, without DDP.
        (checkpoint,) = list_checkpoints(run_dir / "a")
        alone = Gan()
        load_objects(CheckpointReader(checkpoint), alone.objects)
        assert by_hand(alone, done=3)[0] == pytest.approx(losses[6:], rel=1e-9)
        same(alone.weights(), weights)
    gan, found = loop(world, run_dir / "a")
    assert found == {"step": 3, "history": [3, "a"]}
    assert gan.plateau.seen.keys() == set(range(1, EPOCHS * STEPS + 1))
    value, tensor, rest = gan.plateau.seen[1]
    assert (value, tensor.item(), rest) == (value, value, [None, float("inf")])
    same(gan.weights(), weights)
    if world.is_rank_zero:
        assert steps_of(run_dir / "a") == pytest.approx(losses, rel=1e-9)
    ranks.allgather(None)


def test_what_is_there_is_restored_before_it_is_saved_over(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    gan, _ = loop(world, run_dir / "a")
    again = Checkpointer(run_dir / "a")
    with pytest.raises(
        UsageError, match=r"save\(9\) without restore.*step-0+6 is there"
    ):
        again.save(9, **gan.objects)
    # A link to another disk is the run's own folder.
    folder = run_dir / "a/checkpoints"
    if world.is_rank_zero:
        folder.rename(run_dir / "elsewhere")
        folder.symlink_to(run_dir / "elsewhere")
    ranks.allgather(None)
    found = Checkpointer(run_dir / "a", resume=f"{folder}/step-00000003").restore(
        **gan.objects, loader=DataLoader(Ring(), BATCH_SIZE)
    )
    assert found is not None
    assert found["step"] == 3
    assert [it.step for it in list_checkpoints(run_dir / "a")] == [3]
    ranks.allgather(None)


class Shrinks(torch.optim.lr_scheduler.LRScheduler):
    """Takes off what was done."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.milestones = [1, 2, 8]
        self.seen: Any = collections.defaultdict(list)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.milestones and self.last_epoch >= self.milestones[0]:
            self.seen["at"].append(self.milestones.pop(0))
        return [0.1 for _ in self.optimizer.param_groups]


class Cut(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == 5:
            raise StopRequested("test")


def test_a_schedule_that_became_shorter_resumes(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    states = []
    for more in ([Cut()], []):
        trainer = Trainer(
            nn.Linear(2, 1),
            data,
            None,
            TrainConfig(epochs=4, global_batch_size=4, precision="fp64"),
            loss=lambda out, target: (out - target).square().mean(1),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            scheduler=lambda optimizer, _: Shrinks(optimizer),
            callbacks=[Checkpointer(run_dir / "a"), *more],
            world=world,
        )
        with contextlib.suppress(Stopped):
            trainer.fit()
        (part,) = trainer.engine.optimizer.optimizers
        states.append((part.scheduler.milestones, dict(part.scheduler.seen)))
        status = ranks.on_rank_zero(lambda: read_result(run_dir / "a"), "read")
        assert status["status"] == ("stopped" if more else "finished")
        assert ("stopped" in status) == bool(more)
    assert states == [([8], {"at": [1, 2]}), ([], {"at": [1, 2, 8]})]
    ranks.allgather(None)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(7.0))


def seen_by_all(loader: DataLoader, ranks: Communicator) -> list[list[float]]:
    """The samples of each global batch, by rank."""
    steps: list[list[float]] = [[]]
    for batch, weights in loader:
        values = batch[0] if isinstance(batch, tuple) else batch
        steps[-1] += values[: len(loader.indices)].tolist()
        assert len(values) == len(weights)
        assert weights[len(loader.indices) :].tolist() == [0.0] * (
            len(weights) - len(loader.indices)
        )
        if loader.sync_gradients:
            steps.append([])
    of_ranks = ranks.allgather(steps[:-1])
    return [list(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (torch.arange(7.0), {}),
        (torch.arange(7.0), {"micro_batch_size": 1, "min_rows": 2}),
        (TensorDataset(torch.arange(7.0), torch.arange(7)), {}),
        (list(torch.arange(7.0)), {"num_workers": "auto"}),
        (Stream(), {}),
        (Stream(), {"num_workers": 1, "collate_fn": torch.stack}),
    ],
    ids=["tensor", "micro-batches", "pairs", "auto", "stream", "workers"],
)
def test_a_loader_yields_each_sample_once_and_resumes_at_a_step(
    data: Any, options: dict[str, Any], ranks: Communicator
) -> None:
    def make() -> DataLoader:
        return DataLoader(data, 3, shuffle=False, **options)

    loader = make()
    steps = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
    assert seen_by_all(loader, ranks) == steps
    assert (loader.epoch, loader.step) == (2, 0)
    for _ in loader:
        if loader.sync_gradients:
            break
    again = make()
    again.load_state_dict(loader.state_dict())
    again.set_epoch(2)
    assert seen_by_all(again, ranks) == steps[1:]
    with pytest.raises(UsageError, match="within an epoch of other batches"):
        DataLoader(data, 4, shuffle=False).load_state_dict(loader.state_dict())


def test_a_loader_that_was_left_begins_its_epoch_anew(ranks: Communicator) -> None:
    """As torch's: a validation with a limit has the same batches each time."""
    loader = DataLoader(torch.arange(7.0), 3, shuffle=False)
    steps = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
    for _ in range(2):
        next(iter(loader))
        assert (loader.epoch, loader.step) == (1, 1)
    state = loader.state_dict()
    assert seen_by_all(loader, ranks) == steps
    loader.load_state_dict(state)
    assert seen_by_all(loader, ranks) == steps[1:]
    assert seen_by_all(loader, ranks) == steps  # not once more behind that step


def test_a_shuffled_loader_that_was_left_has_another_order_next(
    ranks: Communicator,
) -> None:
    """As torch's: a loop with a ``break`` sees other samples each time."""

    def make() -> DataLoader:
        return DataLoader(torch.arange(7.0), 3)

    def order(epoch: int) -> list[float]:
        return [float(it) for it in epoch_order(7, 1, epoch)]

    def flat(loader: DataLoader) -> list[float]:
        return list(itertools.chain(*seen_by_all(loader, ranks)))

    loader = make()
    for epoch in (1, 2):
        next(iter(loader))
        assert (loader.epoch, loader.step) == (epoch, 1)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert flat(again) == order(2)[3:]
    assert flat(loader) == order(3)
    next(iter(loader))
    loader.set_epoch(4)  # the one that was left
    assert flat(loader) == order(4)
    next(iter(loader))
    loader.set_epoch(2)
    assert flat(loader) == order(2)
    assert loader.epoch == 3


def test_a_loader_that_resumes_with_another_order_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    state = DataLoader(torch.arange(7.0), 3).state_dict()
    DataLoader(torch.arange(7.0), 3).load_state_dict(state)
    DataLoader(torch.arange(7.0) + 1, 3, seed=2).load_state_dict(state)
    del state["first_sample"]  # as of an older version
    DataLoader(torch.arange(7.0) + 1, 3).load_state_dict(state)
    assert not caplog.messages
    state = DataLoader(torch.arange(7.0), 3).state_dict()
    DataLoader(torch.arange(7.0) + 1, 3).load_state_dict(state)
    assert len(caplog.messages) == world.is_rank_zero
    assert all("is not that of the checkpoint" in it for it in caplog.messages)


def test_what_does_not_fit_is_refused_by_name_on_all_ranks(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    with pytest.raises(UsageError, match="micro_batch_size is 0; expected 1 or more"):
        DataLoader(torch.arange(7.0), 3, micro_batch_size=0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(run_dir / "a")
    with pytest.raises(UsageError, match="opt trains a weight that no module has"):
        checkpointer.save(1, opt=optimizer)
    plateau = Plateau()
    plateau.seen[1] = (object(),)
    with pytest.raises(UsageError, match="objects/p/value/seen/1/0 is object; expect"):
        checkpointer.save(1, p=plateau)
    checkpointer.save(1, model=model, opt=optimizer)
    again = Checkpointer(run_dir / "a")
    with pytest.raises(UsageError, match="has no g; expected some of model, opt"):
        again.restore(g=model)
    with pytest.raises(UsageError, match=r"restore\(n=...\) is int; expected a module"):
        again.restore(n=1)
    assert again.restore(model=model) == {"step": 1}
    recorder = Recorder(run_dir / "a")
    recorder.log(1, loss=1.0)
    if world.world_size > 1:
        with pytest.raises(UsageError, match="expected the same names"):
            recorder.log(2, **{f"of_{world.rank}": 1.0})
    recorder.finish()
    recorder.log(2, val_loss=3.0)  # opens it again
    recorder.finish()
    checkpointer.close()
    if world.is_rank_zero:
        metrics = Run(run_dir / "a").metrics
        assert [it.loss for it in metrics.steps] == [1.0]
        assert [(it.epoch, it.values["loss"]) for it in metrics.epochs] == [(1, 3.0)]
    ranks.allgather(None)


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_sharded_states_come_back_by_name(
    kind: str, world: World, ranks: Communicator, run_dir: Path
) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(world.world_size)
        model = mlp(4, 3)
        if kind == "fsdp":
            fully_shard(model)
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, "lr": 0.1}
        return model, ZeroRedundancyOptimizer(model.parameters(), **options)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.02
    checkpointer = Checkpointer(run_dir / "a")
    with torch.no_grad():  # FSDP keeps the root's whole weights
        model(torch.ones(2, 4, dtype=torch.float64))
    checkpointer.save(1, net=model, opt=optimizer)
    checkpointer.close()
    again, fresh = make()
    with torch.no_grad():
        again(torch.ones(2, 4, dtype=torch.float64))
    restored = Checkpointer(run_dir / "a")
    with pytest.raises(UsageError, match="opt trains a weight that no module has"):
        restored.restore(opt=fresh)
    assert restored.restore(net=again, opt=fresh) == {"step": 1}
    assert fresh.param_groups[0]["lr"] == 0.02
    for it in (model, optimizer), (again, fresh):
        step(*it)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        local, expected = (
            getattr(w, "to_local", lambda w=w: w)() for w in (other, one)
        )
        assert torch.equal(local, expected)
    ranks.allgather(None)


def test_a_weight_of_two_modules_has_its_state_by_either_name(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(1)
        encoder = mlp(4, 3)
        full = nn.Sequential(encoder, mlp(3, 1))
        optimizer = torch.optim.AdamW(full.parameters(), lr=0.1)
        return {"encoder": encoder, "full": full, "opt": optimizer}

    def step(of: dict[str, Any]) -> None:
        of["full"](torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        of["opt"].step()
        of["opt"].zero_grad()

    expected = make()
    step(expected)
    checkpointer = Checkpointer(run_dir / "a")
    checkpointer.save(1, **expected)
    checkpointer.close()
    step(expected)
    for order in (("encoder", "full", "opt"), ("full", "encoder", "opt")):
        found = make()
        Checkpointer(run_dir / "a").restore(**{name: found[name] for name in order})
        step(found)
        same([*found["full"].parameters()], [*expected["full"].parameters()])
    # The names of its states are those of the encoder, which is not there.
    alone = make()
    with pytest.raises(
        UsageError, match=r"opt: .*state of encoder/0\.bias, .*no module"
    ):
        Checkpointer(run_dir / "a").restore(full=alone["full"], opt=alone["opt"])
    # Of a part of the weights an optimizer has all that it needs.
    part = make()
    optimizer = torch.optim.AdamW(part["encoder"].parameters(), lr=0.1)
    Checkpointer(run_dir / "a").restore(encoder=part["encoder"], opt=optimizer)
    assert len(optimizer.state) == 4
    ranks.allgather(None)


def test_a_sharded_model_takes_the_state_of_a_fused_optimizer(
    world: World, ranks: Communicator, run_dir: Path
) -> None:
    """A fused kernel does not take its weights, so the flag is not loaded."""
    one, other = mlp(4, 3), mlp(4, 3)
    fully_shard(other)
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=0.1, fused=True),
        torch.optim.AdamW(other.parameters(), lr=0.2),
    ]
    inputs = torch.ones(2, 4, dtype=torch.float64)
    one(inputs).square().sum().backward()
    optimizers[0].step()
    checkpointer = Checkpointer(run_dir / "a")
    checkpointer.save(1, model=one, opt=optimizers[0])
    checkpointer.close()
    Checkpointer(run_dir / "a").restore(model=other, opt=optimizers[1])
    for model, optimizer in zip((one, other), optimizers, strict=True):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    for whole, shard in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), whole)
    ranks.allgather(None)


def test_a_checkpoint_of_an_older_version_is_restored(
    world: World, ranks: Communicator, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    encode = manager.encode_json

    def older(metadata: Any) -> bytes:
        groups = [{"lr": 0.1, "momentum": 0.8}]
        kept = {key: it for key, it in metadata.items() if key != "objects"}
        return encode({**kept, "param_groups": groups})

    monkeypatch.setattr(manager, "encode_json", older)
    checkpointer = Checkpointer(run_dir / "a")
    checkpointer.save(1, model=model, optimizer=optimizer, state={"a": 1})
    checkpointer.close()
    again = mlp(4, 3)
    fresh = torch.optim.SGD(again.parameters(), lr=0.3, momentum=0.9)
    found = Checkpointer(run_dir / "a").restore(model=again, optimizer=fresh)
    assert found == {"a": 1, "step": 1}
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (
        0.1,
        0.8,
    )
    same([*again.parameters()], [*model.parameters()])
    buffers = [
        [state["momentum_buffer"] for state in of.state.values()]
        for of in (fresh, optimizer)
    ]
    same(*buffers)
    ranks.allgather(None)

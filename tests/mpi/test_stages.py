"""Stages: which weights are trained one after another, how long and how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import BATCH_SIZE, NUM_SAMPLES, History, Net, Stops, some
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from mpitrain import (
    Callback,
    Checkpointer,
    DataError,
    EarlyStopping,
    Stage,
    Stopped,
    Task,
    TrainConfig,
    Trainer,
    UsageError,
    World,
)
from mpitrain.data.sharding import epoch_order

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

VAL, STEPS = 29, 5  # samples of the validation; steps of an epoch
DDP: dict[str, Any] = {}
MICRO = {"micro_batch_size": 3}
FSDP = {"strategy": "fsdp"}
BITWISE = {"bitwise": True}
ZERO = {"shard_optimizer": True}

STAGES = [
    Stage(epochs=1, trainable="head"),
    Stage(epochs=2, trainable=r"blocks.1|head", lr=0.02, name="upper"),
    Stage(epochs=1, lr_factor=0.1),
]
PEAKS = [0.05, 0.02, 0.005]
TRAINED = ["head", ("blocks.1", "head"), ""]


def trained(
    world: World, *callbacks: Callback, model: nn.Module | None = None, **kinds: Any
) -> tuple[History, dict[str, Tensor]]:
    history = History()
    names = {"task", "optimizer", "scheduler", "stages"}
    given = {name: kinds.pop(name) for name in names & kinds.keys()}
    plain: dict[str, Any] = {
        "precision": "fp64",
        "global_batch_size": BATCH_SIZE,
        "lr": 0.05,
        "schedule": "linear",
        "warmup_epochs": 0,
    }
    trainer = Trainer(
        model or Net(),
        some(NUM_SAMPLES),
        some(VAL, "val"),
        TrainConfig(**plain | kinds),
        world=world,
        callbacks=[history, *callbacks],
        **{"stages": STAGES, **given},
    )
    try:
        trainer.fit()
    except Stopped:
        return history, {}
    return history, trainer.state_dict()


def by_hand() -> tuple[list[float], list[float], nn.Module]:
    """Losses of steps and validations, and the model."""
    model = Net().double()
    inputs, targets = some(NUM_SAMPLES).tensors
    losses, validations = [], []
    epoch = 0
    for stage, peak, names in zip(STAGES, PEAKS, TRAINED, strict=True):
        for name, weight in model.named_parameters():
            weight.requires_grad_(name.startswith(names))
            weight.grad = None
        weights = [it for it in model.parameters() if it.requires_grad]
        optimizer = torch.optim.SGD(
            weights, lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        total, done = stage.epochs * STEPS, 0
        for _ in range(stage.epochs):
            epoch += 1
            order = torch.from_numpy(epoch_order(NUM_SAMPLES, 1, epoch))
            for chosen in order.split(BATCH_SIZE):
                optimizer.param_groups[0]["lr"] = peak * (1 - done / total)
                outputs = model(inputs[chosen].double())
                loss = F.cross_entropy(outputs, targets[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                done += 1
            with torch.no_grad():
                x, y = some(VAL, "val").tensors
                validations.append(F.cross_entropy(model(x.double()), y).item())
    return losses, validations, model


@pytest.mark.parametrize(
    "settings", [DDP, MICRO, FSDP, FSDP | MICRO, BITWISE, BITWISE | FSDP, ZERO], ids=str
)
def test_stages_train_as_in_one_process(world: World, settings: dict[str, Any]) -> None:
    history, state = trained(world, **settings)
    losses, validations, model = by_hand()
    assert [it.loss for it in history.steps] == pytest.approx(losses, rel=1e-9)
    found = [it.values["loss"] for it in history.epochs]
    assert found == pytest.approx(validations, rel=1e-9)
    names = [it.stage for it in history.epochs]
    assert names == ["stage-1", "upper", "upper", "stage-3"]
    if world.is_rank_zero:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    ("settings", "step"),
    [(DDP, 3), (DDP, 5), (DDP, 17), (FSDP, 8), (FSDP, 17), (BITWISE, 8), (ZERO, 8)],
)
def test_a_training_resumes_in_any_stage(
    world: World, run_dir: Path, step: int, settings: dict[str, Any]
) -> None:
    """Also between two, and with the averages of the weights."""
    settings = settings | {"ema_decay": 0.9}
    whole, expected = trained(world, **settings)
    first, _ = trained(world, Stops(step), Checkpointer(run_dir), **settings)
    second, state = trained(world, Checkpointer(run_dir), **settings)
    found = first.steps + second.steps
    assert [it[1:5] for it in found] == [it[1:5] for it in whole.steps]
    if world.is_rank_zero:
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def test_a_run_resumes_with_the_same_stages_only(world: World, run_dir: Path) -> None:
    trained(world, Stops(3), Checkpointer(run_dir))
    others = [Stage(epochs=1, trainable="blocks.1"), *STAGES[1:]]
    with pytest.raises(UsageError, match=r"stages: .*'head'.* -> .*'blocks\.1'"):
        trained(world, Checkpointer(run_dir), stages=others)


def test_another_run_begins_with_an_optimizer_of_its_own_weights(
    world: World, run_dir: Path
) -> None:
    trained(world, Stops(7), Checkpointer(run_dir), stages=[Stage(epochs=2)])
    others = [Stage(epochs=1), Stage(epochs=1, trainable="head")]
    resume = str(run_dir)
    other = run_dir.with_name("other")
    history, _ = trained(world, Checkpointer(other, resume=resume), stages=others)
    assert [it.stage for it in history.epochs] == ["stage-2"]
    assert [it.step for it in history.steps] == [8, 9, 10]


@pytest.mark.parametrize("settings", [DDP, FSDP, BITWISE | FSDP], ids=str)
def test_a_probe_is_a_list_of_stages(world: World, settings: dict[str, Any]) -> None:
    probe = trained(
        world, **settings, probe_epochs=2, epochs=1, finetune_lr_factor=0.5, stages=None
    )
    stages = [
        Stage(epochs=2, name="probe"),
        Stage(epochs=1, name="finetune", lr_factor=0.5),
    ]
    same = trained(world, **settings, stages=stages)
    assert same[0].steps == probe[0].steps
    assert [it.stage for it in same[0].epochs] == ["probe", "probe", "finetune"]
    if world.is_rank_zero:
        for name, value in probe[1].items():
            assert torch.equal(same[1][name], value), name


@pytest.mark.parametrize("settings", [DDP, FSDP, BITWISE | FSDP], ids=str)
def test_a_probe_may_follow_another_stage(
    world: World, settings: dict[str, Any]
) -> None:
    """With fsdp on the sharded model, without features."""
    first, last = Stage(epochs=1), Stage(epochs=1)
    found = [
        trained(world, **settings, stages=[first, middle, last])
        for middle in (Stage(epochs=1, name="probe"), Stage(epochs=1, trainable="head"))
    ]
    losses = [[it.loss for it in history.steps] for history, _ in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Deep(nn.Module):
    """Blocks with batch norm and dropout; the embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(64, 8)
        self.layers = nn.ModuleDict({name: self._layer() for name in ("2", "20")})
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 10, bias=False)
        self.table = nn.Embedding(10, 8)
        self.head.weight = self.table.weight

    def _layer(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))

    def forward(self, images: Tensor) -> Tensor:
        features = self.inner(images.flatten(1))
        for layer in self.layers.values():
            features = layer(features)
        return self.head(self.dropout(features))


class Watches(Callback):
    """Keeps the weights that require gradients, and the modules in training mode."""

    def __init__(self) -> None:
        self.found: list[tuple[set[str], set[str]]] = []

    def on_step_end(self, trainer: Any) -> None:
        weights = trainer.model.named_parameters()
        modules = trainer.model.named_modules()
        trained = {name for name, it in weights if it.requires_grad}
        now = trained, {name for name, it in modules if it.training}
        if not self.found or self.found[-1] != now:
            self.found.append(now)


def test_a_module_of_frozen_weights_is_in_evaluation_mode(world: World) -> None:
    model, watches = Deep(), Watches()
    model.inner.bias.requires_grad_(False)
    model.layers["20"].eval()
    before = {name: it.clone() for name, it in model.state_dict().items()}
    stages = [Stage(epochs=1, trainable=r"layers.2"), Stage(epochs=1)]
    trained(world, watches, model=model, stages=stages)
    first, second = watches.found
    layer = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert first[0] == {f"layers.2.{name}" for name in layer}
    # A module without weights, such as dropout, follows the one that it is in.
    parts = {"layers.2", *(f"layers.2.{i}" for i in range(3))}
    assert first[1] == {"", "layers", "dropout", *parts}
    both = {f"layers.{i}.{name}" for i in (2, 20) for name in layer}
    assert second[0] == {"inner.weight", "head.weight", *both}
    assert "layers.20.1" not in second[1]
    assert second[1] >= {"inner", "head", "layers.2.1"}
    after = model.state_dict()
    name = "layers.20.1.running_mean"
    assert torch.equal(after[name], before[name].to(after[name].dtype))
    assert not model.inner.bias.requires_grad
    assert all(it.requires_grad for it in model.layers.parameters())


def test_a_shared_weight_is_trained_under_each_of_its_names(world: World) -> None:
    for name in ("head", "table"):
        watches = Watches()
        stages = [Stage(epochs=1, trainable=name)]
        trained(world, watches, model=Deep(), stages=stages)
        assert [it[0] for it in watches.found] == [{"head.weight"}]


def test_weights_that_were_frozen_are_trained_if_they_are_named(world: World) -> None:
    model, watches = Net(), Watches()
    model.requires_grad_(False)
    trained(world, watches, model=model, stages=[Stage(epochs=1, trainable="bias")])
    names = {"blocks.0.0.bias", "blocks.1.0.bias", "head.bias"}
    assert [it[0] for it in watches.found] == [names]
    assert not any(it.requires_grad for it in model.parameters())


def test_an_optimizer_of_ones_own_is_made_for_each_stage(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    made = []

    def adam(model: nn.Module) -> Any:
        weights = [it for it in model.parameters() if it.requires_grad]
        made.append(len(weights))
        return torch.optim.Adam(weights, lr=0.01)

    def scheduler(optimizer: Any, total_steps: int | None) -> Any:
        made.append(total_steps)
        return LinearLR(optimizer, 0.5, total_iters=2)

    stages = [Stage(epochs=1, trainable="head"), Stage(epochs=2, lr_factor=0.1)]
    history, _ = trained(world, optimizer=adam, scheduler=scheduler, stages=stages)
    assert made == [2, STEPS, 6, 2 * STEPS]
    rates = [it.lr for it in history.steps]
    expected = [[0.005, 0.0075, *[0.01] * 3], [0.0005, 0.00075, *[0.001] * 8]]
    assert rates == pytest.approx([*expected[0], *expected[1]], rel=1e-9)
    with pytest.raises(UsageError, match=r"Stage\(lr=0.1\) .* expected Stage\(lr_f"):
        trained(world, optimizer=adam, stages=[Stage(epochs=1, lr=0.1)])

    def one_cycle(optimizer: Any, total_steps: int | None) -> Any:
        return OneCycleLR(optimizer, 0.05, total_steps)

    caplog.clear()
    trained(world, optimizer=adam, scheduler=one_cycle, stages=stages)
    if world.is_rank_zero:
        assert "lr_factor=0.1 of stage 'stage-2' has an effect only if" in caplog.text

    def whole(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters())

    with pytest.raises(UsageError, match=r"frozen: blocks\.0\.0\.weight"):
        trained(world, optimizer=whole, stages=stages)


@pytest.mark.parametrize("settings", [DDP, FSDP], ids=str)
def test_the_best_weights_are_those_of_its_stage(
    world: World, run_dir: Path, settings: dict[str, Any]
) -> None:
    """With averages of other weights than in the last stage."""
    best = Stage(epochs=2, trainable=r"blocks.1", lr=0.2)
    for last in (Stage(epochs=1, trainable="head", lr=10.0), Stage(epochs=1, lr=10.0)):
        folder = run_dir.with_name(last.trainable or "all")
        checkpointer = Checkpointer(folder, best_by="val_loss", load_best_at_end=True)
        stages, more = [best, last], {"ema_decay": 0.5, **settings}
        history, state = trained(world, checkpointer, stages=stages, **more)
        values = [it.values["loss"] for it in history.epochs]
        assert values[-1] > min(values)
        model = Net().double()
        if world.is_rank_zero:
            model.load_state_dict(state)
            x, y = some(VAL, "val").tensors
            loss = F.cross_entropy(model(x.double()), y).item()
            assert loss == pytest.approx(min(values), rel=1e-9)


@pytest.mark.parametrize(
    ("stages", "settings", "error"),
    [
        ([Stage(epochs=1, trainable="haed")], DDP, r"'haed'\) matches no .*, head$"),
        ([Stage(epochs=1), Stage(epochs=1, trainable="block")], DDP, "matches no w"),
        ([Stage(epochs=1)], {"epochs": 3}, "stages= and epochs of the TrainConfig"),
        ([Stage(epochs=1)], {"max_steps": 3}, "stages= and max_steps of"),
        ([Stage(epochs=1, name="a")] * 2, DDP, r"the names \['a', 'a'\]"),
        ([], DDP, r"stages=\[\]; expected a list of mpitrain.Stage"),
        (STAGES[0], DDP, r"expected a list of mpitrain.Stage"),
    ],
)
def test_stages_that_do_not_fit_are_refused_at_the_start(
    world: World, stages: Any, settings: dict[str, Any], error: str
) -> None:
    history = History()
    with pytest.raises(UsageError, match=error):
        trained(world, history, stages=stages, **settings)
    assert not history.steps


def test_a_stage_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'\(head'\) is no regular expression"):
        Stage(epochs=1, trainable="(head")
    with pytest.raises(UsageError, match="has 0 epochs; expected at least 1"):
        Stage(epochs=0)


def test_stages_that_differ_between_ranks_are_refused(world: World) -> None:
    if world.world_size > 1:
        with pytest.raises(DataError, match="stages= differs between ranks"):
            trained(world, stages=STAGES[world.rank % 2 :])


def test_a_dry_run_tries_the_first_stage(world: World) -> None:
    history, _ = trained(world, dry_run=True)
    assert [it.step for it in history.steps] == [1]
    assert [it.stage for it in history.epochs] == ["stage-1"]


class Regression(Task):
    """No images, and no head."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets[:, None]).square()


def test_a_task_of_ones_own_has_stages_of_any_name(world: World) -> None:
    watches = Watches()
    stages = [
        Stage(epochs=1, name="probe", trainable="head"),
        Stage(epochs=1, name="all"),
    ]
    history, _ = trained(world, watches, task=Regression(), stages=stages)
    assert [it.stage for it in history.epochs] == ["probe", "all"]
    assert watches.found[0][0] == {"head.weight", "head.bias"}


def test_early_stopping_names_the_stages_that_are_not_trained(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = [Stage(epochs=4, name="first"), Stage(epochs=1, name="second")]
    history, _ = trained(world, EarlyStopping("max:loss", patience=2), stages=stages)
    assert history.epochs[-1].stage == "first"
    if world.is_rank_zero:
        assert "before; not trained: second\n" in capfd.readouterr().out

"""Optimizers and schedulers that the user makes, one or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launcher import slow
from reference_training import BATCH_SIZE, History, Net, Stops, some
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler

from mpitrain import (
    Callback,
    Checkpointer,
    DataError,
    Stopped,
    Task,
    TrainConfig,
    Trainer,
    UsageError,
    World,
)
from mpitrain.checkpoint import training_state
from mpitrain.data.randomness import seed_all, step_seed
from mpitrain.data.sharding import epoch_order
from mpitrain.train.scheduled_optimizers import ScheduledOptimizer

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step()"),
]

NUM, VAL, EPOCHS, STEPS = 40, 13, 2, 3  # 16, 16 and 8 samples
DDP: dict[str, Any] = {}
FSDP = {"strategy": "fsdp"}
MICRO = {"micro_batch_size": 3}
BITWISE = {"bitwise": True}


class Momentum(torch.optim.Optimizer):
    """SGD with a count in Python, and a factor that grows in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "growth": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            group["growth"] *= 1.1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 / state["count"])
                weight.add_(mean, alpha=-group["lr"] * group["growth"])


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    named = dict(model.named_parameters())
    return (
        [it for name, it in named.items() if it.ndim > 1],
        [it for name, it in named.items() if it.ndim < 2],
    )


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices, biases = split(model)
    return [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": biases, "lr": 0.03, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(groups_of(model))


def momentum(model: nn.Module) -> Any:
    return Momentum(model.parameters(), lr=0.1)


def muon_and_adamw(model: nn.Module) -> Any:
    matrices, biases = split(model)
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),  # type: ignore[attr-defined]
        torch.optim.AdamW(biases, lr=0.03),
    ]


def adafactor(model: nn.Module) -> Any:
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


def zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW)


def listed(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def config_of(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "precision": "fp64",
        "epochs": EPOCHS,
        "global_batch_size": BATCH_SIZE,
        "schedule": "constant",
        "warmup_epochs": 0,
    }
    if "warmup_steps" in settings:
        del plain["warmup_epochs"]
    return TrainConfig(**plain | settings)


def trained(
    world: World, settings: dict[str, Any], **kinds: Any
) -> tuple[History, dict[str, Tensor]]:
    history = History()
    callbacks = [history, *kinds.pop("callbacks", [])]
    trainer = Trainer(
        kinds.pop("model", None) or Net(),
        some(NUM),
        some(VAL, "val"),
        config_of(**settings),
        world=world,
        callbacks=callbacks,
        **kinds,
    )
    try:
        trainer.fit()
    except Stopped:
        return history, {}
    return history, trainer.state_dict()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    inputs, targets = some(NUM).tensors
    for epoch in range(1, EPOCHS + 1):
        order = torch.from_numpy(np.array(epoch_order(NUM, 1, epoch)))
        for chosen in order.split(BATCH_SIZE):
            yield inputs[chosen].double(), targets[chosen]


def val_loss(model: nn.Module) -> float:
    inputs, targets = some(VAL, "val").tensors
    with torch.no_grad():
        return F.cross_entropy(model(inputs.double()), targets).item()


def by_hand(
    make: Callable[[nn.Module], Any],
    schedule: Callable[[int], float] | None = None,
    scheduler: Callable[[Any], Any] = lambda _: None,
    *,
    is_by_epoch: bool = False,
) -> tuple[list[float], list[float], nn.Module, list[list[float]]]:
    """Losses of steps and validations, the model, and each step's learning rates."""
    model = Net().double()
    optimizers = listed(make(model))
    groups = [group for it in optimizers for group in it.param_groups]
    peaks = [group["lr"] for group in groups]
    schedulers = [it for it in map(scheduler, optimizers) if it is not None]
    losses, validations, rates = [], [], []
    for step, (x, y) in enumerate(batches()):
        if schedule:
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * schedule(step)
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        rates.append([group["lr"] for group in groups])
        for it in optimizers:
            it.step()
        losses.append(loss.item())
        ends = (step + 1) % STEPS == 0
        if ends:
            validations.append(val_loss(model))
        for it in schedulers:
            if isinstance(it, lr_scheduler.ReduceLROnPlateau):
                if ends:
                    it.step(validations[-1])
            elif ends or not is_by_epoch:
                it.step()
    return losses, validations, model, rates


def check_same(
    world: World, found: tuple[History, dict[str, Tensor]], hand: Any
) -> None:
    (history, state), (losses, validations, model, rates) = found, hand
    steps = history.steps
    assert [it.loss for it in steps] == pytest.approx(losses, rel=1e-9)
    values = [it.values["loss"] for it in history.epochs]
    assert values == pytest.approx(validations, rel=1e-9)
    for step, expected in zip(steps, rates, strict=True):
        mine = step.lr_groups or (step.lr,) * len(expected)
        assert list(mine) == pytest.approx(expected, rel=1e-12)
    if world.is_rank_zero:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-11)


# --- optimizers ---------------------------------------------------------------------

MAKES = [adamw, momentum, muon_and_adamw]


@pytest.mark.parametrize(
    ("make", "settings"),
    [(make, it) for make in MAKES for it in (DDP, MICRO, BITWISE)]
    + [(adamw, FSDP), (adamw, BITWISE | FSDP), (momentum, FSDP), (adafactor, DDP)],
)
def test_an_optimizer_trains_as_in_one_process(
    world: World, make: Any, settings: dict[str, Any]
) -> None:
    check_same(world, trained(world, settings, optimizer=make), by_hand(make))


def test_muon_rounds_to_bfloat16_and_with_fsdp_by_shards(world: World) -> None:
    history, _ = trained(world, FSDP, optimizer=muon_and_adamw)
    losses, *_ = by_hand(muon_and_adamw)
    assert [it.loss for it in history.steps] == pytest.approx(losses, rel=1e-3)


def test_what_adds_up_shards_is_refused_with_bitwise(world: World) -> None:
    for make, name in ((muon_and_adamw, "Muon"), (momentum, "Momentum")):
        with pytest.raises(UsageError, match=f"{name}: .*--bitwise .*fsdp"):
            trained(world, BITWISE | FSDP, optimizer=make)


def test_the_schedule_multiplies_the_rate_of_each_group(world: World) -> None:
    def schedule(step: int) -> float:
        return (step + 1) / 2 if step < 2 else 1 - (step - 2) / 4

    settings = {"schedule": "linear", "warmup_steps": 2}
    found = trained(world, settings, optimizer=adamw)
    check_same(world, found, by_hand(adamw, schedule))


def test_zero_shards_the_state_of_an_optimizer_of_groups(world: World) -> None:
    found = trained(world, {"shard_optimizer": True}, optimizer=zero)
    check_same(world, found, by_hand(adamw))


@pytest.mark.parametrize("settings", [DDP, FSDP], ids=str)
def test_biases_are_not_decayed_if_the_flag_says_so(
    world: World, settings: dict[str, Any]
) -> None:
    settings = settings | {
        "optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "bias_decay": False,
    }  # fmt: skip

    def make(model: nn.Module) -> Any:
        matrices, biases = split(model)
        groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    check_same(world, trained(world, settings), by_hand(make))


def frozen() -> Net:
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


OTHER = Net()


@pytest.mark.parametrize("settings", [slow(DDP), FSDP], ids=str)
@pytest.mark.parametrize(
    ("make", "model", "error"),
    [
        (lambda it: torch.optim.SGD(it.head.parameters()), Net, "in no group: bl"),
        (
            lambda it: [adamw(it), torch.optim.SGD([it.head.bias])],
            Net,
            "in two groups: head.bias",
        ),
        (
            lambda it: torch.optim.SGD(it.parameters()),
            frozen,
            "frozen: blocks.0.0.weight, blocks.0.0.bias",
        ),
        (lambda it: torch.optim.SGD(OTHER.parameters()), Net, "of another model"),
        (lambda it: it, Net, "Net: expected an object of torch.optim.Optimizer"),
        (lambda it: {}, Net, "in no group"),
        (
            lambda it: torch.optim.LBFGS(it.parameters()),
            Net,
            r"LBFGS: its step\(\) needs a closure",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_the_model_is_refused(
    world: World, make: Any, model: Any, error: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=error):
        trained(world, settings, optimizer=make, model=model())


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD(OTHER.parameters())]
)
def test_an_optimizer_in_place_of_its_function_is_refused(
    world: World, kind: Any
) -> None:
    with pytest.raises(UsageError, match="optimizer= has to be a function, found"):
        trained(world, DDP, optimizer=kind)
    with pytest.raises(UsageError, match=r"scheduler= .*of optimizer and total_steps"):
        trained(world, DDP, scheduler=lambda optimizer: None)


def test_optimizers_that_ranks_make_differently_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    makes = [adamw, momentum]
    with pytest.raises(
        DataError, match=r"differs between ranks: AdamW of 3 . 3 weights"
    ):
        trained(world, DDP, optimizer=makes[world.rank == 1])


def test_what_does_not_take_sharded_weights_is_named(world: World) -> None:
    with pytest.raises(UsageError, match="Adafactor does not take the weights of --st"):
        trained(world, FSDP, optimizer=adafactor)


def test_zero_has_to_be_made_by_the_function(world: World) -> None:
    if world.world_size > 1:
        with pytest.raises(UsageError, match="optimizer_class=AdamW"):
            trained(world, {"shard_optimizer": True}, optimizer=adamw)


def test_settings_without_effect_are_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, {"lr": 0.5, "momentum": 0.2}, optimizer=adamw)
    if world.is_rank_zero:
        assert "replace lr, momentum of the TrainConfig" in caplog.text


# --- schedulers ---------------------------------------------------------------------


def one_cycle(optimizer: Any, total_steps: int | None = EPOCHS * STEPS) -> Any:
    assert total_steps is not None
    return lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=total_steps)


def multi_step(optimizer: Any, total_steps: int | None = None) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)


def plateau(optimizer: Any, total_steps: int | None = None) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)


def sequential(optimizer: Any, total_steps: int | None = None) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def by_epoch(optimizer: Any, total_steps: int | None = None) -> Any:
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.3)
    return {"scheduler": scheduler, "interval": "epoch"}


SCHEDULERS = [one_cycle, multi_step, plateau, sequential, by_epoch]


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [(it, DDP) for it in SCHEDULERS]
    + [(plateau, FSDP), (by_epoch, FSDP)]
    + [slow(it, FSDP) for it in SCHEDULERS[:2] + SCHEDULERS[3:4]],
)
def test_a_scheduler_sets_the_rates_as_in_one_process(
    world: World, scheduler: Any, settings: dict[str, Any]
) -> None:
    found = trained(world, settings, optimizer=adamw, scheduler=scheduler)

    def plain(optimizer: Any) -> Any:
        made = scheduler(optimizer)
        return made["scheduler"] if isinstance(made, dict) else made

    is_by_epoch = scheduler is by_epoch
    check_same(world, found, by_hand(adamw, None, plain, is_by_epoch=is_by_epoch))


def test_a_scheduler_may_be_of_the_configured_optimizer(world: World) -> None:
    settings = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}
    found = trained(world, settings, scheduler=multi_step)

    def make(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    check_same(world, found, by_hand(make, None, multi_step))


@pytest.mark.parametrize(
    ("scheduler", "error"),
    [
        (lambda it, _: it, "made AdamW: expected a LRScheduler"),
        (lambda it, _: [multi_step(it)] * 2, "made 2 for 1 optimizers"),
        (lambda it, _: {"scheduler": multi_step(it)}, "found {'interval': None}"),
        (
            lambda it, _: {"scheduler": multi_step(it), "interval": "step", "at": 1},
            "found {'at': 1}",
        ),
        (
            lambda it, _: {"scheduler": plateau(it), "interval": "step"},
            "expected a monitor for ReduceLROnPlateau alone, each epoch",
        ),
        (
            lambda it, _: {
                "scheduler": multi_step(it),
                "interval": "epoch",
                "monitor": "loss",
            },
            "expected a monitor for ReduceLROnPlateau alone",
        ),
        (lambda it, _: multi_step(adamw(Net())), "it is of another optimizer"),
        (
            lambda it, _: {"scheduler": plateau(it), "monitor": "f1"},
            "monitors 'f1', which the validation does not have; found loss, accuracy",
        ),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused(
    world: World, scheduler: Any, error: str
) -> None:
    with pytest.raises(UsageError, match=error):
        trained(world, DDP, optimizer=adamw, scheduler=scheduler)


def test_a_scheduler_on_a_metric_needs_a_validation(world: World) -> None:
    history = History()
    trainer = Trainer(
        Net(),
        some(NUM),
        None,
        config_of(**DDP),
        world=world,
        callbacks=[history],
        optimizer=adamw,
        scheduler=lambda it, _: plateau(it),
    )
    with pytest.raises(UsageError, match="found no val_data; expected some"):
        trainer.fit()
    assert not history.steps  # not after an epoch


# --- several optimizers ---------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 64))
        self.d = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, images: Tensor, name: str) -> tuple[Tensor, Tensor]:
        images = images.flatten(1)
        made = self.g(images[:, 10:14])
        return self.d(images)[:, 0], self.d(made if name == "g" else made.detach())[
            :, 0
        ]


class Adversarial(Task):
    """``is_weighted``: samples of the generator have their labels as weights."""

    def __init__(self, *, is_weighted: bool = False) -> None:
        super().__init__()
        self.is_weighted = is_weighted

    def training_step(self, model: Any, batch: Any, name: str = "") -> Any:
        real, made = model(batch.inputs, name)
        if name == "d":
            fooled = F.softplus(made)
            return {"loss": F.softplus(-real) + fooled, "fooled": fooled}
        losses = F.softplus(-made)
        return (losses, batch.targets) if self.is_weighted else losses

    def validation_step(self, model: Any, batch: Any) -> Any:
        return {"loss": F.softplus(model(batch.inputs, "g")[1])}

    def configure_optimizers(self, model: Any) -> Any:
        return {
            "d": torch.optim.Adam(model.d.parameters(), lr=0.02),
            "g": torch.optim.AdamW(model.g.parameters(), lr=0.01),
        }

    def configure_schedulers(self, optimizers: Any, total_steps: int | None) -> Any:
        return {"g": lr_scheduler.StepLR(optimizers["g"], 2, 0.5)}


def gan_by_hand(
    *, is_weighted: bool = False, average: dict[str, Tensor] | None = None
) -> tuple[list[tuple[float, float]], Gan]:
    """Losses of both passes, and the model; ``average`` becomes its EMA of 0.5."""
    model = Gan().double()
    named = {name: it.detach() for name, it in model.named_parameters()}
    if average is not None:
        average.update({name: it.clone() for name, it in named.items()})
    task = Adversarial()
    optimizers = task.configure_optimizers(model)
    scheduler = task.configure_schedulers(optimizers, None)["g"]
    found = []
    for x, y in batches():
        real, made = model(x, "d")
        d_loss = (F.softplus(-real) + F.softplus(made)).mean()
        model.zero_grad()
        d_loss.backward()
        clip(model.d, 0.3)
        optimizers["d"].step()
        losses = F.softplus(-model(x, "g")[1])
        g_loss = (losses * y).sum() / y.sum() if is_weighted else losses.mean()
        model.zero_grad()
        g_loss.backward()
        clip(model.g, 0.3)
        optimizers["g"].step()
        scheduler.step()
        for name, mean in (average or {}).items():
            mean.lerp_(named[name], 0.5)
        found.append((d_loss.item(), g_loss.item()))
    return found, model


def clip(model: nn.Module, most: float) -> None:
    gradients = [it.grad for it in model.parameters() if it.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    for gradient in gradients:  # torch divides by the norm + 1e-6
        gradient.mul_(min(1.0, most / norm))


@pytest.mark.parametrize(
    ("settings", "is_weighted"),
    [(it, False) for it in (DDP, MICRO, FSDP, FSDP | MICRO, BITWISE)]
    + [(it, True) for it in (FSDP | MICRO, BITWISE | FSDP)]
    + [slow(it, True) for it in (DDP, MICRO, FSDP, BITWISE)]
    + [slow(BITWISE | FSDP, False)],
)
def test_each_optimizer_has_a_pass_of_its_own(
    world: World, settings: dict[str, Any], is_weighted: bool
) -> None:
    history, state = trained(
        world,
        settings | {"clip_grad_norm": 0.3},
        model=Gan(),
        task=Adversarial(is_weighted=is_weighted),
    )
    losses, model = gan_by_hand(is_weighted=is_weighted)
    steps = history.steps
    found = [(it.losses["d_loss"], it.losses["g_loss"]) for it in steps]
    assert found == [pytest.approx(it, rel=1e-9) for it in losses]
    assert [it.loss for it in steps] == pytest.approx(list(map(sum, losses)), rel=1e-9)
    assert steps[0].losses.keys() == {"d_loss", "d_fooled", "g_loss"}
    assert [it.lr_groups for it in steps[1:3]] == [(0.02, 0.01), (0.02, 0.005)]
    assert history.epochs[0].train_losses["d_loss"] > 0
    if world.is_rank_zero:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-11)


class Freezes(Callback):
    def on_stage_start(self, trainer: Any) -> None:
        trainer.model.g[0].bias.requires_grad_(False)


@pytest.mark.parametrize("settings", [DDP, FSDP], ids=str)
def test_what_a_callback_freezes_stays_frozen_in_all_passes(
    world: World, settings: dict[str, Any]
) -> None:
    model = Gan()
    before = model.g[0].bias.tolist()
    _, state = trained(
        world, settings, model=model, task=Adversarial(), callbacks=[Freezes()]
    )
    if world.is_rank_zero:
        assert state["g.0.bias"].tolist() == before


class OneName(Task):
    def training_step(self, model: Any, batch: Any, name: str) -> Any:
        assert name == "net"
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")

    def validation_step(self, model: Any, batch: Any) -> Any:
        return {"loss": self.training_step(model, batch, "net")}

    def configure_optimizers(self, model: Any) -> Any:
        return {"net": adamw(model)}


@pytest.mark.parametrize("settings", [DDP, MICRO, FSDP, BITWISE], ids=str)
def test_a_dict_of_one_optimizer_has_its_name(
    world: World, settings: dict[str, Any]
) -> None:
    history, _ = found = trained(world, settings, task=OneName())
    assert [it.losses["net_loss"] for it in history.steps] == [
        pytest.approx(it.loss, rel=1e-12) for it in history.steps
    ]
    check_same(world, found, by_hand(adamw))


@pytest.mark.parametrize("settings", [DDP, FSDP, BITWISE], ids=str)
def test_averages_are_of_the_weights_of_all_optimizers(
    world: World, settings: dict[str, Any]
) -> None:
    settings = settings | {"ema_decay": 0.5, "clip_grad_norm": 0.3}
    _, state = trained(world, settings, model=Gan(), task=Adversarial())
    average: dict[str, Tensor] = {}
    gan_by_hand(average=average)
    if world.is_rank_zero:
        for name, value in average.items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("settings", [DDP, MICRO, FSDP], ids=str)
def test_each_pass_has_a_loss_that_sixteen_bits_hold(
    world: World, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings | {"clip_grad_norm": 0.3, "precision": "fp16"}
    history, state = trained(world, settings, model=Gan(), task=Adversarial())
    losses, model = gan_by_hand()
    found = [(it.losses["d_loss"], it.losses["g_loss"]) for it in history.steps]
    assert found == [pytest.approx(it, rel=0.02) for it in losses]
    if world.is_rank_zero:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name].double(), value, rtol=0.1, atol=0.02)
    # Too large at first: passes are skipped until it is small enough.
    monkeypatch.setattr("mpitrain.train.optimizer.INITIAL_SCALE", 2.0**22)
    history, state = trained(world, settings, model=Gan(), task=Adversarial())
    skipped = [it.skipped_steps for it in history.epochs]
    assert 0 < skipped[0] <= STEPS
    assert skipped[1] < STEPS
    assert all(bool(it.isfinite().all()) for it in state.values())


def test_a_pass_that_is_not_finite_is_skipped_alone(world: World) -> None:
    class Breaks(Adversarial):
        def training_step(self, model: Any, batch: Any, name: str = "") -> Any:
            losses = super().training_step(model, batch, name)
            is_broken = name == "g" and batch.step == 1 and 3 in batch.targets
            return losses * torch.nan if is_broken else losses

    def kept(model: nn.Module) -> list[Tensor]:
        return [it.detach().clone() for it in model.parameters()]

    class Watches(Callback):
        def on_step_end(self, trainer: Any) -> None:
            states.append((kept(trainer.model.g), kept(trainer.model.d)))

    states: list[Any] = []
    settings = {"on_nonfinite": "skip", "epochs": 1}
    history, _ = trained(
        world, settings, model=Gan(), task=Breaks(), callbacks=[Watches()]
    )
    (g, d), (g_after, d_after), _ = states
    assert all(map(torch.equal, g, g_after))
    assert not any(map(torch.equal, d, d_after))
    assert history.epochs[0].skipped_steps == 1
    with pytest.raises(Exception, match=r"step 2 \(epoch 1\), pass 'g'"):
        trained(world, DDP, model=Gan(), task=Breaks())


def test_a_step_that_takes_no_name_is_refused(world: World) -> None:
    class Plain(Adversarial):
        def training_step(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
            return super().training_step(model, batch, "d")

    with pytest.raises(UsageError, match=r"training_step is called .* 'd'; expected"):
        trained(world, DDP, model=Gan(), task=Plain())


# --- checkpoints --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (DDP, {"optimizer": adamw, "scheduler": one_cycle}),
        (FSDP, {"optimizer": adamw, "scheduler": sequential}),
        (DDP, {"optimizer": momentum, "scheduler": multi_step}),
        (FSDP, {"optimizer": momentum, "scheduler": plateau}),
        (DDP, {"optimizer": muon_and_adamw}),
        (DDP, {"optimizer": adafactor}),
        ({"shard_optimizer": True}, {"optimizer": zero, "scheduler": by_epoch}),
        (DDP, {"task": Adversarial}),
        (FSDP, {"task": Adversarial}),
    ],
)
@pytest.mark.parametrize("step", [slow(2), 4])  # of three in an epoch
def test_a_training_resumes_with_all_optimizers_and_schedulers(
    world: World, run_dir: Path, step: int, settings: Any, kinds: dict[str, Any]
) -> None:
    def run(*callbacks: Callback) -> tuple[History, dict[str, Tensor]]:
        more = {name: it() if name == "task" else it for name, it in kinds.items()}
        model = Gan() if "task" in kinds else Net()
        return trained(world, settings, model=model, callbacks=callbacks, **more)

    whole, expected = run()
    first, _ = run(Stops(step), Checkpointer(run_dir))
    second, state = run(Checkpointer(run_dir))
    found = first.steps + second.steps
    assert [it[1:4] for it in found] == [it[1:4] for it in whole.steps]
    assert [it.lr_groups for it in found] == [it.lr_groups for it in whole.steps]
    if world.is_rank_zero:
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("first", [DDP, FSDP])
def test_a_training_with_a_scheduler_resumes_by_another_strategy(
    world: World, run_dir: Path, first: Any
) -> None:
    """The built-in optimizer is fused with ddp, and cannot be with fsdp."""
    kinds: dict[str, Any] = {"scheduler": multi_step}
    whole, _ = trained(world, DDP, **kinds)
    before, _ = trained(
        world, first, callbacks=[Stops(3), Checkpointer(run_dir)], **kinds
    )
    second = FSDP if first is DDP else DDP
    after, _ = trained(world, second, callbacks=[Checkpointer(run_dir)], **kinds)
    found = [(it.step, it.lr, it.loss) for it in before.steps + after.steps]
    expected = [(it.step, it.lr, it.loss) for it in whole.steps]
    assert found == [pytest.approx(it, rel=1e-9) for it in expected]


def test_a_run_resumes_with_the_same_optimizers_only(
    world: World, run_dir: Path
) -> None:
    trained(world, DDP, optimizer=adamw, callbacks=[Stops(2), Checkpointer(run_dir)])
    with pytest.raises(UsageError, match=r"other optimizers: AdamW of 3 . 3 weights"):
        trained(world, DDP, optimizer=momentum, callbacks=[Checkpointer(run_dir)])


def test_a_scheduler_whose_state_cannot_be_saved_is_refused_at_the_start(
    world: World, run_dir: Path
) -> None:
    def strange(optimizer: Any, _: int | None) -> Any:
        made = multi_step(optimizer)
        made.more = torch.zeros(2)
        return made

    callbacks = [Checkpointer(run_dir)]
    with pytest.raises(UsageError, match="the state of MultiStepLR has a Tensor"):
        trained(world, DDP, optimizer=adamw, scheduler=strange, callbacks=callbacks)


class Wrapping(torch.optim.SGD):
    """Steps by another optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = torch.optim.SGD(self.param_groups, lr, momentum=0.9)


class Chained(torch.optim.SGD):
    """Steps by several."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.parts = [torch.optim.SGD(self.param_groups, lr, momentum=0.9)]


class Counting(torch.optim.SGD):
    """Counts by a key of its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.state["steps"] = {"number": 0}  # type: ignore[index]


class Telling(torch.optim.SGD):
    """Says what it keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": 0}


KEEP_MORE = {
    Wrapping: "another optimizer in its attribute 'base'",
    Chained: "another optimizer in its attribute 'parts'",
    Counting: "the key 'steps' in its state",
    Telling: r"a state_dict\(\) of its own",
}


@pytest.mark.parametrize("kind", [*KEEP_MORE])
def test_an_optimizer_that_keeps_more_than_is_saved_is_refused_at_the_start(
    world: World, run_dir: Path, kind: Any
) -> None:
    def make(model: nn.Module) -> Any:
        return kind(model.parameters(), lr=0.1)

    history, callbacks = History(), [Checkpointer(run_dir)]
    words = f"the optimizer {kind.__name__} has {KEEP_MORE[kind]}.*no Checkpointer"
    with pytest.raises(UsageError, match=words):
        trained(world, DDP, optimizer=make, callbacks=[history, *callbacks])
    assert not history.steps
    trained(world, DDP, optimizer=make)
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(run_dir / "loop")
    with pytest.raises(UsageError, match=words):
        checkpointer.save(1, model=model, optimizer=make(model))


def test_an_optimizer_within_zero_that_keeps_more_is_refused(
    world: World, run_dir: Path
) -> None:
    def make(model: nn.Module) -> Any:
        weights: Any = model.parameters()
        return ZeroRedundancyOptimizer(weights, optimizer_class=Telling, lr=0.1)

    settings, callbacks = {"shard_optimizer": True}, [Checkpointer(run_dir)]
    with pytest.raises(UsageError, match="the optimizer Telling has"):
        trained(world, settings, optimizer=make, callbacks=callbacks)


# --- random numbers -------------------------------------------------------------------


class Langevin(torch.optim.SGD):
    """Adds noise to the weights (SGLD)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                noise = torch.randn_like(weight) + np.random.rand()
                weight.add_(noise, alpha=0.01)


def langevin(model: nn.Module) -> Any:
    return Langevin(model.parameters(), lr=0.0)  # noise alone


def langevin_of_zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Langevin, lr=0.0)


@pytest.mark.parametrize("settings", [DDP, MICRO, BITWISE])
def test_an_optimizer_that_draws_draws_the_same_on_any_rank(
    world: World, settings: dict[str, Any]
) -> None:
    trainer = Trainer(
        Net(),
        some(NUM),
        None,
        TrainConfig(epochs=EPOCHS, global_batch_size=BATCH_SIZE, **settings),
        world=world,
        optimizer=langevin,
    )
    trainer.fit()
    model = Net()  # the same noise, without a training
    lone = langevin(model)
    for epoch in range(1, EPOCHS + 1):
        for step in range(STEPS):
            seed_all(step_seed(1, epoch, step, "optimizer 0"))
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight)
            lone.step()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize(
    ("make", "settings"), [(langevin, FSDP), (langevin_of_zero, DDP)]
)
def test_an_optimizer_of_shards_may_not_draw(
    world: World, make: Any, settings: dict[str, Any]
) -> None:
    config = TrainConfig(epochs=1, global_batch_size=BATCH_SIZE, **settings)
    trainer = Trainer(Net(), some(NUM), None, config, world=world, optimizer=make)
    with pytest.raises(UsageError, match="Langevin draws random numbers"):
        trainer.fit()


def test_only_steps_that_may_draw_are_seeded() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    plain = torch.optim.AdamW(weights)
    assert not ScheduledOptimizer(name="", optimizer=plain).may_draw
    plain.register_step_post_hook(lambda *_: None)
    assert ScheduledOptimizer(name="", optimizer=plain).may_draw
    other = Langevin(weights, lr=0.1)
    assert ScheduledOptimizer(name="", optimizer=other).may_draw


# --- a new run from another's checkpoint ----------------------------------------------

LENGTHS: dict[str, Any] = {
    "cosine": lambda it, num: lr_scheduler.CosineAnnealingLR(it, num),
    "one cycle": lambda it, num: lr_scheduler.OneCycleLR(it, 0.1, total_steps=num),
    "polynomial": lambda it, num: lr_scheduler.PolynomialLR(it, num),
    "lambda": lambda it, num: lr_scheduler.LambdaLR(it, lambda step: 1 - step / num),
    "by epoch": lambda it, _: {
        "scheduler": lr_scheduler.MultiStepLR(it, [1, 3]),
        "interval": "epoch",
    },
}


def continued(
    world: World, run_dir: Path, first: Any, second: Any, **settings: Any
) -> History:
    """Two epochs as one run, two more as another; the history of the other."""
    trained(world, {}, callbacks=[Checkpointer(run_dir / "a")], **first)
    resume = str(run_dir / "a")
    history, _ = trained(
        world,
        {"epochs": 4, **settings},
        callbacks=[Checkpointer(run_dir / "b", resume=resume)],
        **second,
    )
    return history


@pytest.mark.parametrize("name", LENGTHS)
def test_a_new_run_has_its_own_schedule_from_its_place_on(
    world: World, run_dir: Path, name: str
) -> None:
    kinds = {"optimizer": sgd, "scheduler": LENGTHS[name]}
    found = continued(world, run_dir, kinds, kinds)
    whole, _ = trained(world, {"epochs": 4}, **kinds)
    assert [it.lr for it in found.steps] == [it.lr for it in whole.steps[6:]]


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_new_run_takes_the_rates_and_settings_of_its_script(
    world: World, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []

    class Sees(Callback):
        def on_step_end(self, trainer: Any) -> None:
            (group,) = trainer.engine.optimizer.param_groups
            seen.append({**group})

    def made(**options: Any) -> Any:
        return {"optimizer": lambda it: torch.optim.AdamW(it.parameters(), **options)}

    first, second = made(lr=0.1, weight_decay=0.5), made(lr=0.001, weight_decay=0.0)
    trained(world, {}, callbacks=[Checkpointer(run_dir / "a")], **first)
    saves = Checkpointer(run_dir / "b", resume=str(run_dir / "a"))
    trained(world, {"epochs": 4}, callbacks=[Sees(), saves], **second)
    assert {(it["lr"], it["weight_decay"]) for it in seen} == {(0.001, 0.0)}
    said = capsys.readouterr().out
    words = "changed since then: lr: 0.1 -> 0.001, weight_decay: 0.5 -> 0.0 of AdamW"
    assert (words in said) == world.is_rank_zero


def test_what_a_run_of_an_older_version_has_set_is_not_guessed(
    world: World,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(optimizer: Any) -> Any:
        found = to_save(optimizer)
        for state in found["states"]:
            del state["first_groups"]
        return found

    to_save = training_state.schedules_to_save
    monkeypatch.setattr(training_state, "schedules_to_save", older)
    kinds = {"optimizer": sgd, "scheduler": LENGTHS["one cycle"]}
    continued(world, run_dir, kinds, kinds)
    assert " of SGD" not in capsys.readouterr().out


def test_a_new_run_goes_on_counting_what_an_optimizer_counts_in_its_groups(
    world: World, run_dir: Path
) -> None:
    kinds: dict[str, Any] = {"optimizer": momentum}
    found = continued(world, run_dir, kinds, kinds)
    whole, _ = trained(world, {"epochs": 4}, **kinds)
    assert [it.loss for it in found.steps] == [it.loss for it in whole.steps[6:]]


def test_a_new_run_keeps_what_a_metric_has_reduced(world: World, run_dir: Path) -> None:
    def reduces(optimizer: Any, _: int | None) -> Any:
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)

    def slower(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.02)

    first = {"optimizer": sgd, "scheduler": reduces}
    second = {"optimizer": slower, "scheduler": reduces}
    found = continued(world, run_dir, first, second)
    assert found.steps[0].lr == pytest.approx(0.02 * 0.1**2)  # in two epochs


def test_a_schedule_that_ends_before_a_new_run_begins_is_named(
    world: World, run_dir: Path
) -> None:
    first = {"optimizer": sgd, "scheduler": LENGTHS["one cycle"]}
    short = {
        "optimizer": sgd,
        "scheduler": lambda it, _: lr_scheduler.OneCycleLR(it, 0.1, total_steps=4),
    }
    with pytest.raises(
        UsageError, match=r"after 6 steps, and scheduler= made OneCycleLR, .* after 4:"
    ):
        continued(world, run_dir, first, short)

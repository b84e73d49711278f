"""Trainings as they are moved from other trainers: a difference is said, not silent."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from reference_training import BATCH_SIZE, Net, some
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain import Callback, Stage, Task, TrainConfig, Trainer, UsageError, World
from mpitrain.data.randomness import seed_all, step_seed

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


def config_of(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {"epochs": 1, "global_batch_size": BATCH_SIZE}
    return TrainConfig(**plain | settings)


def points(num: int = 24) -> TensorDataset:
    x = torch.linspace(-1, 1, num).unsqueeze(1)
    return TensorDataset(x, x.square())


class Squares(Task):
    """Fits points."""

    def training_step(self, model: Any, batch: Any) -> Any:
        return (model(batch.inputs) - batch.targets).square().mean(1)

    def validation_step(self, model: Any, batch: Any) -> Any:
        return {"loss": self.training_step(model, batch)}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def trainer_of(world: World, task: Task | None = None, **others: Any) -> Trainer:
    """Of a small model and of points, if nothing else is given."""
    model, config = others.pop("model", None), others.pop("config", None)
    return Trainer(
        mlp() if model is None else model,
        others.pop("train", None) or points(),
        others.pop("val", None),
        config or config_of(),
        world=world,
        task=task or Squares(),
        **others,
    )


class Pretrained(nn.Module):
    """An encoder in evaluation mode, with a new part in training mode within."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(1, 8), nn.Dropout(0.5), nn.Dropout(0.1), nn.Linear(8, 1)
        )
        self.encoder.eval()
        self.encoder[1].train()
        self.seen: set[tuple[bool, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            modes = (self.encoder, *self.encoder)
            self.seen.add(tuple(module.training for module in modes))
        outputs: Tensor = self.encoder(x)
        return outputs


def test_each_module_keeps_its_mode_and_one_without_dropout_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = Pretrained()
    trainer_of(world, model=model, val=points()).fit()
    assert model.seen == {(False, False, True, False, False)}
    found = [it for it in caplog.messages if "without dropout" in it]
    assert [it.split(":")[0] for it in found] == ["encoder"] * world.is_rank_zero


@pytest.mark.parametrize(
    "freeze",
    [
        lambda model: model,
        lambda model: model.eval(),  # trained in training mode
        lambda model: model[1].eval(),  # a frozen batch norm
        lambda model: model[2].eval(),  # a part without dropout
        lambda model: model[0].eval().requires_grad_(False),
    ],
)
def test_modes_that_are_meant_are_not_named(
    world: World, freeze: Any, caplog: pytest.LogCaptureFixture
) -> None:
    part = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1))
    last = nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 1))
    model = nn.Sequential(part, nn.BatchNorm1d(8), last)
    freeze(model)
    trainer_of(world, model=model).fit()
    assert "without dropout" not in caplog.text


def test_a_part_without_dropout_is_named_in_the_stage_that_trains_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1)), nn.Linear(8, 1)
    )
    model[0].eval()
    only_last = Stage(name="last", epochs=1, trainable="1")
    for stages, num in (([only_last], 0), ([only_last, Stage(epochs=1)], 1)):
        config = TrainConfig(global_batch_size=BATCH_SIZE)  # the stages have epochs
        trainer_of(world, model=model, config=config, stages=stages).fit()
        assert caplog.text.count("without dropout") == num * world.is_rank_zero


def test_a_model_of_float64_that_is_trained_in_float32_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for precision in ("fp64", "fp32"):
        assert "of float64" not in caplog.text
        config = config_of(precision=precision)
        trainer_of(world, model=mlp().double(), config=config).fit()
    assert ("of float64" in caplog.text) == world.is_rank_zero


def with_scheduler(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    "form",
    [
        lambda it, s: {"optimizer": it, "lr_scheduler": {"scheduler": s}},
        lambda it, s: {"optimizer": it, "lr_scheduler": s},
        lambda it, s: ([it], [s]),
        lambda it, s: [{"optimizer": it, "lr_scheduler": s}],
        lambda it, s: [it, s],
    ],
)
def test_forms_of_lightnings_configure_optimizers_are_refused(
    world: World, form: Any
) -> None:
    trainer = trainer_of(world, optimizer=lambda model: form(*with_scheduler(model)))
    with pytest.raises(UsageError, match="configure_schedulers"):
        trainer.fit()


@pytest.mark.parametrize("made", [lambda it: it, lambda _: "adamw", lambda _: [None]])
def test_what_is_no_optimizer_is_refused(world: World, made: Any) -> None:
    trainer = trainer_of(world, optimizer=made)
    with pytest.raises(UsageError, match=r"an object of torch\.optim\.Optimizer"):
        trainer.fit()


class Slopes(Squares):
    """Fits the derivatives of the model."""

    computes = staticmethod(torch.no_grad)

    def training_step(self, model: Any, batch: Any) -> Any:
        x = batch.inputs.requires_grad_()
        outputs = model(x)
        slopes = torch.autograd.grad(outputs.sum(), x, create_graph=True)[0]
        return (slopes - 2 * x).square().mean(1) + 0 * outputs.sum(1)

    def validation_step(self, model: Any, batch: Any) -> Any:
        with self.computes():
            return {"loss": self.training_step(model, batch).detach()}


class SlopesWithGrad(Slopes):
    computes = staticmethod(torch.enable_grad)


@pytest.mark.filterwarnings("ignore:Grad strides")  # torch's, of a slow layout
def test_a_validation_of_derivatives_says_how(world: World) -> None:
    def trainer(task: Task) -> Trainer:
        config = config_of(precision="fp64")
        return trainer_of(world, task, val=points(), config=config)

    assert trainer(SlopesWithGrad()).fit().values["loss"] > 0
    with pytest.raises(RuntimeError) as found:
        trainer(Slopes()).fit()
    assert "torch.enable_grad()" in "".join(found.value.__notes__)


class Hooked(Squares):
    """Has a hook that nothing calls, and helpers with names such as a hook's."""

    on_policy = True

    def on_manifold(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...


class Both(Squares, Callback):
    """Is a callback, too."""

    def on_step_end(self, trainer: Any) -> None: ...


@pytest.mark.parametrize("kind", [Hooked, Both])
def test_hooks_of_a_task_that_are_never_called_are_named(
    world: World, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task = kind()
    callbacks = [task] if kind is Both else []
    trainer_of(world, task, callbacks=callbacks).fit()
    found = [it for it in caplog.messages if "never called" in it]
    num = world.is_rank_zero and kind is Hooked
    assert [it.split(":")[0] for it in found] == ["on_train_epoch_end of Hooked"] * num


class WithModule(Callback):
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...  # type: ignore[override]


class WithoutTrainer(Callback):
    def on_fit_end(self) -> None: ...  # type: ignore[override]


class WithAny(Callback):
    def on_fit_end(self, *arguments: Any) -> None: ...


def with_number(hook: Any) -> Any:
    @functools.wraps(hook)
    def called(self: Any, trainer: Any) -> None:
        hook(self, trainer, 1)

    return called


class Decorated(Callback):
    @with_number
    def on_fit_end(self, trainer: Any, number: int) -> None: ...


@pytest.mark.parametrize("kind", [WithModule, WithoutTrainer, WithAny, Decorated])
def test_a_hook_of_other_arguments_is_refused_before_the_training(
    world: World, kind: type[Callback]
) -> None:
    trainer = trainer_of(world, callbacks=[kind()])
    if kind in (WithAny, Decorated):
        trainer.fit()
        return
    with pytest.raises(UsageError, match=r"expected the arguments trainer$"):
        trainer.fit()
    assert trainer.state.step == 0


class Pairs(Squares):
    """A forgotten squeeze: outputs (N, 1) beside targets (N,)."""

    def training_step(self, model: Any, batch: Any) -> Any:
        return (model(batch.inputs) - batch.targets.squeeze(1)).square()


def test_a_loss_of_all_pairs_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    data = points(2 * BATCH_SIZE + 6)
    trainer_of(world, Pairs(), train=data).fit()
    found = [it for it in caplog.messages if "a value of each pair" in it]
    assert len(found) == world.is_rank_zero


@pytest.mark.parametrize("task", [Squares, None])
def test_settings_that_a_task_does_not_read_are_named(
    world: World, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(label_smoothing=0.1)
    Trainer(
        Net() if task is None else mlp(),
        some(24) if task is None else points(),
        None,
        config,
        world=world,
        task=task and task(),
    ).fit()
    found = [it for it in caplog.messages if "does not have label_smoothing" in it]
    assert len(found) == (world.is_rank_zero and task is not None)


class Noisy(Squares):
    """Draws noise in both steps, as a diffusion model does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, Tensor]] = []

    def training_step(self, model: Any, batch: Any) -> Any:
        noise = torch.rand_like(batch.inputs)
        if not torch.is_grad_enabled() and len(batch):
            self.seen.append((int(batch.indices[0]), noise))
        return (model(batch.inputs) - noise).square().mean(1)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_what_a_validation_draws_depends_on_nothing_else(
    world: World, strategy: Any
) -> None:
    """Neither on the ranks, nor has it an effect on the training."""
    states = []
    for often in (None, 1):
        task = Noisy()
        config = config_of(epochs=2, validate_every_steps=often, strategy=strategy)
        data = points(2 * BATCH_SIZE + 6)
        trainer = trainer_of(world, task, train=data, val=data, config=config)
        trainer.fit()
        states.append(trainer.state_dict())
        size = max(len(noise) for _, noise in task.seen)
        for first, noise in task.seen:
            seed_all(step_seed(config.seed, 0, 0, str(first // size)))
            assert torch.equal(noise, torch.rand_like(noise))
    if world.is_rank_zero:
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name


class Drops(Squares):
    """Predicts with dropout, for the spread of several predictions."""

    def predict_step(self, model: Any, batch: Any) -> Any:
        return torch.nn.functional.dropout(batch.inputs, 0.5, training=True)


def test_each_prediction_draws_other_numbers_of_each_sample(world: World) -> None:
    def predictions() -> list[Any]:
        trainer = trainer_of(world, Drops())
        trainer.fit()
        return [trainer.predict(points(96)) for _ in range(2)]

    first, second = predictions(), predictions()
    if world.is_rank_zero:  # the others have none
        assert first == second
        assert first[0] != first[1]


def test_a_set_of_one_tensor_says_what_to_give(world: World) -> None:
    data = TensorDataset(torch.ones(24, 1))

    class Rebuilds(Squares):
        def training_step(self, model: Any, batch: Any) -> Any:
            return model(batch.inputs).square().mean(1)

    trainer = trainer_of(world, Rebuilds(), train=data)
    with pytest.raises((TypeError, UsageError)) as found:
        trainer.fit()
    assert "list(tensor)" in "".join(getattr(found.value, "__notes__", []))

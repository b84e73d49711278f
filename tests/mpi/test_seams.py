"""A custom task and strategy, as docs/reference/tasks-and-strategies.md shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mpitrain import DataError, Strategy, Task, TrainConfig, Trainer, UsageError, World

PAGE = Path(__file__).parents[2] / "docs/reference/tasks-and-strategies.md"


def classes_of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    return names


def numbers(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def made(world: World, settings: dict[str, Any], **kinds: Any) -> Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    config = TrainConfig(
        precision="fp64", epochs=2, global_batch_size=12, micro_batch_size=3, **settings
    )
    return Trainer(
        model, numbers(31), numbers(7), config, world=world, callbacks=(), **kinds
    )


def trained(
    world: World, settings: dict[str, Any] | None = None, **kinds: Any
) -> tuple[dict[str, float], list[torch.Tensor]]:
    trainer = made(world, settings or {}, **kinds)
    found = trainer.fit()
    return dict(found.values), list(trainer.state_dict().values())


def test_a_task_and_a_strategy_stand_in_one_file_each(world: World) -> None:
    page = classes_of_the_page()
    values, weights = trained(
        world, task=page["Regression"](), strategy=page["AllReduce"]
    )
    expected, others = trained(
        world,
        loss=lambda outputs, targets: (outputs - targets).square(),
        metrics=lambda outputs, targets: {"mae": (outputs - targets).abs()},
    )
    assert values == pytest.approx(expected, rel=1e-9)
    assert values.keys() == {"loss", "mae"}
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_a_task_without_a_loss_says_what_it_lacks(world: World) -> None:
    class Bare(Task):
        pass

    with pytest.raises(UsageError, match="Bare has neither loss"):
        trained(world, task=Bare())


def test_arguments_of_the_default_task_do_not_go_with_another(world: World) -> None:
    with pytest.raises(UsageError, match="num_classes are ImageClassification's"):
        trained(world, task=Task(), num_classes=3)


def test_a_task_is_one_trainers(world: World) -> None:
    task = classes_of_the_page()["Regression"]()
    trained(world, task=task)
    with pytest.raises(UsageError, match="no other Trainer has"):
        trained(world, task=task)
    with pytest.raises(UsageError, match="expected an object of a class"):
        trained(world, task=type(task))


def test_a_strategy_that_does_not_reduce_is_an_error(world: World) -> None:
    if world.world_size > 1:
        with pytest.raises(UsageError, match="norm of the gradient in step 1 is"):
            trained(
                world, strategy=Strategy, task=classes_of_the_page()["Regression"]()
            )


@pytest.mark.parametrize(
    ("strategy", "settings", "expected"),
    [
        ("ddp", {}, "expected a class of mpitrain.Strategy"),
        (Strategy, {"bitwise": True}, "does not go with bitwise or strategy"),
        (Strategy, {"strategy": "fsdp"}, "does not go with bitwise or strategy"),
    ],
)
def test_a_strategy_is_chosen_once(
    world: World, strategy: Any, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        trained(world, settings, strategy=strategy)


def test_a_strategy_may_override_forward(world: World) -> None:
    page, calls = classes_of_the_page(), list[bool]()

    class Noting(page["AllReduce"]):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return super().forward(*args, **kwargs)

    trained(world, task=page["Regression"](), strategy=Noting)
    assert {*calls} == {True, False}  # in steps and in validations


def test_a_loss_may_be_assigned(world: World) -> None:
    trainer = made(world, {})
    trainer.loss = lambda outputs, targets: (outputs - targets).square()  # type: ignore[method-assign]
    trainer.metrics = lambda outputs, targets: {}  # type: ignore[method-assign]
    expected, _ = trained(world, task=classes_of_the_page()["Regression"]())
    assert trainer.fit().loss == pytest.approx(expected["loss"], rel=1e-9)


def test_a_loss_with_tensors_is_moved_as_the_model_is(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Class weights are float32, and not on the device, before the training."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BCEWithLogitsLoss(torch.ones(1) * 2, reduction="none")
            self.log_variance = nn.Parameter(torch.full((), float(world.rank)))
            self.logits = nn.Linear(1, 1)

        def forward(self, outputs: Any, targets: Any) -> Any:
            assert outputs.dtype == self.log_variance.dtype
            assert outputs.device == self.log_variance.device
            losses = self.inner(self.logits(outputs), targets.gt(0).to(targets))
            return losses * torch.exp(self.log_variance)  # rank zero's

    loss = Weighted()
    trained(world, loss=loss)
    assert loss.inner.weight.dtype == torch.float64
    assert loss.log_variance == 0
    expected = "neither trained nor saved: log_variance, logits.weight, logits.bias"
    assert (expected in caplog.text) == world.is_rank_zero
    caplog.clear()
    trainer = made(world, {}, loss=nn.MSELoss(reduction="none"))
    trainer.fit()
    assert "not trained" not in caplog.text


def test_losses_of_other_tensors_do_not_wait_for_each_other(world: World) -> None:
    loss = nn.BCEWithLogitsLoss(torch.ones(1)) if world.rank else nn.MSELoss()
    if world.world_size > 1:
        with pytest.raises(
            DataError, match="the loss differs between ranks: 0 numbers"
        ):
            trained(world, loss=loss)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"loss": nn.MSELoss}, "loss= is the class MSELoss; expected a function of"),
        ({"loss": "mse"}, "loss= is 'mse'; expected a function of"),
        ({"model": lambda inputs: inputs}, "the model is 'function'; expected a torch"),
        ({"model": None}, "the model is 'NoneType'; expected a torch"),
        ({"metrics": [nn.MSELoss()]}, "metrics= is list; expected a dict of metrics"),
        ({"metrics": {"mse": nn.MSELoss}}, "metric 'mse' is the class MSELoss; expect"),
        ({"metrics": {3: nn.MSELoss()}}, "a metric is named 3; expected a text"),
    ],
)
def test_arguments_of_another_kind_are_named(
    world: World, kinds: dict[str, Any], expected: str
) -> None:
    given = {"loss": nn.MSELoss(), "model": nn.Linear(6, 1)} | kinds
    data = numbers(5)
    with pytest.raises(UsageError, match=expected):
        Trainer(given.pop("model"), data, data, world=world, **given).fit()


@pytest.mark.parametrize("returned", [None, "high"])
def test_a_metric_that_is_no_number_is_named(world: World, returned: Any) -> None:
    with pytest.raises(DataError, match=r"the mae is .*; expected a tensor"):
        trained(world, loss=nn.MSELoss(), metrics={"mae": lambda *_: returned})


@pytest.mark.parametrize("returned", [None, 0.5, torch.tensor(0.5)])
def test_a_loss_without_a_gradient_is_named(world: World, returned: Any) -> None:
    expected = "no weight gets a gradient|expected a tensor"
    with pytest.raises(DataError, match=f"the loss is .*({expected})"):
        trained(world, loss=lambda *_: returned)

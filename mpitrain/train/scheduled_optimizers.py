"""The optimizers of a stage, built in or the user's, each with its schedule."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mpitrain.data.randomness import own_random_state, random_state, seed_all
from mpitrain.errors import UsageError
from mpitrain.torch_compat import has_step_hooks
from mpitrain.train.checks import shown_names, takes
from mpitrain.train.metrics import known_name


@dataclass(kw_only=True)
class ScheduledOptimizer:
    """An optimizer, and what changes its learning rates."""

    name: str  # of the backward pass that it steps after; empty: there is one
    optimizer: Any  # torch's `Optimizer`
    scheduler: LRScheduler | None = None  # ``None``: the configured schedule
    interval: str = "step"  # or "epoch"
    monitor: str | None = None  # the metric that the scheduler is given
    _rates: Sequence[tuple[Any, Any]] = ()  # of the last step: as set, and as used
    first_groups: list[dict[str, Any]] = field(default_factory=list)
    """`plain_groups` at the start of the stage, with the scheduler's first rates."""
    _has_stepped: bool = False  # the scheduler, in this process

    @property
    def local(self) -> Any:
        """The optimizer of this rank's weights; with ZeRO, of its shard."""
        return getattr(self.optimizer, "optim", self.optimizer)

    @property
    def may_draw(self) -> bool:
        """Whether a step may draw random numbers: torch's own optimizers do not."""
        is_torchs = type(self.local).__module__.startswith("torch.optim.")
        return not is_torchs or has_step_hooks(self.optimizer)

    def step_seeded(self, seed: int, device: str, *, is_sharded: bool) -> None:
        """Step one that may draw, as one that adds noise to the weights; local.

        Each rank draws the same: otherwise its copy of the weights would drift away.
        Where weights or state are sharded, they would be other numbers for a weight.
        """
        # The next forward pass draws what it would have drawn.
        with own_random_state(device):
            seed_all(seed, device)
            before = random_state(device) if is_sharded else []
            self.optimizer.step()
            if is_sharded and random_state(device) != before:
                raise UsageError(
                    f"the step of {self.kind} draws random numbers, and ranks step "
                    "other weights with --strategy fsdp or shard_optimizer, so results "
                    "would depend on the number of ranks; expected --strategy ddp and "
                    "the whole optimizer on each rank"
                ).on_all_ranks()

    @property
    def can_skip(self) -> bool:
        """Whether its step changes nothing where `found_inf` is 1: it is fused."""
        groups = self.optimizer.param_groups
        is_fused = all(group.get("fused") for group in groups)
        # Nor ZeRO's, whose groups are copies.
        if self.optimizer is not self.local or not is_fused:
            return False
        # A momentum that this step makes would stay without values (torch 2.14).
        with_momentum = [it["params"] for it in groups if it.get("momentum")]
        return all(False not in self._have_momentum(it) for it in with_momentum)

    def check_fused(self) -> None:
        """Let SGD not be fused where only some weights have a momentum yet."""
        # It fails there (torch 2.14): a weight had no gradient in the first step. With
        # ZeRO the groups are two, and its step copies the first one's settings.
        groups = self.optimizer.param_groups, self.local.param_groups
        for group, local in zip(*groups, strict=True):
            is_fused = group.get("fused") and group.get("momentum")
            if is_fused and len(self._have_momentum(local["params"])) > 1:
                group["fused"] = None

    def _have_momentum(self, weights: Sequence[Tensor]) -> set[bool]:
        """Return whether those with a gradient have SGD's momentum yet."""
        state = self.local.state
        return {
            state.get(weight, {}).get("momentum_buffer") is not None
            for weight in weights
            if weight.grad is not None
        }

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.local).__name__

    @property
    def weights(self) -> list[Tensor]:
        """The weights of all groups."""
        return [it for group in self.optimizer.param_groups for it in group["params"]]

    def set_rates(self, rate_of: Callable[[float], float]) -> bool:
        """Set each group's rate by its own peak rate.

        Return whether that replaces a rate that a callback has set for this step.
        """
        groups = self.optimizer.param_groups
        # A rate that is set in `on_batch_start` counts, and may be set back after the
        # step. Tensors are not compared: the host would wait for a GPU.
        has_lost = any(
            group["lr"] not in before
            for before, group in zip(self._rates, groups, strict=False)
            if isinstance(group["lr"], float)
        )
        for group in groups:
            # The key of torch's schedulers: it goes into checkpoints with the group.
            lr = rate_of(group.setdefault("initial_lr", float(group["lr"])))
            # In place: a fused or compiled step reads the tensor that it was given.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._rates = [(group["lr"], group["lr"]) for group in groups]
        return has_lost

    def end_step(self) -> None:
        """Step a scheduler of steps, and remember the rates of this step."""
        used = [group["lr"] for group in self.optimizer.param_groups]
        self._rates = [
            (before[0], now) for before, now in zip(self._rates, used, strict=False)
        ]
        if self.interval == "step":
            self.step_scheduler({})

    def step_scheduler(self, metrics: Mapping[str, float]) -> None:
        """Step the scheduler, if there is one, by its metric, if it has one."""
        if self.scheduler is None:
            return
        name = known_name(self.monitor or "", metrics)
        if name and name not in metrics:
            raise UsageError(
                f"a scheduler monitors {self.monitor!r}, which the validation does not "
                f"have; found {', '.join(metrics)}"
            ).on_all_ranks()
        with self._without_order_warning(is_due=not self._has_stepped):
            self.scheduler.step(*([metrics[name]] if name else []))  # type: ignore[arg-type]
        self._has_stepped = True

    def plain_groups(self) -> list[dict[str, Any]]:
        """Return the numbers of the groups, such as the learning rate."""
        kinds = (bool, int, float, str, tuple)
        return [
            {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if isinstance(value, kinds) or getattr(value, "shape", None) == ()
            }
            for group in self.optimizer.param_groups
        ]

    def fast_forward_scheduler(self, num: int, path: object) -> None:
        """Step a new run's scheduler as often as the training until here has.

        The lengths and rates are the new run's, which a state of the run before would
        replace. ``path`` is the checkpoint's.
        """
        if self.scheduler is None or self.monitor is not None:
            return
        with self._without_order_warning(is_due=True):
            for done in range(num):
                try:
                    self.scheduler.step()
                except Exception as error:
                    kind = type(self.scheduler).__name__
                    raise UsageError(
                        f"{path} was written after {num} {self.interval}s, and "
                        f"scheduler= made {kind}, which ends after {done}: {error}. "
                        "Expected one for all steps of this run, with those before: "
                        "total_steps counts them, too"
                    ).on_all_ranks() from error
        self._has_stepped = num > 0

    @contextlib.contextmanager
    def _without_order_warning(self, *, is_due: bool) -> Iterator[None]:
        """Keep torch from a warning of the user's order, where a step was skipped."""
        # Only the first time, when torch warns: to leave the context lets Python repeat
        # all warnings that it has shown once.
        if not is_due:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            yield


def optimizers_of(made: Any) -> list[ScheduledOptimizer]:
    """Return what `Task.configure_optimizers` has made, in a list."""
    # Ours is a flat list, or a dict by names of passes. Not `on_all_ranks`: whether
    # the ranks made the same is compared later.
    names = [*made] if isinstance(made, Mapping) else []
    parts = made if isinstance(made, list | tuple) else ()
    others = list, tuple, Mapping, LRScheduler
    if "lr_scheduler" in names or any(isinstance(it, others) for it in parts):
        raise UsageError(
            "configure_optimizers returned one of Lightning's forms, with a scheduler; "
            "expected the optimizer, and the scheduler from "
            "configure_schedulers(optimizers, total_steps)"
        )
    return [
        ScheduledOptimizer(name=name, optimizer=it)
        for name, listed in _by_name(made).items()
        for it in listed
    ]


def describe(optimizers: Sequence[ScheduledOptimizer], model: nn.Module) -> str:
    """Return what is to be equal on all ranks, and when a training is resumed."""
    # A digest of the names: they are as many as the weights.
    names = {id(weight): name for name, weight in model.named_parameters()}
    words = []
    for it in optimizers:
        groups = [
            [names.get(id(weight)) for weight in group["params"]]
            for group in getattr(it.optimizer, "param_groups", ())
        ]
        digest = hashlib.sha256(str(groups).encode()).hexdigest()[:8]
        sizes = " + ".join(str(len(group)) for group in groups)
        words.append(f"{it.name} {it.kind} of {sizes} weights ({digest})".strip())
    return ", ".join(words)


def check_optimizers(
    optimizers: Sequence[ScheduledOptimizer], model: nn.Module, *, is_zero: bool
) -> None:
    """Refuse the user's optimizers of a model, if they do not fit.

    All ranks have the same. With ``is_zero`` their state is to be sharded.
    """
    names = {id(weight): name for name, weight in model.named_parameters()}
    left = {id(it): it for it in model.parameters() if it.requires_grad}
    trained = {*left}
    wrong: dict[str, list[str]] = {}
    for it in optimizers:
        problem = ""
        if not isinstance(it.optimizer, Optimizer):
            problem = "expected an object of torch.optim.Optimizer"
        elif any("lr" not in group for group in it.optimizer.param_groups):
            problem = "a group has no learning rate; expected 'lr' in each"
        elif not takes(it.local.step):
            problem = (
                "its step() needs a closure; expected one that takes a step after one "
                "backward pass, such as AdamW"
            )
        elif is_zero and it.optimizer is it.local:
            problem = (
                "it keeps its whole state, and shard_optimizer is set; expected torch's"
                f" ZeroRedundancyOptimizer(weights, optimizer_class={it.kind})"
            )
        if problem:
            raise UsageError(f"optimizer= made {it.kind}: {problem}").on_all_ranks()
        for weight in it.weights:
            if left.pop(id(weight), None) is None:
                name = names.get(id(weight), f"of shape {tuple(weight.shape)}")
                what = "frozen" if id(weight) in names else "of another model"
                what = "in two groups" if id(weight) in trained else what
                wrong.setdefault(what, []).append(name)
    if left:
        wrong["in no group"] = [names[key] for key in left]
    if wrong:
        raise UsageError(
            "the weights that optimizer= trains are not those of the model; "
            + "; ".join(f"{what}: {shown_names(it)}" for what, it in wrong.items())
            + ". Expected each weight with requires_grad in one group, and no other, "
            "of the model that the function is given"
        ).on_all_ranks()


def add_schedulers(optimizers: Sequence[ScheduledOptimizer], made: Any) -> None:
    """Let optimizers have what `Task.configure_schedulers` has made for them."""
    names = {it.name for it in optimizers}
    for name, listed in _by_name({"": made} if names == {""} else made).items():
        owners = [it for it in optimizers if it.name == name]
        if len(listed) != len(owners):
            raise UsageError(
                f"scheduler= made {len(listed)} for {len(owners)} optimizers"
                f"{f' of {name!r}' * bool(name)}; expected a scheduler for each, or "
                "None for the configured schedule, in the form of optimizer="
            ).on_all_ranks()
        for owner, entry in zip(owners, listed, strict=True):
            if entry is not None:
                _add_scheduler(owner, entry)


def _add_scheduler(owner: ScheduledOptimizer, entry: Any) -> None:
    # Lightning's default of a dict is an epoch, and ours a step: it has to name it.
    options = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
    scheduler = options.pop("scheduler", None)
    takes_metric = isinstance(scheduler, ReduceLROnPlateau)
    monitor = options.pop("monitor", "loss" if takes_metric else None)
    default = None if isinstance(entry, Mapping) else "step"
    interval = options.pop("interval", "epoch" if takes_metric else default)
    problem = ""
    if not isinstance(scheduler, LRScheduler):
        problem = "expected a LRScheduler, or a dict that has one as 'scheduler'"
    elif scheduler.optimizer is not owner.optimizer:
        problem = "it is of another optimizer; expected the one that was passed"
    elif options or interval not in ("step", "epoch"):
        problem = (
            f"found {options or {'interval': interval}}; expected 'interval', which is "
            "'step' or 'epoch', and 'monitor'"
        )
    elif (monitor is not None) != takes_metric or (monitor and interval == "step"):
        problem = (
            f"found interval {interval!r} and monitor {monitor!r}; expected a monitor "
            "for ReduceLROnPlateau alone, each epoch"
        )
    if problem:
        kind = type(scheduler).__name__
        raise UsageError(f"scheduler= made {kind}: {problem}").on_all_ranks()
    owner.scheduler, owner.interval, owner.monitor = scheduler, interval, monitor


def _by_name(made: Any) -> dict[str, list[Any]]:
    """Return lists by name; the name is empty where there is no dict."""
    named = made if isinstance(made, Mapping) else {"": made}
    return {
        str(name): list(it) if isinstance(it, list | tuple) else [it]
        for name, it in named.items()
    }

"""The built-in optimizers, and the update: clip, skip, step, EMA."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.randomness import step_seed
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.tasks.stages import Stage
from mpitrain.tasks.task import Task
from mpitrain.torch_compat import multiply_all
from mpitrain.train.scheduled_optimizers import (
    ScheduledOptimizer,
    add_schedulers,
    check_optimizers,
    describe,
    optimizers_of,
)
from mpitrain.train.strategy.base import Strategy

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
}

NO_GRADIENT = (
    "no weight gets a gradient in the backward pass; expected a loss computed from "
    "what the model returns, without detach() and no_grad(). With --strategy fsdp "
    "the model has to return tensors, or tuples, lists, dicts or dataclasses of them: "
    "FSDP does not find those in other objects, such as torch.distributions"
)

SCALE_GROWTH_INTERVAL = 2000  # steps until the fp16 loss scale doubles, as in torch.amp

INITIAL_SCALE = 65536.0

LOST_RATE = (
    "a callback has set `lr` in a group of the optimizer, and the configured schedule "
    "sets it in each step; expected a schedule of its own: Trainer(scheduler=...)"
)

REPLACED = "optimizer", "lr", "scale_lr", "momentum", "weight_decay", "bias_decay"
REPLACED_SCHEDULE = "schedule", "warmup_epochs", "warmup_steps"
"""Settings without effect beside the user's optimizer, or scheduler."""

logger = logging.getLogger("mpitrain")


def build_optimizer(
    strategy: Strategy, config: TrainConfig, *, lr: float
) -> torch.optim.Optimizer:
    """Build the configured optimizer of the weights that `strategy` has wrapped.

    With ``shard_optimizer`` its state is sharded over the ranks (ZeRO-1).
    """
    kind = OPTIMIZERS[config.optimizer]
    options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.momentum > 0}
    elif config.optimizer == "rmsprop":
        options["momentum"] = config.momentum
    weights = list(strategy.named_weights().values())
    groups = strategy.parameter_groups(weights, config.optimizer)
    if not config.bias_decay:
        groups = [part for group in groups for part in _split_biases(group)]
    if config.shard_optimizer and strategy.world.world_size > 1:
        # Imported here: it takes a second, and few need it.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, **options)
    return kind(groups, **options)


def _split_biases(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield groups of the matrices of a group, and of weights without decay."""
    for options, is_bias in ({}, False), ({"weight_decay": 0.0}, True):
        weights = [it for it in group["params"] if (it.ndim < 2) is is_bias]
        if weights:
            yield {**group, **options, "params": weights}


class LossScale:
    """The factor of the loss in the backward pass. Equal on all ranks.

    DDP and FSDP average gradients over the ranks, and the sum is wanted: `value` is
    ``averaged_over``, the number of ranks. With fp16 it is a large power of two
    instead, lest small gradients become zero, and `inverse` puts that number back.
    """

    def __init__(self, averaged_over: int, *, is_used: bool) -> None:
        self.value = INITIAL_SCALE if is_used else float(averaged_over)
        self._averaged_over = averaged_over
        self._is_used = is_used
        self._good_steps = 0

    def state(self) -> list[float]:
        """Return what `restore` needs."""
        return [self.value, self._good_steps]

    def restore(self, state: list[float]) -> None:
        """Take the result of `state`; no effect without fp16."""
        if self._is_used:
            self.value, self._good_steps = float(state[0]), int(state[1])

    @property
    def inverse(self) -> float:
        """The factor that unscales gradients: 1 without fp16."""
        return self._averaged_over / self.value if self._is_used else 1.0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale may be why gradients are not finite."""
        return self._is_used and self.value > 1.0

    def shrink(self) -> None:
        """Halve the scale, after a step that was not finite."""
        self.value /= 2
        self._good_steps = 0

    def grow(self) -> None:
        """Count an applied step; double the scale after many."""
        self._good_steps += 1
        if self._is_used and self._good_steps == SCALE_GROWTH_INTERVAL:
            self.value *= 2
            self._good_steps = 0


class OptimizerWrapper:
    """Applies gradients to the weights of one stage: clip, skip, step, EMA.

    A step has a pass for each of `names`, in this order: the weights of its optimizers
    are trained, and the others frozen meanwhile.

    Attributes:
        optimizers: All of the stage, each with its schedule.
        form: What the user's are, in words; empty for the built-in one.
        ema_values: The averages of weights and float buffers, or of their shards, by
            name; empty without EMA.
    """

    def __init__(
        self,
        strategy: Strategy,
        config: TrainConfig,
        task: Task,
        ranks: Communicator,
        stage: Stage,
        total_steps: int | None,
    ) -> None:
        model, is_rank_zero = strategy.model, strategy.world.is_rank_zero
        made = task.configure_optimizers(model)
        is_custom = made is not None
        if not is_custom:
            made = build_optimizer(strategy, config, lr=stage.peak_lr(config))
        self.optimizers = optimizers_of(made)
        self.form = describe(self.optimizers, model) if is_custom else ""
        # Before `check_optimizers`, so that what it refuses is refused by all ranks.
        made_here = self.form or "none"
        ranks.check_equal(made_here, "what optimizer= makes", "Expected the same")
        ignored = [*REPLACED] if is_custom else []
        if is_custom:
            is_zero = config.shard_optimizer and strategy.world.world_size > 1
            check_optimizers(self.optimizers, model, is_zero=is_zero)
            for it in self.optimizers:
                groups = it.optimizer.param_groups
                is_plain = type(it.optimizer) in OPTIMIZERS.values() and not any(
                    group.get("fused") for group in groups
                )
                strategy.check_optimizer(it.kind, is_by_number=is_plain)
            if stage.lr is not None:
                raise UsageError(
                    f"Stage(lr={stage.lr}) sets the rate of the configured optimizer, "
                    "which optimizer= replaces; expected Stage(lr_factor=...)"
                ).on_all_ranks()
            for group in self.param_groups if stage.lr_factor != 1.0 else ():
                group["lr"] *= stage.lr_factor
        rates = [group["lr"] for group in self.param_groups]
        # After lr_factor: a scheduler takes the rates that it finds for its peak.
        schedulers = task.configure_schedulers(made, total_steps)
        if schedulers is not None:
            add_schedulers(self.optimizers, schedulers)
            # Of OneCycleLR it is max_lr / div_factor, whatever the group had.
            first = [it.get("initial_lr", it["lr"]) for it in self.param_groups]
            if first != rates and stage.lr_factor != 1.0 and is_rank_zero:
                logger.warning(
                    "scheduler= sets learning rates of its own: lr_factor=%g of stage "
                    "%r has an effect only if it takes them from the groups, as in "
                    "OneCycleLR(it, [g['lr'] for g in it.param_groups], ...)",
                    stage.lr_factor,
                    stage.name,
                )
        of_each = [(type(it.scheduler).__name__, it.interval) for it in self.optimizers]
        peaks = [float(group["lr"]) for group in self.param_groups]
        seen = f"{of_each} with learning rates {peaks}"
        what = "what optimizer= and scheduler= make"
        ranks.check_equal(seen, what, "Expected the same")
        if all(it.scheduler for it in self.optimizers):
            ignored += REPLACED_SCHEDULE
        if is_rank_zero and (names := config.changed.keys() & {*ignored}):
            logger.warning(
                "optimizer= and scheduler= replace %s of the TrainConfig: no effect, "
                "unless these functions read them",
                ", ".join(sorted(names)),
            )
        for it in self.optimizers:
            it.first_groups = it.plain_groups()
        self.num_steps = 0  # of the stage
        self.names = list(dict.fromkeys(it.name for it in self.optimizers))
        averaged_over = strategy.world.world_size if strategy.averages_gradients else 1
        self.scale = LossScale(averaged_over, is_used=config.precision == "fp16")
        self.config = config
        self._strategy = strategy
        self._named_weights = strategy.named_weights()
        self._weights = list(self._named_weights.values())
        self._present = self.optimizers  # those of the present pass
        self._frozen: list[nn.Parameter] = []  # meanwhile
        # The forward pass of a step that is then skipped has changed them already.
        self._may_skip = config.on_nonfinite == "skip" or self.scale.can_shrink
        self._before: dict[str, Tensor] = {}  # float buffers
        # The host has the loss scale, and what the passes of a step have in common.
        self.may_defer = not self.scale.can_shrink and len(self.names) == 1
        self._has_warned = False
        self._has_stopped: Tensor | None = None  # bool `()`, on the device
        self._has_averages = False  # whether the model has them now
        averaged = {} if config.ema_decay is None else self._state()
        self.ema_values = {
            name: tensor.detach().clone() for name, tensor in averaged.items()
        }

    @property
    def optimizer(self) -> Any:
        """The first one."""
        return self.optimizers[0].optimizer

    @property
    def is_monitored(self) -> bool:
        """Whether a scheduler is given a metric."""
        return any(it.monitor is not None for it in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers."""
        return [group for it in self.optimizers for group in it.optimizer.param_groups]

    def begin_pass(
        self, name: str, rate_of: Callable[[float], float], epoch: int, step: int
    ) -> None:
        """Set learning rates, drop gradients, and freeze what others train.

        ``rate_of`` maps the peak learning rate of a group to that of the step.
        """
        self._step = epoch, step
        self._present = [it for it in self.optimizers if it.name == name]
        scheduled = [it for it in self._present if it.scheduler is None]
        has_lost = [it.set_rates(rate_of) for it in scheduled]
        is_due = any(has_lost) and not self._has_warned
        if is_due and self._strategy.world.is_rank_zero:
            self._has_warned = True
            logger.warning(LOST_RATE)
        named = self._named_weights.values()
        # Not zeros: an optimizer leaves a weight without gradient alone, but would
        # decay one with zeros.
        for weight in named:
            weight.grad = None
        if len(self.names) > 1:
            self._strategy.reshard()
            mine = {id(weight) for it in self._present for weight in it.weights}
            self._weights = [it for it in named if id(it) in mine]
            others = [it for it in named if id(it) not in mine]
            self._frozen = [it for it in others if it.requires_grad]
            for weight in self._frozen:
                weight.requires_grad_(False)
            self._strategy.begin_pass(name)
        else:  # nothing is frozen: DDP needs no wrapper for the pass
            self._strategy.pass_name = name
        if self._may_skip:
            buffers = self._strategy.float_buffers()
            self._before = {name: tensor.clone() for name, tensor in buffers.items()}

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Let the model have the averages, if there are any, in this context."""
        if not self.ema_values or self._has_averages:  # a callback within a validation
            yield
            return
        self._swap()
        self._has_averages = True
        try:
            yield
        finally:
            self._has_averages = False
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: DDP, FSDP and optimizers hold these tensors.
        for tensor, average in self._averaged():
            kept = tensor.detach().clone()
            tensor.copy_(average)
            average.copy_(kept)
        self._strategy.reshard()

    def _state(self) -> dict[str, Tensor]:
        return {**self._named_weights, **self._strategy.float_buffers()}

    def _averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield weights and float buffers, each with its average."""
        present = self._state()
        for name, average in self.ema_values.items():
            if name in present:
                yield present[name], average

    def end_pass(self, factor: float | Tensor = 1.0) -> float | Tensor:
        """Clip and apply the gradients, if they are finite; collective if sharded.

        Args:
            factor: By which the gradients are multiplied before.

        Returns:
            The norm of the gradient before clipping, equal on all ranks. If it is not
            finite, the weights have not changed. A tensor, float64 `()`, where the
            device has decided that: the host has not waited for it.
        """
        for weight in self._frozen:
            weight.requires_grad_(True)
        gradients = self._gradients()
        if any(gradient.is_sparse for gradient in gradients):
            self._prepare_for_sparse()
            gradients = self._gradients()
        factor = self.scale.inverse * factor
        found = self._strategy.grad_norm(gradients)
        for it in self._present:
            it.check_fused()
        if isinstance(found, Tensor) and self._can_defer:
            # float64, as float(found) below: the bits are those of the host.
            norm_of_all = found.double().mul(factor).abs()
            self._apply_if_finite(gradients, norm_of_all, factor)
            return norm_of_all
        factor = float(factor)
        norm = float(found) * abs(factor)  # weights of losses may be < 0
        if not math.isfinite(norm):
            for name, buffer in self._strategy.float_buffers().items():
                if name in self._before:
                    buffer.copy_(self._before[name])
            return norm
        max_norm = self.config.clip_grad_norm
        if max_norm is not None and norm > max_norm:
            factor *= max_norm / norm
        if factor != 1.0:
            multiply_all(gradients, factor)
        for it in self._present:
            self._apply(it)
        self.scale.grow()
        # Once in a step, after its last pass.
        if self.ema_values and self._present[-1] is self.optimizers[-1]:
            self._update_ema()
        return norm

    @property
    def _can_defer(self) -> bool:
        return self.may_defer and all(it.can_skip for it in self._present)

    def _apply_if_finite(
        self, gradients: list[Tensor], norm: Tensor, factor: float | Tensor
    ) -> None:
        """Do what `end_pass` does, by operations of the device alone."""
        max_norm = self.config.clip_grad_norm
        if max_norm is not None:
            # Not max_norm / norm, which torch rounds twice: 1 / norm, and the product.
            share = torch.full_like(norm, max_norm) / norm
            factor = factor * share.clamp(max=1.0)
        if isinstance(factor, Tensor) or factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        is_bad = norm.isfinite().logical_not()
        # Nor is any later step applied then: the host hears of it when it has sent
        # more, and the weights are to be those before.
        if self.config.on_nonfinite == "stop":
            if self._has_stopped is not None:
                is_bad = is_bad | self._has_stopped
            self._has_stopped = is_bad
        for name, buffer in self._strategy.float_buffers().items():
            if name in self._before:
                buffer.copy_(torch.where(is_bad, self._before[name], buffer))
        for it in self._present:
            it.optimizer.found_inf = is_bad.float()  # read by torch's fused steps
            try:
                self._apply(it)
            finally:  # else torch reads it in a later step that is not deferred
                del it.optimizer.found_inf
        if self.ema_values:
            self._update_ema(is_bad.logical_not())

    def _apply(self, it: ScheduledOptimizer) -> None:
        try:
            if it.may_draw:
                purpose = f"optimizer {self.optimizers.index(it)}"
                seed = step_seed(self.config.seed, *self._step, purpose)
                is_sharded = self._strategy.is_sharded or it.optimizer is not it.local
                it.step_seeded(seed, self._strategy.world.device, is_sharded=is_sharded)
            else:
                it.optimizer.step()
        except UsageError:
            raise
        except Exception as error:
            if self.form and self._strategy.is_sharded:
                raise UsageError(
                    f"{it.kind} does not take the weights of --strategy fsdp, which "
                    f"are DTensors: {error}. Expected one that does, such as AdamW "
                    "without fused, or --strategy ddp"
                ) from error
            raise

    def end_step(self) -> list[float]:
        """Step the schedulers of steps; return the learning rates before."""
        lrs = [float(group["lr"]) for group in self.param_groups]
        self.num_steps += 1
        for it in self.optimizers:
            it.end_step()
        return lrs

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step the schedulers of epochs, after a validation."""
        for it in self.optimizers:
            if it.interval == "epoch":
                it.step_scheduler(metrics)

    def _gradients(self) -> list[Tensor]:
        found = (weight.grad for weight in self._weights)
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            raise DataError(NO_GRADIENT).on_all_ranks()
        return gradients

    def _prepare_for_sparse(self) -> None:
        """Add up what sparse gradients have twice; let the optimizer not be fused."""
        for name, weight in self._named_weights.items():
            if weight.grad is None or not weight.grad.is_sparse:
                continue
            # Here: with momentum a resume would add up the same numbers in another
            # order. A clone, since a reduced one may have no views.
            found = weight.grad.clone().coalesce()
            values = found.values()
            # Without rows of zeros, which padding has: SparseAdam would step them.
            kept = values.reshape(len(values), -1).any(1)
            weight.grad = torch.sparse_coo_tensor(
                found.indices()[:, kept], values[kept], found.shape, is_coalesced=True
            )
            for group in self.param_groups:
                # By identity: `in` compares numbers.
                if any(weight is it for it in group["params"]):
                    group["fused"] = None  # fused ones take dense gradients
                    if group.get("weight_decay"):
                        raise UsageError(
                            f"the gradient of {name} is sparse, and weight decay "
                            f"({group['weight_decay']}) needs a dense one; expected "
                            "--weight-decay 0, or a layer without sparse=True"
                        ).on_all_ranks()

    @torch.no_grad()
    def _update_ema(self, is_applied: Tensor | None = None) -> None:
        """Add the weights of a step; ``is_applied``: bool `()`, if it may not be."""
        weight_of_step = 1 - (self.config.ema_decay or 0.0)
        for tensor, average in self._averaged():
            share: Any = weight_of_step
            if is_applied is not None:
                share = is_applied.to(average.dtype) * weight_of_step
            average.lerp_(tensor.detach(), share)

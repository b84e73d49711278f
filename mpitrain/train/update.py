"""From gradients to new weights: checked, shortened, applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpitrain.train.config import LearningConfig
from mpitrain.train.strategy import Replica

GROWTH_STEPS = 2000
"""Good steps after which a loss in fp16 is scaled up again, as torch.amp has it."""

FIRST_SCALE = 65536.0


class LossScale:
    """What a loss is multiplied by, so that small gradients survive fp16.

    The gradients of all ranks have met when it is asked: all skip the same steps.

    Args:
        world_size: Number of ranks, over which gradients are averaged that shall be
            added up. Made up for before the backward pass; with fp16 after it, where
            numbers may be larger.
        is_used: Whether the precision needs it; else it is `world_size` for ever.
    """

    def __init__(self, world_size: int, *, is_used: bool) -> None:
        self.value = FIRST_SCALE if is_used else float(world_size)
        self._world_size = world_size
        self._is_used = is_used
        self._good_steps = 0

    def state(self) -> list[float]:
        """Return what `restore` wants."""
        return [self.value, self._good_steps]

    def restore(self, state: list[float]) -> None:
        """Go on from a state; where no precision needs a scale there is none."""
        if self._is_used:
            self.value, self._good_steps = float(state[0]), int(state[1])

    @property
    def undone_by(self) -> float:
        """What gradients must be multiplied by: 1 where it is not used."""
        return self._world_size / self.value if self._is_used else 1.0

    def may_shrink(self) -> bool:
        """Whether gradients that are not finite may be this scale's fault."""
        return self._is_used and self.value > 1.0

    def shrink(self) -> None:
        """Halve it, after a step that was too large for fp16."""
        self.value /= 2
        self._good_steps = 0

    def grow(self) -> None:
        """Count a good step; double the scale after many."""
        self._good_steps += 1
        if self._is_used and self._good_steps == GROWTH_STEPS:
            self.value *= 2
            self._good_steps = 0


class Average:
    """A moving average of the weights.

    Args:
        weights: Those that learn, by name, sharded ones share by share; and what else
            moves with them, such as the statistics of batch norm.
        decay: What is kept of it at each step, 0 to 1.

    Attributes:
        values: The averages by name.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._weights = weights
        self._decay = decay
        self.values = {name: it.detach().clone() for name, it in weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of this step."""
        for name, weight in self._weights.items():
            self.values[name].lerp_(weight.detach(), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            average = self.values[name]
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)


class Updater:
    """Applies gradients to the weights of one stage.

    Args:
        replica: Whose weights learn.
        optimizer: What changes them.
        config: How.
        scale: What the loss is multiplied by.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        config: LearningConfig,
        scale: LossScale,
    ) -> None:
        self.optimizer = optimizer
        self.scale = scale
        self._replica = replica
        self._weights = replica.weights
        kinds = {(w.dtype, w.device) for w in self._weights}
        is_sharded = any(hasattr(w, "full_tensor") for w in self._weights)
        self._are_alike = len(kinds) == 1 and not is_sharded
        self._is_on_cpu = all(w.device.type == "cpu" for w in self._weights)
        self.config = config
        decay = config.ema_decay
        # The forward pass of a step that is then left out has moved them already.
        may_skip = config.on_nonfinite == "skip" or scale.may_shrink()
        self._statistics = replica.statistics if may_skip else []
        self._before: list[Tensor] = []
        self._average = None if decay is None else Average(replica.moving(), decay)

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """What this rank updates weights by: with ZeRO, those of its share alone."""
        return getattr(self.optimizer, "optim", self.optimizer)

    def averages(self) -> Mapping[str, Tensor]:
        """Return the moving averages by name, if any are kept."""
        return self._average.values if self._average is not None else {}

    def set_learning_rate(self, rate: float) -> None:
        """Set it for all weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def begin_step(self) -> None:
        """Let the next backward pass begin anew."""
        for weight in self._weights:
            weight.grad = None
        self._before = [it.clone() for it in self._statistics]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model have the average of its weights for a while, if one is kept."""
        if self._average is None:
            yield
        else:
            with self._average.in_place():
                self._replica.weights_have_changed()
                yield
            self._replica.weights_have_changed()

    def update(self) -> tuple[bool, float]:
        """Apply the gradients that are there, if they are finite.

        Collective over the default group, where weights or optimizer are sharded.

        Returns:
            Whether the weights have changed, and the norm of the gradient: equal on all
            ranks. The norm is not finite where the gradient is not.
        """
        found = (weight.grad for weight in self._weights)
        gradients = [gradient for gradient in found if gradient is not None]
        factor = self.scale.undone_by
        norm = self._norm(gradients) * factor
        if not math.isfinite(norm):
            for statistic, before in zip(self._statistics, self._before, strict=True):
                statistic.copy_(before)
            return False, norm
        longest = self.config.clip_grad_norm
        if longest is not None and norm > longest:
            factor *= longest / norm
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        self.optimizer.step()
        self.scale.grow()
        if self._average is not None:
            self._average.update()
        return True, norm

    def _norm(self, gradients: list[Tensor]) -> float:
        """Return the norm of a whole gradient, of all shares where it is sharded."""
        if not gradients:
            return 0.0
        if self._are_alike:
            # What `get_total_norm` does, without the looking: half its time.
            norms = torch._foreach_norm(gradients)  # noqa: SLF001
            if self._is_on_cpu:
                return math.hypot(*map(float, norms))
            return float(torch.linalg.vector_norm(torch.stack(norms)))
        norm = nn.utils.get_total_norm(gradients)
        whole = getattr(norm, "full_tensor", None)
        return float(whole() if whole is not None else norm)

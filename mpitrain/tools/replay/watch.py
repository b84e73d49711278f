"""Looks into one step: batches, outputs of layers, losses and gradients of a rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.data.loader import Batch
from mpitrain.data.samples import leaves_of, map_tensors
from mpitrain.train.means import means_of_rows, named_values
from mpitrain.train.trainer import Trainer

Observe = Callable[[str, int, str, Tensor], None]
"""Takes a tensor: its kind, the micro-batch, its name, and itself. Kinds: input,
target, output, loss, gradient (of a weight, once it has one) and sum (of gradients)."""


@dataclass
class MicroBatchSeen:
    """What was seen of one micro-batch; on the CPU."""

    rank: int
    number: int  # in the step, with fixed micro-batches; else of the rank's
    pass_name: str  # of the optimizer; empty if there is one
    samples: list[int]
    losses: list[float]  # of each sample; empty if the loss has none
    bad_inputs: list[int]  # samples whose inputs are not finite
    first_bad: str = ""  # the first output, or gradient, that is not finite
    inputs: Any = None  # if they are asked for
    targets: Any = None


@dataclass
class StepWatch:
    """Watches the next step of a trainer, from `open` to `close`; local.

    Attributes:
        trainer: Whose step it is.
        observe: Called with each tensor, in the order of the computation, if at all.
        before: Called before the forward pass of each micro-batch.
        keeps: Whether `seen` has the batch of a micro-batch, of these samples.
        seen: The micro-batches of this rank.
        is_applied: Whether all passes of the step were applied: they were finite.
    """

    trainer: Trainer
    observe: Observe | None
    before: Callable[[int, Batch], None]
    keeps: Callable[[int, list[int]], bool] = lambda *_: False
    seen: list[MicroBatchSeen] = field(default_factory=list)
    is_applied: bool = True
    _finite: list[tuple[MicroBatchSeen, str, Tensor]] = field(default_factory=list)
    _hooks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def open(self) -> StepWatch:
        """Begin, before the step; return itself."""
        trainer, strategy = self.trainer, self.trainer.engine.strategy
        compute_loss = trainer.compute_loss

        def watched(batch: Batch, *names: str) -> Any:
            self._begin(batch, *names)
            found = compute_loss(batch, *names)
            self._end(batch, found)
            return found

        # An attribute of the object, in front of the method: removing it is the end.
        trainer.compute_loss = watched  # type: ignore[method-assign]
        self._hooks.callback(vars(trainer).pop, "compute_loss")
        for name, module in strategy.model.named_modules():
            self._add(module.register_forward_hook(self._output_hook(name)))
        if not strategy.is_sharded:  # shards have no gradients until the end
            for name, it in strategy.named_weights().items():
                weight: Any = it
                hook = self._grad_hook(name)
                self._add(weight.register_post_accumulate_grad_hook(hook))

        optimizer = trainer.engine.optimizer
        end_pass = optimizer.end_pass

        def watched_end(factor: float | Tensor = 1.0) -> float | Tensor:
            weights = strategy.named_weights() if self.observe else {}
            for name, weight in weights.items():
                if weight.grad is not None:  # before they are clipped
                    gradient = weight.grad * (factor * optimizer.scale.inverse)
                    self._tell("sum", -1, name, gradient)
            norm = end_pass(factor)
            self.is_applied &= math.isfinite(norm)
            return norm

        optimizer.end_pass = watched_end  # type: ignore[method-assign]
        self._hooks.callback(vars(optimizer).pop, "end_pass")
        return self

    def close(self) -> list[MicroBatchSeen]:
        """End, after the step; return what was seen."""
        self._hooks.close()
        for seen, name, is_finite in self._finite:
            if not seen.first_bad and not bool(is_finite):
                seen.first_bad = name
        self._finite.clear()
        return self.seen

    def _add(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _begin(self, batch: Batch, *names: str) -> None:
        strategy = self.trainer.engine.strategy
        pass_name = names[0] if names else ""
        number = strategy.micro_batch_number
        if not strategy.micro_batches_are_fixed:
            number = sum(it.pass_name == pass_name for it in self.seen)
        samples = batch.indices.tolist()
        seen = MicroBatchSeen(
            rank=self.trainer.engine.world.rank,
            number=number,
            pass_name=pass_name,
            samples=samples,
            losses=[],
            bad_inputs=bad_samples(batch),
        )
        if self.keeps(number, samples):  # before the step changes it
            copied = map_tensors(_copy, (batch.inputs, batch.targets))
            seen.inputs, seen.targets = copied
        self.seen.append(seen)
        for kind, tree in (("input", batch.inputs), ("target", batch.targets)):
            for place, leaf in enumerate(leaves_of(tree)):
                if isinstance(leaf, Tensor):
                    self._tell(kind, number, f"{kind} {place}", leaf)
        # Last: what a person changes in the debugger is not what was seen.
        self.before(number, batch)

    def _end(self, batch: Batch, found: Any) -> None:
        now = self.seen[-1]
        loss = named_values(found, "the training step")["loss"]
        rows = means_of_rows(loss, len(batch), batch.num_rows)
        if rows is not None:
            now.losses = rows.tolist()
        for place, leaf in enumerate(leaves_of(loss)):
            if isinstance(leaf, Tensor):
                self._look("loss", f"loss {place}", leaf)

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            what = f"{name or 'the model'} ({type(module).__name__})"
            for leaf in leaves_of(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self._look("output", what, leaf)

        return hook

    def _grad_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(weight: Tensor) -> None:
            if weight.grad is not None:
                self._look("gradient", name, weight.grad)

        return hook

    def _look(self, kind: str, name: str, tensor: Tensor) -> None:
        if not self.seen:
            return  # of an evaluation
        now = self.seen[-1]
        tensor = tensor.detach()
        # Read at the end: a GPU would wait for each.
        self._finite.append((now, f"{kind} of {name}", torch.isfinite(tensor).all()))
        self._tell(kind, now.number, name, tensor)

    def _tell(self, *of: Any) -> None:
        if self.observe is not None:
            self.observe(*of)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def bad_samples(batch: Batch) -> list[int]:
    """Return the samples of a batch whose inputs or targets are not finite."""
    if not len(batch):
        return []
    is_bad = torch.zeros(len(batch), dtype=torch.bool)
    for leaf in leaves_of((batch.inputs, batch.targets)):
        if (
            not isinstance(leaf, Tensor)
            or not leaf.is_floating_point()
            or not leaf.ndim
        ):
            continue
        more = leaf.shape[0] - batch.num_rows  # one in front, for mixing
        if more in (0, 1):
            rows = leaf[more : more + len(batch)].reshape(len(batch), -1)
            is_bad |= ~torch.isfinite(rows).all(1).cpu()
    found: list[int] = batch.indices[is_bad.numpy()].tolist()
    return found

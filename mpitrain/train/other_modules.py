"""Modules besides the model: the loss, and those that are attributes of the task.

A step computes with them, but does not train them, and no checkpoint has them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mpitrain.config import TrainConfig
from mpitrain.data.samples import digest
from mpitrain.errors import UsageError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.task import Task
from mpitrain.train.checks import refuse_buffers, shown_names
from mpitrain.train.metric_objects import METHODS
from mpitrain.train.model import broadcast_tensor, check_same_model, place_tensor
from mpitrain.train.strategy.base import Strategy

logger = logging.getLogger("mpitrain")


class OtherModules:
    """Compares them between ranks, and moves them to this rank's device; collective.

    A script does not know the device before `fit`. Weights and buffers become rank
    zero's. A loss gets the model's dtype, as it is called with the model's outputs; the
    code of a task may cast what it calls its modules with, so that they keep theirs.
    """

    def __init__(
        self,
        loss: Any,
        task: Task,
        model: nn.Module,
        strategy: Strategy,
        config: TrainConfig,
        world: World,
        ranks: Communicator,
    ) -> None:
        self._strategy, self._config = strategy, config
        self._world, self._ranks = world, ranks
        # Those of the model may be sharded; further ones are placed once.
        self._known = {id(it) for it in (*model.parameters(), *model.buffers())}
        # Digests for one comparison, after the first step: what moves, moves there.
        self._buffers: list[tuple[str, nn.Module, dict[str, str]]] = []
        # A loss that is no module on this rank may be one on another.
        module = loss if isinstance(loss, nn.Module) else nn.Module()
        self._prepare("the loss", module, casts=True)
        found = _modules_of(task, {*model.modules()})
        names = ", ".join(found) or "none"
        ranks.check_equal(
            names, "the list of the task's modules", "Expected the same on every rank"
        )
        for name, module in found.items():
            self._prepare(f"the task's {name}", module, casts=False)

    def _prepare(self, what: str, module: nn.Module, *, casts: bool) -> None:
        tensors = (*module.parameters(), *module.buffers())
        if any(map(is_lazy, tensors)):  # it has no shape to compare
            raise UsageError(
                f"{what} has lazy modules; expected them to be initialized: call it "
                "once with a batch before the training"
            )
        report = self._strategy.report_dependence
        check_same_model(module, self._ranks, report, what)
        untrained = [
            name
            for name, weight in module.named_parameters()
            if weight.requires_grad and id(weight) not in self._known
        ]
        if untrained and self._world.is_rank_zero:
            logger.warning(
                "%s has weights that the model does not have, and that are neither "
                "trained nor saved: %s; to train them, let the model's forward call "
                "them; else set requires_grad_(False)",
                what,
                shown_names(untrained),
            )
        if all(id(it) in self._known for it in tensors):
            return
        module.to(self._world.device)
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in self._known or _is_sharded(tensor):
                continue
            if casts:
                place_tensor(tensor, self._world, self._config)
            else:
                broadcast_tensor(tensor, self._world)
        before = {
            name: digest([it])
            for name, it in module.named_buffers()
            if id(it) not in self._known and not _is_sharded(it)
        }
        self._known |= {id(it) for it in (*module.parameters(), *module.buffers())}
        if before:
            self._buffers.append((what, module, before))

    def check_buffers(self) -> None:
        """Refuse modules whose buffers have moved; collective the first time.

        Each rank moves them by its own samples, and no checkpoint has them.
        """
        compared, self._buffers = self._buffers, []
        is_exact = self._strategy.micro_batches_are_fixed or self._world.world_size > 1
        for what, module, before in compared:
            named = dict(module.named_buffers())
            refuse_buffers(
                [
                    name
                    for name, value in before.items()
                    if name not in named or digest([named[name]]) != value
                ],
                f"buffers of {what} change in a step",
                "expected them in the model, whose buffers are kept equal and saved, "
                f"or {what} without, or in eval() mode",
                self._ranks,
                warning=None if is_exact else "they are in no checkpoint",
            )


def _modules_of(task: Task, parts: set[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that a task has, also in lists and dicts, by name.

    Without ``parts``, those of the model, and without metric objects.
    """

    def values() -> Iterator[tuple[str, Any]]:
        for name, value in vars(task).items():
            yield name, value
            if isinstance(value, list | tuple):
                value = dict(enumerate(value))
            if isinstance(value, Mapping):
                yield from ((f"{name}[{key!r}]", it) for key, it in value.items())

    return {
        name: it
        for name, it in values()
        if isinstance(it, nn.Module)
        and it not in parts
        and not all(callable(getattr(it, method, None)) for method in METHODS)
    }


def _is_sharded(tensor: Tensor) -> bool:
    """Whether a user's `fully_shard` has sharded it."""
    return hasattr(tensor, "full_tensor")

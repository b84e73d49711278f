"""A copy of the model on every rank, gradients all-reduced by torch's DDP."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.train.strategy.base import Strategy

_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"  # before torch 2.15
)

# What DDP's errors mean here, by a part of them.
DDP_HINTS = {
    "mark a variable ready only once": "Expected use_reentrant=False where activations "
    "are checkpointed, and tensors as outputs; or, if each step uses every weight, "
    "--find-unused-parameters never",
    "find_unused_parameters=True` is enabled": "Expected what the model returns to be "
    "a part of the loss. Where that is of derivatives alone, let forward compute and "
    "return them, or add 0 * outputs.sum()",
    "finished reduction in the prior": "Expected --find-unused-parameters always",
}


class DDPStrategy(Strategy):
    """All-reduces gradients while the last backward pass of a step runs.

    Without ``find_unused_parameters`` DDP leaves wrong gradients where a weight takes
    no part in the loss, and complains only in the next forward pass.
    """

    name = "ddp"
    averages_gradients = True
    reduces_in_backward = True
    module: DistributedDataParallel

    def wrap(self, model: nn.Module, *, find_unused_parameters: bool = True) -> None:
        """Wrap the model in `DistributedDataParallel`."""
        super().wrap(model)
        # Without buffers there is nothing to broadcast, nor a time of it to measure.
        self.communicates_before_step = bool(self._buffers)
        self._finds_unused = find_unused_parameters
        # It advises False where all weights were used, which may differ in other steps.
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True")
        self.module = self._wrapper()
        self._modules: dict[str, DistributedDataParallel] = {}

    def _wrapper(self) -> DistributedDataParallel:
        sync_buffers: Any = {_SYNC_BUFFERS: False}  # `broadcast_buffers` does it
        return DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=True,  # no second copy of the gradients
            find_unused_parameters=self._finds_unused,
            **sync_buffers,
        )

    def begin_pass(self, name: str) -> None:
        """Call a DDP of the weights that require gradients in the passes of a name."""
        super().begin_pass(name)
        # DDP waits for a gradient of each weight that required one when it was made.
        if name not in self._modules:
            self._modules[name] = self._wrapper()
        self.module = self._modules[name]

    def begin_step(self, epoch: int, step: int, num_samples: int) -> None:
        """Broadcast rank zero's buffers; collective."""
        del epoch, step, num_samples
        self.broadcast_buffers()

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Return a context: gradients are all-reduced in the last micro-batch only."""
        try:
            with nullcontext() if is_last else self.module.no_sync():
                yield
        except RuntimeError as error:
            # The first that fits: one text has two of the parts.
            hints = (hint for part, hint in DDP_HINTS.items() if part in str(error))
            if hint := next(hints, ""):
                error.add_note(hint)
            raise

    def call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call DDP so that its warning of unused parameters is one of Python's."""
        if not self._finds_unused:
            return super().call(module, *args, **kwargs)
        # It comes from C++ code without a warning handler, which prints it on every
        # rank. While a function of torch calls back, its handler is there (torch 2.14).
        outputs = []

        def call(number: float) -> float:
            outputs.append(super(DDPStrategy, self).call(module, *args, **kwargs))
            return number

        torch.zeros(1, device="cpu").apply_(call)
        return outputs[0]

"""A model that was built on torch's device ``meta``: its weights are made here.

It has shapes and no numbers, so that its strategy can make, and shard, one block after
the other. As torch has it, a module makes its own weights in ``reset_parameters()``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpitrain.data.randomness import own_random_state, seed_all
from mpitrain.errors import UsageError
from mpitrain.train.checks import shown_names


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has no numbers yet; an error on all ranks if a part of it has."""
    named = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, it in named if it.is_meta]
    if 0 < len(on_meta) < len(named):
        others = [name for name, it in named if not it.is_meta]
        raise UsageError(
            f"the model is in part on the device meta: {shown_names(on_meta)}; and "
            f"{shown_names(others)} not. Expected to build all of it within "
            "`with torch.device('meta'):`, or nothing"
        ).on_all_ranks()
    return bool(on_meta)


class WeightMaker:
    """Makes the weights and buffers of a model's parts, on a device.

    Each module has a seed of its own, by its name: the order of the parts changes no
    number. `place` moves a tensor's numbers to their dtype, and to the other ranks.
    """

    def __init__(
        self, model: nn.Module, device: str, seed: int, place: Callable[[Tensor], None]
    ) -> None:
        self._device, self._seed, self._place = device, seed, place
        self._names = {module: name for name, module in model.named_modules()}
        named = model.named_parameters(remove_duplicate=False)
        self._num_names: Counter[Tensor] = Counter(it for _, it in named)
        self._tied: dict[Tensor, Tensor] = {}  # what was made, by what it was

    def __call__(self, part: nn.Module) -> None:
        """Make what is still missing in a part of the model. Collective.

        Raises:
            UsageError: A module has no ``reset_parameters()``; on all ranks.
        """
        for module in _children_first(part):
            named = [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
            if missing := {name: it for name, it in named if it.is_meta}:
                self._make(module, missing)

    @torch.no_grad()
    def _make(self, module: nn.Module, missing: dict[str, Tensor]) -> None:
        name, kind = self._names[module], type(module).__name__
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:  # torch's Transformer and MultiheadAttention
            reset = getattr(module, "_reset_parameters", None)
        if reset is None:
            raise UsageError(
                f"the model is on the device meta, and {name or 'itself'}, a {kind}, "
                f"has {shown_names([*missing])}, but no method that makes the numbers; "
                "expected reset_parameters() in its class, as torch's modules have, or "
                "a model on the cpu"
            ).on_all_ranks()
        for at, it in missing.items():
            made = torch.empty_like(it, device=self._device)
            setattr(module, at, _like(made, it))
        # The process has its random numbers as before: a user may have seeded them.
        with own_random_state(self._device):
            text = f"{self._seed} {name}".encode()
            # 7 bytes of the hash: torch takes no more than 64 bits, signed.
            seed = int.from_bytes(hashlib.sha256(text).digest()[:7])
            seed_all(seed, self._device)
            reset()
        for at, it in missing.items():
            made = getattr(module, at)  # anew: reset() may have put another there
            if self._num_names[it] > 1:  # the first that has it makes its numbers
                made = self._tied.setdefault(it, made)
                setattr(module, at, made)
            self._place(made)


def _like(made: Tensor, before: Tensor) -> Tensor:
    if not isinstance(before, nn.Parameter):
        return made
    weight = nn.Parameter(made, requires_grad=before.requires_grad)
    weight.__dict__.update(before.__dict__)  # such as marks for the optimizer
    return weight


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield modules in the order in which their constructors end.

    A module may change what its parts have made: MultiheadAttention sets biases to 0.
    """
    for child in module.children():
        yield from _children_first(child)
    yield module

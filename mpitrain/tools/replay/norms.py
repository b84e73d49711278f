"""Norms of outputs, gradients and weights of a step, by layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class LayerNorms:
    """Sums the squares of what a `StepWatch` sees; collective with FSDP."""

    def __init__(self) -> None:
        self._squares: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def observe(self, kind: str, number: int, name: str, tensor: Tensor) -> None:
        """Add outputs, and gradients before they are clipped."""
        del number
        if kind in ("output", "sum"):
            self._squares[kind, name].append(_square(tensor))

    def squares(self) -> dict[tuple[str, str], float]:
        """Return the sum of squares by kind and name, of this rank."""
        return {key: sum(map(float, found)) for key, found in self._squares.items()}


def layer_lines(
    of_ranks: list[Mapping[tuple[str, str], float]], weights: Mapping[str, Any]
) -> list[str]:
    """Return a table of outputs over all ranks, and one of weights.

    Args:
        of_ranks: The `LayerNorms.squares` of each rank.
        weights: Before the step, by name; on the CPU.
    """
    outputs: defaultdict[str, float] = defaultdict(float)
    for squares in of_ranks:
        for (kind, name), value in squares.items():
            if kind == "output":
                outputs[name] += value
    sums = {name: it for (kind, name), it in of_ranks[0].items() if kind == "sum"}
    width = max(map(len, (*outputs, *weights)), default=0)
    lines = [f"  {'output of':{width}}  norm"]
    lines += [f"  {name:{width}}  {math.sqrt(it):.6g}" for name, it in outputs.items()]
    lines.append(f"  {'weight':{width}}  norm          gradient")
    for name, weight in weights.items():
        if isinstance(weight, Tensor) and weight.is_floating_point():
            norm = math.sqrt(float(_square(weight)))
            gradient = f"{math.sqrt(sums[name]):.6g}" if name in sums else "none"
            lines.append(f"  {name:{width}}  {norm:<12.6g}  {gradient}")
    return lines


def _square(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    whole: Any = getattr(tensor, "full_tensor", None)  # of FSDP; collective
    tensor = tensor if whole is None else whole()
    if tensor.is_sparse:
        # Of an embedding: a row may be in it several times, and counts by its sum.
        tensor = tensor.coalesce().values()
    # The square of 256 is infinite in float16.
    return tensor.to(torch.float64).square().sum()

"""Sums of gradients in one order, and gradients in flat memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = list[Tensor | None]  # of the weights; None: not in the loss

ALIGNMENT = 64  # numbers: kernels of GPUs add aligned memory in another order

Node = tuple[int, int]
"""Level and position in the tree of sums: the sum of ``2**level`` numbers from
``position * 2**level`` on."""


class PairwiseSum:
    """Adds values by number in one order, whatever order they come in.

    Numbers 0 and 1 are added, and 2 and 3, and then both sums, and so on: a binary
    tree. `nodes` are the sums that wait for their neighbour.

    >>> tree = PairwiseSum()
    >>> for number in (2, 0, 1):
    ...     tree.add((0, number), [torch.tensor(float(number))])
    >>> sorted(tree.nodes), tree.total()
    ([(0, 2), (1, 0)], [tensor(3.)])
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, Gradients] = {}

    def add(self, node: Node, value: Gradients) -> None:
        """Take a value, which may be changed in place."""
        level, position = node
        # Positions of neighbours differ in the last bit.
        while (found := self.nodes.pop((level, position ^ 1), None)) is not None:
            value = _add(value, found) if position & 1 == 0 else _add(found, value)
            level, position = level + 1, position // 2
        self.nodes[level, position] = value

    def total(self) -> Gradients:
        """Return the sum of all, and begin anew."""
        # What has no neighbour, as 2 of 0 to 2, is added from the right: in one order.
        *others, total = [self.nodes[node] for node in sorted(self.nodes, key=_first)]
        self.nodes = {}
        for value in reversed(others):
            total = _add(value, total)
        return total


def nodes_of(numbers: range) -> list[Node]:
    """Return the nodes of a `PairwiseSum` of consecutive numbers, in their order.

    >>> nodes_of(range(3, 9))
    [(0, 3), (2, 1), (0, 8)]
    """
    found, start = [], numbers.start
    while start < numbers.stop:
        level = (numbers.stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        found.append((level, start >> level))
        start += 1 << level
    return found


def _first(node: Node) -> int:
    return node[1] << node[0]


@torch.no_grad()
def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add in place, to the left one."""
    for place, (mine, other) in enumerate(zip(left, right, strict=True)):
        if mine is None:
            left[place] = other
        elif other is not None:
            _local(mine).add_(_local(other))
    return left


def _local(tensor: Any) -> Tensor:
    """Return a rank's shard of a DTensor, or the tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


class FlatGradients:
    """Writes gradients of weights into flat memory, and reads them from it.

    Each begins at a multiple of `ALIGNMENT`. The end has a flag for each weight,
    whether it has a gradient.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        # What autograd gives a gradient: the weight's strides where it has no gaps.
        self._strides = [torch.empty_like(it, device="meta").stride() for it in weights]
        sizes = [it.numel() * (1 + it.is_complex()) for it in weights]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        *self._starts, self._end = itertools.accumulate(padded, initial=0)
        self._sizes = sizes
        self.length = self._end + len(weights)
        self.dtype = weights[0].dtype.to_real()

    def pack(self, gradients: Gradients, flat: Tensor) -> None:
        """Write gradients."""
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        # They are added as the rest is: not 0 where any micro-batch has a gradient.
        flags = [float(gradient is not None) for gradient in gradients]
        flat[self._end : self.length] = torch.tensor(flags)

    def unpack(self, flat: Tensor) -> Gradients:
        """Return gradients, as views."""
        flags = flat[self._end : self.length].tolist()
        views = zip(self._views(flat), flags, strict=True)
        return [view if is_used else None for view, is_used in views]

    def _views(self, flat: Tensor) -> Iterable[Tensor]:
        for weight, start, size, strides in zip(
            self._weights, self._starts, self._sizes, self._strides, strict=True
        ):
            part = flat[start : start + size]
            if weight.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            yield part.as_strided(weight.shape, strides)

"""Tensors in dictionaries, lists and tuples, as data sets of one's own return them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def each(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor of a nest of dictionaries, lists and tuples.

    >>> each({"a": [torch.zeros(2), "b"]}, lambda it: it + 1)
    {'a': [tensor([1., 1.]), 'b']}
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return {name: each(value, change) for name, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(each(value, change) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(each(value, change) for value in nest)
    return nest


def digest(nest: Any) -> str:
    """Return a short text that is equal where all tensors of two nests are.

    >>> digest([torch.zeros(2), "b"])
    'af5570f5a1810b7a'
    """
    found = hashlib.sha256()

    def take(tensor: Tensor) -> Tensor:
        bytes_of = tensor.cpu().reshape(-1).contiguous().view(torch.uint8)
        found.update(bytes_of.numpy().tobytes())
        return tensor

    each(nest, take)
    return found.hexdigest()[:16]


def rows_of(nest: Any, rows: Tensor) -> Any:
    """Choose rows of every tensor of a nest, by number: int64 `(N,)`."""
    return each(nest, lambda it: it.index_select(0, rows.to(it.device)))


def moved(nest: Any, device: str) -> Any:
    """Bring every tensor of a nest to a device."""
    return each(nest, lambda it: it.to(device, non_blocking=True))


def in_precision(nest: Any, dtype: torch.dtype) -> Any:
    """Bring every tensor of floating point to a precision."""
    return each(nest, lambda it: it.to(dtype) if it.is_floating_point() else it)

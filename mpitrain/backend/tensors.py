"""Tensors as MPI and shared memory need them: on the host and contiguous."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


class HostTensors:
    """Some tensors, each as a contiguous ``(N,)`` on the host.

    Those on a GPU or with gaps are copied, a GPU's through pinned memory, after the
    work queued on it. Without `read` their values are not needed.
    """

    def __init__(self, tensors: Tensors, *, read: bool = True) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        # Autograd refuses to write into weights, and would record it elsewhere.
        self.flat = [self._flatten(tensor.detach(), read) for tensor in tensors]

    def _flatten(self, tensor: Tensor, read: bool) -> Tensor:
        if tensor.is_sparse or tensor.layout is not torch.strided:
            raise ValueError(
                f"mpi4py: expected a dense tensor, found layout {tensor.layout} (only "
                "all_reduce takes sparse ones)"
            )
        if tensor.is_cpu and tensor.is_contiguous():
            return flatten(tensor)
        size, is_pinned = tensor.numel(), not tensor.is_cpu
        flat = torch.empty(size, dtype=tensor.dtype, pin_memory=is_pinned)
        if read:
            flat.view(tensor.shape).copy_(tensor)  # waits for the GPU
        self._copies.append((tensor, flat))
        return flat

    @property
    def bytes(self) -> list[Tensor]:
        """The same as ``uint8``."""
        return [flat.view(torch.uint8) for flat in self.flat]

    def write_back(self) -> None:
        """Copy the results into tensors that were copied."""
        for tensor, flat in self._copies:
            tensor.copy_(flat.view(tensor.shape))


def flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as ``(N,)`` with stride 1.

    A dimension of one element may have any stride. `view` would keep it, and could then
    not show the tensor as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def check_one_dtype(tensors: Tensors, name: str) -> None:
    """Raise a ValueError if tensors have several types."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        found = ", ".join(sorted(map(str, types)))
        raise ValueError(f"mpi4py: {name}: expected tensors of one type, found {found}")


def check_numel(tensor: Tensor, expected: int, name: str) -> None:
    """Raise a ValueError if an output has another number of elements."""
    if tensor.numel() != expected:
        raise ValueError(
            f"mpi4py: {name}: the output has {tensor.numel()} elements, expected "
            f"{expected}"
        )


def split_evenly(tensor: Tensor, num_parts: int, name: str) -> list[Tensor]:
    """Split a flat tensor into parts of one length, or raise a ValueError."""
    if tensor.numel() % num_parts:
        raise ValueError(
            f"mpi4py: {name}: {tensor.numel()} elements cannot be split evenly over "
            f"{num_parts} ranks"
        )
    return list(tensor.chunk(num_parts)) if tensor.numel() else [tensor] * num_parts


def split_rows(
    flat: Tensor, shape: torch.Size, rows: Sequence[int], num_parts: int
) -> list[Tensor]:
    """Split a flat tensor of this shape into parts of some rows; none: evenly."""
    if not rows:
        return split_evenly(flat, num_parts, "all_to_all")
    if len(rows) != num_parts or sum(rows) != shape[0]:
        raise ValueError(
            f"mpi4py: all_to_all: expected {num_parts} sizes with the sum {shape[0]}, "
            f"the first dimension, found {list(rows)}"
        )
    width = math.prod(shape[1:])
    return list(torch.split(flat, [number * width for number in rows]))

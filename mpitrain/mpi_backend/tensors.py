"""Tensors as MPI and shared memory want them: in host memory, without gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class InHostMemory:
    """Some tensors, each as ``(N,)`` in host memory without gaps.

    Those that are so already are used as they are. Others, on a GPU or with gaps, are
    copied; a GPU's through pinned memory, and after what it still had to do.

    Args:
        tensors: Of any shapes.
        read: Whether their values matter.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, read: bool = True) -> None:
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flat = [self._flat(tensor.detach(), read) for tensor in tensors]

    def _flat(self, tensor: torch.Tensor, read: bool) -> torch.Tensor:
        if tensor.is_sparse or tensor.layout is not torch.strided:
            raise ValueError(
                f"mpi4py: a tensor of layout {tensor.layout} has no place in this "
                "operation; expected a dense one (all_reduce takes sparse ones)"
            )
        if tensor.is_cpu and tensor.is_contiguous():
            return in_line(tensor)
        flat = torch.empty(
            tensor.numel(), dtype=tensor.dtype, pin_memory=not tensor.is_cpu
        )
        if read:
            flat.view(tensor.shape).copy_(tensor)  # waits for the GPU
        self._copied.append((tensor, flat))
        return flat

    @property
    def bytes(self) -> list[torch.Tensor]:
        """The same as ``uint8``."""
        return [flat.view(torch.uint8) for flat in self.flat]

    def write_back(self) -> None:
        """Copy into those that were copied."""
        for tensor, flat in self._copied:
            tensor.copy_(flat.view(tensor.shape))


def in_line(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's elements as ``(N,)``, one beside the other.

    A dimension of one element may have any stride, which `view` would keep, and with
    it nothing could be seen as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,))


def check_alike(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Refuse tensors of several types.

    Raises:
        ValueError: With the types that were found.
    """
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        found = ", ".join(sorted(map(str, types)))
        raise ValueError(f"mpi4py: {what}: tensors of one type expected, found {found}")


def check_size(tensor: torch.Tensor, expected: int, what: str) -> None:
    """Refuse a result that does not fit.

    Raises:
        ValueError: With both numbers of elements.
    """
    if tensor.numel() != expected:
        raise ValueError(
            f"mpi4py: {what}: the output has {tensor.numel()} elements, expected "
            f"{expected}"
        )


def split_evenly(tensor: torch.Tensor, num_parts: int, what: str) -> list[torch.Tensor]:
    """Cut a flat tensor into parts of one length.

    Raises:
        ValueError: That cannot be.
    """
    if tensor.numel() % num_parts:
        raise ValueError(
            f"mpi4py: {what}: {tensor.numel()} elements are not for {num_parts} ranks"
        )
    return list(tensor.chunk(num_parts)) if tensor.numel() else [tensor] * num_parts


def split_rows(
    flat: torch.Tensor, shape: torch.Size, rows: Sequence[int], num_parts: int
) -> list[torch.Tensor]:
    """Cut a flat tensor where its first dimension is cut.

    Args:
        flat: ``(N,)``.
        shape: As it is seen by the user.
        rows: Rows of each part; empty for parts of one length.
        num_parts: Number of parts.

    Raises:
        ValueError: The rows are not those of the shape.
    """
    if not rows:
        return split_evenly(flat, num_parts, "all_to_all")
    if len(rows) != num_parts or sum(rows) != shape[0]:
        raise ValueError(
            f"mpi4py: all_to_all: sizes {list(rows)} expected to be of {num_parts} "
            f"ranks and to add up to {shape[0]}, the first dimension"
        )
    width = math.prod(shape[1:])
    return list(torch.split(flat, [number * width for number in rows]))

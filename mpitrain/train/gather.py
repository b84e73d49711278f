"""Rows of all ranks in a training step, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mpitrain.data.samples import kind_of
from mpitrain.mpi.shared_arrays import Communicator, refuse_differences


def gather_rows(
    rows: Tensor, ranks: Communicator, own_rank: int
) -> tuple[Tensor, slice]:
    """Return the rows of all ranks by rank, and where this rank's are; collective.

    ``rows`` are `(N, ...)`; N may differ between ranks, and be 0.

    Raises:
        DataError: The tensors differ in more than N; on every rank.
    """
    # Compared first: ranks with other shapes would wait, or get something else.
    of_ranks = ranks.allgather((len(rows), kind_of(rows[:0])))
    counts, kinds = zip(*of_ranks, strict=True)
    refuse_differences(
        dict(enumerate(kinds)),
        "the kind of all_gather's rows",
        "Expected tensors that differ in the number of rows alone",
    )
    start = sum(counts[:own_rank])
    mine = slice(start, start + len(rows))
    if len(counts) == 1:
        return rows, mine
    found: Tensor = _AllGather.apply(rows, counts, mine)
    return found, mine


class _AllGather(torch.autograd.Function):
    """Its backward pass adds up what the losses of all ranks want of this rank's rows.

    Each rank has the losses of its samples, so that is the gradient of the whole loss.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], mine: slice) -> Tensor:
        """Gather rows that are padded to the largest number."""
        ctx.mine = mine
        # all_gather takes tensors of one shape. pad() counts dimensions from the last.
        padding = (0, 0) * (rows.ndim - 1) + (0, max(counts) - len(rows))
        padded = F.pad(rows.detach(), padding).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([it[:num] for it, num in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients of all ranks."""
        # A copy: autograd may use this tensor elsewhere, and all_reduce writes to it.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.mine], None, None

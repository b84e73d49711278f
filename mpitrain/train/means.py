"""Means over samples, or over weights: what losses and metrics return for a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.data.samples import kind_of
from mpitrain.errors import DataError


class Sum(NamedTuple):
    """The sum of a batch's values; the mean is `total / weight` of the whole step."""

    total: Tensor  # `()`: the sum, of values times weights
    weight: Tensor | None  # float64 `()`: the sum of weights; ``None``: samples


def named_values(found: Any, what: str) -> Mapping[str, Any]:
    """Return values by name: those of a mapping, or one, the loss.

    Raises:
        DataError: There is no loss.
    """
    if isinstance(found, Tensor) or not isinstance(found, Mapping):
        return {"loss": found}  # asked in this order: a Mapping's check takes 1 us
    if "loss" not in found:
        raise DataError(
            f"{what} returned {kind_of(found)}; expected 'loss' among the names, the "
            "one that is minimized"
        )
    return found


def is_weighted(values: Any) -> bool:
    """Whether they are a pair of values and weights."""
    return isinstance(values, tuple | list)


def form_of(named: Mapping[str, Any]) -> str:
    """Describe what was returned, so that ranks and steps can be compared.

    >>> form_of({"loss": (torch.ones(2), torch.ones(2)), "dice": torch.ones(2)})
    'loss with weights, dice'
    """
    return ", ".join(
        name + " with weights" * is_weighted(it) for name, it in named.items()
    )


def sum_of(values: Any, num: int, num_rows: int, name: str) -> Sum:
    """Sum values over the ``num`` samples of a batch, without its padding.

    Args:
        values: One per row, `(num_rows,)`; several, `(num_rows, ...)`, which are
            averaged; a scalar, the mean over the samples; or a pair of values and
            weights of one shape, `(num_rows, ...)`: every value counts by its weight.
            A pair may have any shape, such as `(nodes,)`: a row of padding beside
            samples is a copy of one, and is of all values then.
        num: Samples of the batch.
        num_rows: Samples and padding. Padding may be cut off already.
        name: For messages.

    >>> sum_of(torch.tensor([1.0, 2.0, 9.0]), 2, 3, "loss").total
    tensor(3.)
    >>> sum_of((torch.tensor([1.0, 2.0]), torch.tensor([3, 1])), 2, 2, "loss")
    Sum(total=tensor(5.), weight=tensor(4., dtype=torch.float64))

    Of a row and a copy of it, with three values each:

    >>> sum_of((torch.arange(6.0), torch.ones(6)), 1, 2, "loss")
    Sum(total=tensor(7.5000), weight=tensor(3., dtype=torch.float64))
    """
    if is_weighted(values):
        return _weighted_sum(values, num, num_rows, name)
    if not isinstance(values, Tensor):
        raise DataError(f"the {name} is {kind_of(values)}; expected a tensor")
    if values.ndim == 0:
        if num:
            return Sum(values * num, None)
        # Of padding alone: 0, with the graph, since ranks reduce in the backward pass
        # (docs/decisions/0005). nan_to_num: 0 * inf is nan.
        return Sum(values.nan_to_num(0.0, 0.0, 0.0) * 0.0, None)
    if values.shape[0] not in (num, num_rows):
        raise DataError(
            f"the {name} of a batch of {num_rows} rows is {kind_of(values)}; expected "
            f"one for each row, ({num_rows},), their mean, (), or values and weights"
        )
    if values.ndim > 1:
        values = values.flatten(1).mean(1)
    return Sum((values if values.shape[0] == num else values[:num]).sum(), None)


def means_of_rows(values: Any, num: int, num_rows: int) -> Tensor | None:
    """Return the mean of each sample's values, `(num,)`; ``None`` if they have none.

    The arguments are those of `sum_of`.

    >>> means_of_rows((torch.ones(2, 3), torch.eye(2, 3)), 1, 2)
    tensor([1.])
    """
    weights = None
    if is_weighted(values):
        values, weights = values
    if not num or not values.ndim or values.shape[0] not in (num, num_rows):
        return None
    rows: Tensor = values[:num].detach().reshape(num, -1)
    if weights is None:
        return rows.mean(1)
    of_rows: Tensor = weights[:num].reshape(num, -1)
    return (rows * of_rows).sum(1) / of_rows.sum(1)


def _weighted_sum(pair: Sequence[Any], num: int, num_rows: int, name: str) -> Sum:
    are_tensors = len(pair) == 2 and all(isinstance(it, Tensor) for it in pair)
    if not are_tensors or pair[0].shape != pair[1].shape:
        raise DataError(
            f"the {name} is {kind_of(pair)}; expected values and their weights, two "
            "tensors of one shape"
        )
    values, weights = pair[0], pair[1].to(pair[0].device)
    if weights.requires_grad:  # most often a second loss
        raise DataError(
            f"the weights of the {name} need a gradient, and get none; expected "
            "constants, weights.detach(), or several losses by name: "
            "{'loss': ..., 'other': ...}"
        )
    if not num:  # padding alone, as in `sum_of`
        nothing = values.nan_to_num(0.0, 0.0, 0.0).sum() * 0.0
        return Sum(nothing, weights.new_zeros((), dtype=torch.float64))
    share = 1.0
    if values.ndim and values.shape[0] in (num, num_rows):
        values, weights = values[:num], weights[:num]
    else:
        share = num / num_rows  # padding beside samples is copies of them
    total = (values * weights.to(values.dtype)).sum() * share
    # float64: of a sum of weights each digit counts, also of millions of tokens.
    return Sum(total, weights.sum(dtype=torch.float64) * share)

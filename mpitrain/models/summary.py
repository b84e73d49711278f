"""What a model consists of, in a line and in a table."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn


def summary_line(model: nn.Module, name: str | None = None) -> str:
    """Count the weights of a model.

    Args:
        model: Any model.
        name: What to call it; ``None`` for the name of its class.

    Returns:
        One line; MB are 10**6 bytes of weights and buffers, as they are now.

    >>> summary_line(nn.Linear(100, 10), "tiny")
    'tiny: 1,010 weights (all train), 0.0 MB'
    """
    total = num_weights(model.parameters())
    trained = num_weights(p for p in model.parameters() if p.requires_grad)
    which = "all train" if trained == total else f"{trained:,} train"
    tensors = chain(model.parameters(), model.buffers())
    megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
    name = name or type(model).__name__
    return f"{name}: {total:,} weights ({which}), {megabytes:.1f} MB"


def summary_table(model: nn.Module) -> str:
    """List the modules that hold weights of their own.

    Args:
        model: Any model.

    Returns:
        Lines of columns: module, type, weights, and how many of them train; the last
        line is the sum, in which weights that modules share count once.

    >>> print(summary_table(nn.Sequential(nn.Linear(100, 20), nn.Linear(20, 3))))
    module  type        weights  train
    0       Linear        2,020  2,020
    1       Linear           63     63
    all     Sequential    2,083  2,083
    """
    rows = [("module", "type", "weights", "train")]
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            rows.append(_row(name or "(itself)", module, own))
    rows.append(_row("all", model, list(model.parameters())))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def num_weights(parameters: Iterable[nn.Parameter]) -> int:
    """Count the numbers in parameters.

    >>> num_weights(nn.Linear(4, 3).parameters())
    15
    """
    return sum(parameter.numel() for parameter in parameters)


def _row(
    name: str, module: nn.Module, parameters: list[nn.Parameter]
) -> tuple[str, str, str, str]:
    trained = num_weights(p for p in parameters if p.requires_grad)
    total = num_weights(parameters)
    return name, type(module).__name__, f"{total:,}", f"{trained:,}"

"""A model's layers and weights, in a line and in a table."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn


def summary_line(model: nn.Module) -> str:
    """Count the weights of a model, and their megabytes (10**6 bytes, with buffers).

    >>> summary_line(nn.Linear(100, 10))
    'Linear: 1,010 weights (all train), 0.0 MB'
    """
    total, trained = _counts(model.parameters())
    which = "all train" if trained == total else f"{trained:,} train"
    tensors = chain(model.parameters(), model.buffers())
    megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
    name = type(model).__name__
    return f"{name}: {total:,} weights ({which}), {megabytes:.1f} MB"


def summary_table(model: nn.Module) -> str:
    """List the modules with parameters of their own; shared ones count once in the sum.

    >>> print(summary_table(nn.Sequential(nn.Linear(100, 20), nn.Linear(20, 3))))
    module  type        weights  train
    0       Linear        2,020  2,020
    1       Linear           63     63
    all     Sequential    2,083  2,083
    """
    modules = [
        (name or "(itself)", module, list(module.parameters(recurse=False)))
        for name, module in model.named_modules()
    ]
    modules.append(("all", model, list(model.parameters())))
    rows = [("module", "type", "weights", "train")]
    for name, module, parameters in modules:
        if parameters or name == "all":
            total, trained = _counts(parameters)
            rows.append((name, type(module).__name__, f"{total:,}", f"{trained:,}"))
    a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{m:{a}}  {t:{b}}  {w:>{c}}  {n:>{d}}" for m, t, w, n in rows)


def _counts(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)

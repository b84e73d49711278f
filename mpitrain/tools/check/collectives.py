"""The trial of every collective of `truths`, on one device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mpitrain.launch.process_exit import is_consequence
from mpitrain.mpi.world import World
from mpitrain.tools.check.truths import Setting, Truth

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from mpitrain.launch.job import Job

LACKING = (
    "cannot use reduceop",
    "does not support",
    "is only implemented for",
    "not implemented",
    "not supported",
    "unsupported",
)
"""How torch says that a backend has no such collective; parts of messages."""

_NUMBERS = itertools.count()
"""Of this process's trials; equal on all ranks, which try the same."""

Outcome = Literal["right", "lacking", "wrong", "failed"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one kind on one device of this rank."""

    kind: str
    """Such as ``"all_reduce (sum)"``."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    outcome: Outcome
    """Whether it gave what it must."""
    detail: str = ""
    """What was wrong, or torch's words."""


def try_all(
    job: Job, world: World, device: str, store: Store | None, truths: Sequence[Truth]
) -> list[Result]:
    """Try every kind on one device.

    Collective over all ranks. A rank that does not arrive is the watchdog's to name.

    Args:
        job: The running job.
        world: Where this process stands.
        device: This rank's, as ``"cpu"`` or ``"cuda:1"``.
        store: The rendezvous store.
        truths: What to try.

    Returns:
        What came of each on this rank.
    """
    results = []
    for truth in truths:
        if world.world_size < truth.least_ranks:
            continue
        job.progress(f"check: {truth.kind} on {device}")
        setting = Setting(
            rank=world.rank,
            world_size=world.world_size,
            device=device,
            store=store,
            name=f"check/{next(_NUMBERS)}",
        )
        outcome, detail = _try(truth, setting)
        kind = device.partition(":")[0]
        results.append(
            Result(kind=truth.kind, device=kind, outcome=outcome, detail=detail)
        )
    return results


def _try(truth: Truth, setting: Setting) -> tuple[Outcome, str]:
    try:
        found = truth.call(setting)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if any(sign in text.lower() for sign in LACKING):
            return "lacking", text
        if is_consequence(error):
            raise  # another rank's end; that rank tells
        return "failed", text
    must = truth.must(setting)
    if must is None:
        return "right", ""
    detail = difference(found, must, truth.tolerance)
    return ("wrong", detail) if detail else ("right", "")


def difference(found: Any, must: Any, tolerance: float) -> str:
    """Word where two values differ first.

    Args:
        found: A tensor, or what compares by ``==``.
        must: What it must be.
        tolerance: Relative error that is no fault, for tensors.

    Returns:
        One line, nothing where they do not.
    """
    if not isinstance(must, torch.Tensor):
        return "" if found == must else f"found {found!r}, expected {must!r}"
    if found.shape != must.shape:
        return f"found shape {tuple(found.shape)}, expected {tuple(must.shape)}"
    far = ~torch.isclose(found, must.to(found.dtype), rtol=tolerance, atol=0.0)
    if not far.any():
        return ""
    where = tuple(int(i) for i in far.nonzero()[0])
    place = ", ".join(map(str, where))
    value, expected = found[where].item(), must[where].item()
    return f"element {place} is {value}, expected {expected}"

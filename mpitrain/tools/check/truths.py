"""What every collective of torch.distributed must give: a table.

Integers in floats, so that equal means equal. `TRUTHS` has for each kind what a rank
puts in, the call, and what must come out on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# By the names that FSDP calls them by, which torch 2.15 changed.
_all_gather_base: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_base: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NUM_VALUES = 257
"""Values per rank: a prime, so that no number of ranks divides it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the trial of one kind knows."""

    rank: int
    world_size: int
    device: str
    store: Store | None
    """Where ranks count themselves, for the barrier; ``None``: not to be had."""
    name: str
    """Different for each trial, and equal on all ranks."""

    @property
    def root(self) -> int:
        """The rank that sends to all or collects: the last, so never rank zero."""
        return self.world_size - 1

    def given(self, rank: int) -> torch.Tensor:
        """Return what a rank puts in: float32 ``(257,)``, 1 to 11."""
        values = torch.arange(NUM_VALUES, device=self.device)
        return (values % 7 + rank % 5 + 1).float()

    def all_given(self) -> torch.Tensor:
        """Return what all ranks put in: float32 ``(world_size, 257)``."""
        return torch.stack([self.given(rank) for rank in range(self.world_size)])

    def empty(self, count: int) -> list[torch.Tensor]:
        """Return tensors to be written to, as long as what a rank puts in."""
        return [torch.empty_like(self.given(0)) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One kind of collective."""

    kind: str
    """Its name in torch, and the operation."""
    call: Callable[[Setting], Any]
    """Puts in, calls, and returns what came out on this rank."""
    must: Callable[[Setting], Any]
    """Returns what must come out here; ``None``: this rank gets nothing."""
    tolerance: float = 0.0
    """Relative error that is no fault."""
    least_ranks: int = 1
    """Ranks without which it is not tried."""


def _reduced(
    op: str, given: Callable[[Setting, int], torch.Tensor]
) -> Callable[[Setting], torch.Tensor]:
    def call(setting: Setting) -> torch.Tensor:
        values = given(setting, setting.rank)
        dist.all_reduce(values, op=getattr(dist.ReduceOp, op))
        return values

    return call


def _over_all(
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    given: Callable[[Setting, int], torch.Tensor],
) -> Callable[[Setting], torch.Tensor]:
    def must(setting: Setting) -> torch.Tensor:
        total = given(setting, 0)
        for rank in range(1, setting.world_size):
            total = fold(total, given(setting, rank))
        return total

    return must


def _own(setting: Setting, rank: int) -> torch.Tensor:
    return setting.given(rank)


def _times_size(setting: Setting, rank: int) -> torch.Tensor:
    return setting.given(rank) * setting.world_size


def _ones_and_twos(setting: Setting, rank: int) -> torch.Tensor:
    """Return values whose product over all ranks stays a power of two."""
    values = torch.arange(NUM_VALUES, device=setting.device)
    return 1.0 + ((values + rank) % 16 == 0)


def _bits(setting: Setting, rank: int) -> torch.Tensor:
    return torch.arange(NUM_VALUES, device=setting.device) * 3 + 64 + rank


def _reduce(
    op: str,
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    given: Callable[[Setting, int], torch.Tensor] = _own,
    tolerance: float = 0.0,
) -> Truth:
    return Truth(
        kind=f"all_reduce ({op.lower()})",
        call=_reduced(op, given),
        must=_over_all(fold, given),
        tolerance=tolerance,
    )


def _mean(setting: Setting) -> torch.Tensor:
    return setting.all_given().sum(0)


def _sum(setting: Setting) -> torch.Tensor:
    return setting.all_given().sum(0)


def _at_root(
    must: Callable[[Setting], Any],
) -> Callable[[Setting], Any]:
    return lambda s: must(s) if s.rank == s.root else None


def _broadcast(s: Setting) -> torch.Tensor:
    values = s.given(s.rank)
    dist.broadcast(values, src=s.root)
    return values


def _reduce_to_root(s: Setting) -> torch.Tensor:
    values = s.given(s.rank)
    dist.reduce(values, dst=s.root)
    return values


def _all_gather(s: Setting) -> torch.Tensor:
    found = s.empty(s.world_size)
    dist.all_gather(found, s.given(s.rank))
    return torch.stack(found)


def _all_gather_into_tensor(s: Setting) -> torch.Tensor:
    found = torch.cat(s.empty(s.world_size))
    _all_gather_base(found, s.given(s.rank))
    return found.view(s.world_size, -1)


def _gather(s: Setting) -> torch.Tensor | None:
    found = s.empty(s.world_size) if s.rank == s.root else None
    dist.gather(s.given(s.rank), found, dst=s.root)
    return torch.stack(found) if found is not None else None


def _scatter(s: Setting) -> torch.Tensor:
    (found,) = s.empty(1)
    given = list(s.all_given()) if s.rank == s.root else None
    dist.scatter(found, given, src=s.root)
    return found


def _to_each(s: Setting, rank: int) -> torch.Tensor:
    """Return what a rank has for each of all: float32 ``(world_size, 257)``."""
    for_whom = torch.arange(s.world_size, device=s.device).view(-1, 1) % 3
    return s.given(rank) + for_whom


def _for_me(s: Setting) -> torch.Tensor:
    """Return what all ranks have for this one: float32 ``(world_size, 257)``."""
    return s.all_given() + s.rank % 3


def _reduce_scatter(s: Setting) -> torch.Tensor:
    (found,) = s.empty(1)
    dist.reduce_scatter(found, list(_to_each(s, s.rank)))
    return found


def _reduce_scatter_tensor(s: Setting) -> torch.Tensor:
    (found,) = s.empty(1)
    _reduce_scatter_base(found, _to_each(s, s.rank).flatten())
    return found


def _reduce_scatter_average(s: Setting) -> torch.Tensor:
    """Call what FSDP averages gradients by."""
    (found,) = s.empty(1)
    given = _to_each(s, s.rank).flatten() * s.world_size
    _reduce_scatter_base(found, given, op=dist.ReduceOp.AVG)
    return found


def _all_to_all(s: Setting) -> torch.Tensor:
    found = s.empty(s.world_size)
    dist.all_to_all(found, list(_to_each(s, s.rank)))
    return torch.stack(found)


def _all_to_all_single(s: Setting) -> torch.Tensor:
    found = torch.cat(s.empty(s.world_size))
    dist.all_to_all_single(found, _to_each(s, s.rank).flatten())
    return found.view(s.world_size, -1)


def _send_recv(s: Setting) -> torch.Tensor:
    """Send to the next rank and receive from the one before; even ranks send first."""
    (found,) = s.empty(1)
    after, before = (s.rank + 1) % s.world_size, (s.rank - 1) % s.world_size
    if s.rank % 2 == 0:
        dist.send(s.given(s.rank), after)
        dist.recv(found, before)
    else:
        dist.recv(found, before)
        dist.send(s.given(s.rank), after)
    return found


def _batch_isend_irecv(s: Setting) -> torch.Tensor:
    (found,) = s.empty(1)
    after, before = (s.rank + 1) % s.world_size, (s.rank - 1) % s.world_size
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, s.given(s.rank), after),
            dist.P2POp(dist.irecv, found, before),
        ]
    )
    for work in works:
        work.wait()
    return found


def _barrier(s: Setting) -> int:
    """Count who has come before anybody goes on."""
    if s.store is not None:
        s.store.add(s.name, 1)
    dist.barrier()
    return s.store.add(s.name, 0) if s.store is not None else s.world_size


def _all_gather_object(s: Setting) -> list[Any]:
    found: list[Any] = [None] * s.world_size
    dist.all_gather_object(found, {"from": s.rank})
    return found


def _gather_object(s: Setting) -> list[Any] | None:
    found: list[Any] | None = [None] * s.world_size if s.rank == s.root else None
    dist.gather_object({"from": s.rank}, found, dst=s.root)
    return found


def _broadcast_object_list(s: Setting) -> list[Any]:
    found: list[Any] = [{"from": s.rank}]
    dist.broadcast_object_list(found, src=s.root)
    return found


def _scatter_object_list(s: Setting) -> list[Any]:
    found: list[Any] = [None]
    given = [{"for": rank} for rank in range(s.world_size)]
    dist.scatter_object_list(found, given if s.rank == s.root else None, src=s.root)
    return found


def _from_all(s: Setting) -> list[Any]:
    return [{"from": rank} for rank in range(s.world_size)]


TRUTHS = (
    Truth(kind="broadcast", call=_broadcast, must=lambda s: s.given(s.root)),
    _reduce("SUM", lambda a, b: a + b),
    # What is put in is a multiple of the number of ranks, but who divides first rounds.
    Truth(
        kind="all_reduce (avg)",
        call=_reduced("AVG", _times_size),
        must=_mean,
        tolerance=1e-6,
    ),
    _reduce("PRODUCT", lambda a, b: a * b, _ones_and_twos),
    _reduce("MIN", lambda a, b: a.minimum(b)),
    _reduce("MAX", lambda a, b: a.maximum(b)),
    _reduce("BAND", lambda a, b: a & b, _bits),
    _reduce("BOR", lambda a, b: a | b, _bits),
    _reduce("BXOR", lambda a, b: a ^ b, _bits),
    Truth(kind="reduce", call=_reduce_to_root, must=_at_root(_sum)),
    Truth(kind="all_gather", call=_all_gather, must=Setting.all_given),
    Truth(
        kind="all_gather_into_tensor",
        call=_all_gather_into_tensor,
        must=Setting.all_given,
    ),
    Truth(kind="gather", call=_gather, must=_at_root(Setting.all_given)),
    Truth(kind="scatter", call=_scatter, must=lambda s: s.given(s.rank)),
    Truth(
        kind="reduce_scatter", call=_reduce_scatter, must=lambda s: _for_me(s).sum(0)
    ),
    Truth(
        kind="reduce_scatter_tensor",
        call=_reduce_scatter_tensor,
        must=lambda s: _for_me(s).sum(0),
    ),
    Truth(
        kind="reduce_scatter_tensor (avg)",
        call=_reduce_scatter_average,
        must=lambda s: _for_me(s).sum(0),
        tolerance=1e-6,
    ),
    Truth(kind="all_to_all", call=_all_to_all, must=_for_me),
    Truth(kind="all_to_all_single", call=_all_to_all_single, must=_for_me),
    Truth(
        kind="send and recv",
        call=_send_recv,
        must=lambda s: s.given((s.rank - 1) % s.world_size),
        least_ranks=2,
    ),
    Truth(
        kind="batch_isend_irecv",
        call=_batch_isend_irecv,
        must=lambda s: s.given((s.rank - 1) % s.world_size),
        least_ranks=2,
    ),
    Truth(kind="barrier", call=_barrier, must=lambda s: s.world_size),
)
"""Every kind that has tensors, and the barrier."""

OBJECT_TRUTHS = (
    Truth(kind="all_gather_object", call=_all_gather_object, must=_from_all),
    Truth(kind="gather_object", call=_gather_object, must=_at_root(_from_all)),
    Truth(
        kind="broadcast_object_list",
        call=_broadcast_object_list,
        must=lambda s: [{"from": s.root}],
    ),
    Truth(
        kind="scatter_object_list",
        call=_scatter_object_list,
        must=lambda s: [{"for": s.rank}],
    ),
)
"""The kinds of pickled objects, which choose their device themselves."""

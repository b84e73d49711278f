"""torch.distributed's backend ``mpi4py``: what torch asks for, in our own words.

Torch calls the methods of `MpiBackend` by their names, some of them in camel case
(torch 2.15, PyBackend.hpp; torch/distributed/_nccl4py/backend.py shows the shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import (
    Backend,
    PrefixStore,
    Store,
    _DistributedBackendOptions,
)

from mpitrain.mpi_backend import NAME, members
from mpitrain.mpi_backend.group import Group
from mpitrain.mpi_backend.operations import Operations

_alive: set[Operations] = set()
"""With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps a backend and keeps its half in C++
alone (torch 2.15): without the one in Python every method would be missing."""


class MpiBackend(Operations):
    """The backend of one group of ranks.

    Args:
        group: The ranks and what they have in common.
        options: Torch's, for groups that are split off.
        store: Torch's of this group.
    """

    def __init__(self, group: Group, options: Backend.Options, store: Store) -> None:
        super().__init__(group)
        self._options = options
        self._store = store
        _alive.add(self)

    def getBackendName(self) -> str:
        """Return its name."""
        return NAME

    @property
    def options(self) -> Backend.Options:
        """Torch's options of this group."""
        return self._options

    @property
    def supports_splitting(self) -> bool:
        """Whether ``split_group`` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether several operations can be one work."""
        return True

    @property
    def supports_shrinking(self) -> bool:
        """Whether ranks can be left out later."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """Whether other ranks can come later."""
        return False

    @property
    def supports_window(self) -> bool:
        """Whether there are one-sided operations."""
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun."""
        return self._group.line.number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take, from the next one on."""
        self._group.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Finish what was asked for, in a moment, and free the communicators."""
        self._group.close()
        _alive.discard(self)

    def abort(self) -> None:
        """Let go of everything without waiting for others."""
        self._group.abandon()
        _alive.discard(self)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: all ranks of a group are connected."""

    def split(
        self, _: object, ranks: Sequence[int], options: Backend.Options | None
    ) -> MpiBackend | None:
        """Make a group of some of these ranks.

        Collective over the new group.
        """
        ranks = list(ranks)
        if self.rank() not in ranks:
            return None
        parents = list(self._options.global_ranks_in_group) or list(range(self.size()))
        if options is None:
            options = Backend.Options(
                NAME, timeout=timedelta(seconds=self._group.timeout_seconds)
            )
        options.global_ranks_in_group = [parents[rank] for rank in ranks]
        name = options.group_name or f"{self._group.name} split"
        seconds = options._timeout.total_seconds()  # noqa: SLF001 - its only name
        store = PrefixStore(name, self._store)
        place = ranks.index(self.rank())
        members.meet(store, place, options.global_ranks_in_group, name, seconds)
        comm = members.some_ranks(options.global_ranks_in_group, name)
        group = Group(comm, name, options.global_ranks_in_group, seconds, store)
        return MpiBackend(group, options, store)


def create(opts: _DistributedBackendOptions, options: object) -> MpiBackend:
    """Make the backend of a group, for torch.

    Collective over the group.
    """
    ours = options if isinstance(options, Backend.Options) else None
    if ours is None:
        ours = Backend.Options(NAME, timeout=opts.timeout)
    ours._timeout = opts.timeout  # noqa: SLF001 - its only name
    ours.global_ranks_in_group = opts.global_ranks_in_group
    ours.group_name = opts.group_id
    seconds = opts.timeout.total_seconds()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    members.meet(opts.store, opts.group_rank, ranks, opts.group_id, seconds)
    if opts.global_ranks_in_group:
        comm = members.some_ranks(opts.global_ranks_in_group, opts.group_id)
    else:
        comm = members.all_ranks(opts.group_rank, opts.group_size)
    group = Group(comm, opts.group_id, ranks, seconds, opts.store)
    return MpiBackend(group, ours, opts.store)

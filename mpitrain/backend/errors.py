"""The backend's name and its errors."""

from __future__ import annotations

from torch.distributed import DistBackendError

NAME = "mpi4py"  # the backend's name in torch; ``mpi`` is torch's own


class GroupError(DistBackendError):
    """An operation of a group failed. The group cannot be used any more."""

    is_consequence = False
    """Whether another rank's end is the cause, which that rank reports."""


class PeerGone(GroupError):
    """The process of a rank of the group has ended."""

    is_consequence = True

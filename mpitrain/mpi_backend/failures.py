"""What goes wrong in a group, in words."""

from __future__ import annotations

from torch.distributed import DistBackendError


class GroupError(DistBackendError):
    """An operation of a group failed; the group cannot be used any more."""

    is_consequence = False
    """Whether another rank's end is the reason, which that rank tells."""


class PeerGone(GroupError):
    """A rank of the group has ended."""

    is_consequence = True

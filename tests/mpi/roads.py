"""The roads that a group of the mpi4py backend may take, chosen as it is made."""

from __future__ import annotations

from pathlib import Path

import pytest


def without_shared_memory(patch: pytest.MonkeyPatch) -> None:
    """Let ranks find no /dev/shm: all goes by MPI."""
    from mpitrain.mpi_backend import sharing

    patch.setattr(sharing, "FOLDER", Path("/nowhere"))


def on_two_nodes(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let even and odd ranks take themselves for those of two nodes."""
    from mpitrain.mpi_backend import sharing

    patch.setattr(sharing, "_machine", lambda: [f"node{rank % 2}"])

"""Finds a complete checkpoint, and reads it on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mpitrain.checkpoint.format import SUMS, BrokenCheckpoint, check_file, read_sums
from mpitrain.checkpoint.layout import Checkpoint, list_checkpoints, set_aside
from mpitrain.checkpoint.storage import read_index, read_tensors
from mpitrain.errors import DataError, collective_error
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

logger = logging.getLogger("mpitrain")


def newest_complete(
    run_dir: Path, run_id: str, world: World, ranks: Communicator
) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run.

    Collective over all ranks. Broken ones are named, and set aside under another name,
    if an older one is complete.
    """
    found = ranks.on_rank_zero(lambda: list_checkpoints(run_dir), "list checkpoints")
    broken: list[tuple[Checkpoint, str]] = []
    for checkpoint in found:
        error = find_error(checkpoint, world, ranks, run_id)
        if not error:
            ranks.on_rank_zero(lambda: _set_aside(broken), "set checkpoints aside")
            return checkpoint
        broken.append((checkpoint, error))
    if broken:
        listed = "".join(f"\n  {of.path.name}: {error}" for of, error in broken)
        raise collective_error(
            DataError(
                f"no checkpoint of {run_dir} is complete:{listed}\nNothing was "
                "changed. To train anew: --new-run"
            )
        )
    return None


def _set_aside(broken: list[tuple[Checkpoint, str]]) -> None:
    for checkpoint, error in broken:
        aside = set_aside(checkpoint, "broken")
        logger.warning(
            "checkpoint %s is not used: %s; it is now %s",
            *(checkpoint.path.name, error, aside.name),
        )


def find_error(
    checkpoint: Checkpoint,
    world: World,
    ranks: Communicator,
    run_id: str | None = None,
) -> str:
    """Say what is wrong with a checkpoint; empty if it is complete. Equal on all ranks.

    Collective over all ranks: each checks some of the files.
    """
    mine, unread = "", ""
    try:
        check(checkpoint, world.rank, world.world_size, run_id)
    except BrokenCheckpoint as broken:
        mine = broken.reason
    except (OSError, DataError) as error:
        unread = f"[{world}] {error}"
    gathered = ranks.allgather((mine, unread))
    for _, reason in gathered:
        if reason:
            raise collective_error(
                DataError(
                    f"checkpoint {checkpoint.path} cannot be read: {reason}.\nNothing "
                    "was changed; try again when it can be"
                )
            )
    return next((reason for reason, _ in gathered if reason), "")


def check(
    checkpoint: Checkpoint,
    rank: int = 0,
    world_size: int = 1,
    run_id: str | None = None,
) -> None:
    """Check this rank's part of the files of a checkpoint; local.

    Rank zero checks their content, too. ``run_id`` is the run that must have written
    it; ``None``: any.
    """
    path = checkpoint.path
    sums = read_sums(path)
    for name, digest in sorted(sums.items())[rank::world_size]:
        check_file(path, name, digest)
    if rank:
        return
    for stored in read_index(path).storage_data.values():
        if stored.file not in sums:
            raise BrokenCheckpoint(path, f"{SUMS} lacks {stored.file}")
    if run_id not in (checkpoint.metadata()["run"], None):
        raise BrokenCheckpoint(path, "another run wrote it")


class CheckpointReader:
    """Reads tensors of one complete checkpoint; local.

    Attributes:
        checkpoint: The checkpoint.
        metadata: Its metadata, in the current format.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata: dict[str, Any] = checkpoint.metadata()
        self._index = read_index(checkpoint.path)

    def tensor_metadata(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return shape and dtype of the tensors with a prefix, by the rest."""
        found = self._index.state_dict_metadata
        return {
            name.removeprefix(prefix): of
            for name, of in found.items()
            if name.startswith(prefix) and isinstance(of, TensorStorageMetadata)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors by name, in place; of sharded ones this rank's shard."""
        read_tensors(self.checkpoint.path, self._index, tensors)

"""Finds a whole checkpoint, and reads it on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mpitrain.checkpoints.layout import (
    SUMS,
    BrokenCheckpoint,
    Checkpoint,
    check_file,
    find,
    read_sums,
    set_aside,
)
from mpitrain.checkpoints.storage import LoadPlanner, Reader
from mpitrain.errors import DataError, agreed
from mpitrain.launch.shared import Ranks
from mpitrain.world import World

logger = logging.getLogger("mpitrain")


def newest_whole(
    run_dir: Path,
    run_id: str,
    world: World,
    ranks: Ranks,
    progress: Callable[[], object],
) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is whole.

    Collective over all ranks. Broken ones are named, and set aside under another name,
    where an older one is whole.

    Args:
        run_dir: The run folder; all ranks see it.
        run_id: The run's; one that another run wrote is not taken.
        world: Where this process stands.
        ranks: All of them.
        progress: Told now and then.

    Raises:
        DataError: There are some, and none is whole; or they cannot be read just now.
            On every rank.
    """
    found = ranks.on_rank_zero(lambda: find(run_dir), "look for checkpoints")
    broken: list[tuple[Checkpoint, str]] = []
    for checkpoint in found:
        why_not = why_broken(checkpoint, world, ranks, progress, run_id)
        if not why_not:
            ranks.on_rank_zero(lambda: _set_aside(broken), "set checkpoints aside")
            return checkpoint
        broken.append((checkpoint, why_not))
    if broken:
        listed = "".join(f"\n  {of.path.name}: {why}" for of, why in broken)
        raise agreed(
            DataError(
                f"no checkpoint of {run_dir} is whole:{listed}\nNothing was changed. "
                "To train anew: --new-run"
            )
        )
    return None


def _set_aside(broken: list[tuple[Checkpoint, str]]) -> None:
    for checkpoint, why in broken:
        aside = set_aside(checkpoint, "broken")
        logger.warning(
            "checkpoint %s is not gone on from: %s; it is %s now",
            *(checkpoint.path.name, why, aside.name),
        )


def why_broken(
    checkpoint: Checkpoint,
    world: World,
    ranks: Ranks,
    progress: Callable[[], object],
    run_id: str | None = None,
) -> str:
    """Say what is wrong with a checkpoint; empty if it is whole. Equal on all ranks.

    Collective over all ranks: each looks at some of the files.

    Args:
        checkpoint: It, be it whole or not.
        world: Where this process stands.
        ranks: All of them.
        progress: Told now and then.
        run_id: Of the run that must have written it; ``None``: any.

    Raises:
        DataError: It cannot be read just now, or not by us; on every rank.
    """
    mine, unread = "", ""
    try:
        sums = sorted(read_sums(checkpoint.path).items())
        for name, digest in sums[world.rank :: world.world_size]:
            check_file(checkpoint.path, name, digest, progress)
        if world.is_rank_zero:
            _check_index(checkpoint.path, dict(sums))
            found = checkpoint.facts()["run"]
            if run_id not in (None, found):
                mine = "another run wrote it"
    except BrokenCheckpoint as broken:
        mine = broken.why
    except (OSError, DataError) as error:
        unread = f"[{world}] {error}"
    told = ranks.tell_all((mine, unread))
    for _, why in told:
        if why:
            raise agreed(
                DataError(
                    f"checkpoint {checkpoint.path} cannot be read: {why}.\nNothing was "
                    "changed; try again when it can be"
                )
            )
    return next((why for why, _ in told if why), "")


def check(checkpoint: Checkpoint) -> None:
    """Make sure that a checkpoint is whole; local.

    Raises:
        BrokenCheckpoint: It is not.
    """
    sums = read_sums(checkpoint.path)
    for name, digest in sums.items():
        check_file(checkpoint.path, name, digest)
    _check_index(checkpoint.path, sums)
    checkpoint.facts()


def _check_index(path: Path, sums: Mapping[str, str]) -> None:
    """Make sure that tensors lie within files, and that sums cover these.

    Raises:
        BrokenCheckpoint: They do not.
    """
    for stored in Reader(path).read_metadata().storage_data.values():
        if stored.file not in sums:
            raise BrokenCheckpoint(path, f"{SUMS} lacks {stored.file}")


class Loader:
    """Reads tensors of one checkpoint; local.

    Args:
        checkpoint: Whole.
        progress: Told now and then while it reads.

    Attributes:
        facts: What was written down beside the tensors.
    """

    def __init__(
        self, checkpoint: Checkpoint, progress: Callable[[], object] = lambda: None
    ) -> None:
        self.checkpoint = checkpoint
        self.facts: dict[str, Any] = checkpoint.facts()
        self._reader = Reader(checkpoint.path, progress)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    def outlines(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return shape and type of the tensors whose names begin so, by the rest."""
        found = self._metadata.state_dict_metadata
        return {
            name.removeprefix(prefix): of
            for name, of in found.items()
            if name.startswith(prefix) and isinstance(of, TensorStorageMetadata)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors, in place; of sharded ones this rank's share.

        Args:
            tensors: By their names in the checkpoint.

        Raises:
            BrokenCheckpoint: It lacks one, or has it in another shape.
        """
        planner = LoadPlanner()
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=False)
        try:
            plan = planner.create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise BrokenCheckpoint(self.checkpoint.path, str(error)) from None
        self._reader.read_data(self._reader.prepare_local_plan(plan), planner)

"""Which checkpoint a training resumes from, and whether it is complete."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.format import SUMS, BrokenCheckpoint, check_file, read_sums
from mpitrain.checkpoint.layout import (
    FOLDER,
    Checkpoint,
    best_of,
    checkpoint_at,
    list_checkpoints,
    remove_unfinished,
    set_aside,
)
from mpitrain.checkpoint.storage import CheckpointReader, read_index
from mpitrain.data.first_samples import warn_of_other_order
from mpitrain.errors import DataError, UsageError
from mpitrain.files import read_json
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World, list_hosts
from mpitrain.record.runs import RUN, differences

logger = logging.getLogger("mpitrain")


def hosts_without(
    run_dir: Path, run_id: str, world: World, ranks: Communicator
) -> list[str]:
    """Return the hosts that do not see a run folder. Collective over all ranks."""
    mine = "" if read_json(run_dir / RUN).get("id") == run_id else world.hostname
    return [host for host in ranks.allgather(mine) if host]


def find_checkpoint(
    run_dir: Path,
    run_id: str,
    resume: str,
    world: World,
    ranks: Communicator,
    blind_hosts: list[str],
) -> CheckpointReader | None:
    """Find the checkpoint to resume from, if there is one.

    Collective over all ranks. ``blind_hosts`` do not see the run folder.
    """

    def clean() -> int:
        remove_unfinished(run_dir, logger.info)
        return len(list_checkpoints(run_dir))

    num = ranks.on_rank_zero(clean, "clean the run folder")
    if blind_hosts and num:
        raise UsageError(
            f"{run_dir} has checkpoints to resume from, and {list_hosts(blind_hosts)} "
            "do not see it; expected a folder that all nodes share (--runs-dir), "
            "or another --name"
        ).on_all_ranks()
    named = None
    if resume not in ("auto", "never"):
        named = ranks.on_rank_zero(
            lambda: _named(Path(resume).resolve(), run_dir.resolve()), "find --resume"
        )
    # The folder of the checkpoints may be a link to another disk.
    if named is not None and named.path.parent == (run_dir / FOLDER).resolve():
        reader = _checked(named, world, ranks)
        ranks.on_rank_zero(
            lambda: _set_newer_aside(run_dir, named), "set checkpoints aside"
        )
        return reader
    # The run's own come before --resume: a job that was requeued has the same flags as
    # the one that began from another run.
    newest = newest_complete(run_dir, run_id, world, ranks)
    if newest is not None:
        return CheckpointReader(newest)
    if named is None:
        return None
    if blind_hosts:
        raise UsageError(
            "--resume needs a run folder that all nodes see: "
            f"{list_hosts(blind_hosts)} cannot see {run_dir} (--runs-dir)"
        ).on_all_ranks()
    return _checked(named, world, ranks)


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
        raise DataError(
            f"no checkpoint of {run_dir} is complete:{listed}\nNothing was "
            "changed. To train anew: --new-run"
        ).on_all_ranks()
    return None


def _set_aside(broken: list[tuple[Checkpoint, str]]) -> None:
    for checkpoint, error in broken:
        aside = set_aside(checkpoint, "broken")
        logger.warning(
            "checkpoint %s is not used: %s; it is now %s",
            *(checkpoint.path.name, error, aside.name),
        )


def find_error(
    checkpoint: Checkpoint, world: World, ranks: Communicator, run_id: str | None = None
) -> str:
    """Say what is wrong with a checkpoint; empty if it is complete. Collective."""
    mine, unread = "", ""
    try:
        check(checkpoint, world.rank, world.world_size, run_id)
    except BrokenCheckpoint as broken:
        mine = broken.reason
    except (OSError, DataError) as error:
        unread = f"[{world}] {error}"
    gathered = ranks.allgather((mine, unread))
    # Before what is broken: a file server that is ill must not cost a checkpoint.
    for _, reason in gathered:
        if reason:
            raise DataError(
                f"checkpoint {checkpoint.path} cannot be read: {reason}.\nNothing "
                "was changed; try again when it can be"
            ).on_all_ranks()
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
    # Each file once, since all ranks see the same folder.
    for name, digest in sorted(sums.items())[rank::world_size]:
        check_file(path, name, digest)
    if rank:
        return
    for of in read_index(path).values():
        for place in of.places.values():
            if place.file not in sums:
                raise BrokenCheckpoint(path, f"{SUMS} lacks {place.file}")
    if run_id not in (checkpoint.metadata()["run"], None):
        raise BrokenCheckpoint(path, "another run wrote it")


def check_same_steps(reader: CheckpointReader, config: Mapping[str, Any]) -> None:
    """Check that the rest of an epoch has the samples that another run left."""
    before = reader.metadata["trainer"]["config"]
    names = ("global_batch_size", "seed", "data", "probe_epochs")
    changed = differences({name: before[name] for name in names}, config, ())
    if reader.metadata["trainer"]["state"]["epoch_step"] and changed:
        raise UsageError(
            f"{reader.checkpoint.path} is within an epoch, whose samples would be "
            f"others: {'; '.join(changed)}.\nExpected a checkpoint that was "
            "written after an epoch (step-...-epoch-N), or the same"
        ).on_all_ranks()


def check_same_data(
    found: Mapping[str, Any],
    num_samples: Mapping[str, int | None],
    classes: list[str] | None,
    path: Path,
) -> None:
    """Refuse other data than those that the checkpoint at `path` was trained on."""
    if found["num_samples"] != num_samples:
        raise DataError(
            f"the data are not those that {path} was trained on: found "
            f"{num_samples} samples, expected {found['num_samples']}"
        ).on_all_ranks()
    before = found.get("inputs", {}).get("classes")  # not in older checkpoints
    if before and classes and before != classes:
        pairs = enumerate(zip_longest(classes, before))
        at, (now, then) = next(it for it in pairs if it[1][0] != it[1][1])
        raise DataError(
            f"the data are not those that {path} was trained on: class {at} is "
            f"{now!r}, expected {then!r}"
        ).on_all_ranks()


def warn_of_other_samples(
    found: Mapping[str, Any], digests: Mapping[str, str], path: Path
) -> None:
    """Warn if sets have another first sample than those of a checkpoint; local."""
    before = found.get("first_samples", {})  # not in older checkpoints
    changed = [
        name
        for name, it in digests.items()
        if it and before.get(name) and it != before[name]
    ]
    if changed:
        warn_of_other_order(f"the first sample ({', '.join(changed)})", str(path))


def best_score(run_dir: Path, ranks: Communicator) -> float:
    """Return the best metric of a run's checkpoints; -inf without one. Collective."""

    def read() -> float:
        best = best_of(list_checkpoints(run_dir))
        return -math.inf if best is None else float(best.metadata()["metric"])

    return ranks.on_rank_zero(read, "find the best checkpoint")


def find_best(
    run_dir: Path, world: World, ranks: Communicator
) -> CheckpointReader | None:
    """Find the checkpoint with the best metric, if one has any. Collective."""
    best = ranks.on_rank_zero(
        lambda: best_of(list_checkpoints(run_dir)), "find the best checkpoint"
    )
    return None if best is None else _checked(best, world, ranks)


def _named(path: Path, run_dir: Path) -> Checkpoint | None:
    """Return the checkpoint that ``--resume`` names; of a run folder the newest."""
    if path == run_dir:
        return None  # its own newest
    if (path / FOLDER).is_dir():
        found = list_checkpoints(path)
        if not found:
            raise UsageError(f"--resume {path}: there is no checkpoint in that run")
        return found[0]
    try:
        return checkpoint_at(path)
    except DataError as error:
        of_others = f". If another program wrote it, --weights {path} loads the weights"
        raise UsageError(f"--resume: {error}{of_others * path.exists()}") from None


def _set_newer_aside(run_dir: Path, chosen: Checkpoint) -> None:
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint > chosen:
            aside = set_aside(checkpoint, "left")
            logger.warning("newer than --resume: %s is set aside", aside)


def _checked(
    checkpoint: Checkpoint, world: World, ranks: Communicator
) -> CheckpointReader:
    error = find_error(checkpoint, world, ranks)
    if error:
        raise BrokenCheckpoint(checkpoint.path, error).on_all_ranks()
    return CheckpointReader(checkpoint)

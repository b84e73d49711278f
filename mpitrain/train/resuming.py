"""From which checkpoint a training goes on, and who keeps it from being lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from mpitrain.checkpoints.layout import (
    FOLDER,
    BrokenCheckpoint,
    Checkpoint,
    checkpoint_at,
    find,
    remove_unfinished,
    set_aside,
)
from mpitrain.checkpoints.loading import Loader, newest_whole, why_broken
from mpitrain.data.sources import Data
from mpitrain.errors import DataError, UsageError, agreed
from mpitrain.launch.shared import Ranks
from mpitrain.record.console import Console
from mpitrain.record.recorder import Recorder, shown
from mpitrain.record.runs import RUN, differences
from mpitrain.train.beginning import Beginning
from mpitrain.train.config import MAY_CHANGE, TrainConfig
from mpitrain.train.keeping import Keeper
from mpitrain.train.stopping import Stopper
from mpitrain.train.trainer import Trainer
from mpitrain.world import World, list_hosts

logger = logging.getLogger("mpitrain")


def blind_hosts(begun: Beginning, world: World, ranks: Ranks) -> list[str]:
    """Name the hosts that do not see the run folder.

    Collective over all ranks.
    """
    try:
        found = json.loads((begun.run_dir / RUN).read_text()).get("id")
    except (OSError, ValueError, AttributeError):
        found = None
    mine = "" if found == begun.run_id else world.hostname
    return [host for host in ranks.tell_all(mine) if host]


def checkpoint_to_load(
    begun: Beginning,
    world: World,
    ranks: Ranks,
    blind: list[str],
    progress: Callable[[str], object],
) -> Loader | None:
    """Find the checkpoint to go on from, if there is one.

    Collective over all ranks.

    Args:
        begun: What was asked, and the run folder.
        world: Where this process stands.
        ranks: All of them.
        blind: Hosts that do not see the run folder.
        progress: Told now and then.

    Raises:
        UsageError: The one that was named cannot be used, or hosts do not see it; on
            every rank.
    """

    def look() -> None:
        progress("looking at checkpoints")

    run_dir, resume = begun.run_dir, begun.config.resume
    ranks.on_rank_zero(
        lambda: remove_unfinished(run_dir, logger.info), "clean the run folder"
    )
    num = ranks.on_rank_zero(lambda: len(find(run_dir)), "count checkpoints")
    if blind and num:
        raise agreed(
            UsageError(
                f"{run_dir} has checkpoints to go on from, and {list_hosts(blind)} "
                f"do not see it; expected a folder "
                "that all nodes share (--runs-dir), or another --name"
            )
        )
    named = None
    if resume not in ("auto", "never"):
        named = ranks.on_rank_zero(
            lambda: _named(Path(resume).resolve(), run_dir.resolve()), "find --resume"
        )
    if named is not None and named.path.parent.parent == run_dir.resolve():
        loader = _checked(named, world, ranks, look)
        ranks.on_rank_zero(lambda: _leave_newer(named), "set checkpoints aside")
        return loader
    own = newest_whole(run_dir, begun.run_id, world, ranks, look)
    if own is None and named is not None:
        if blind:
            raise agreed(
                UsageError(
                    f"--resume needs a run folder that all nodes see: "
                    f"{list_hosts(blind)} cannot see {run_dir} (--runs-dir)"
                )
            )
        loader = _checked(named, world, ranks, look)
        _refuse_other_steps(loader, begun.config)
        return loader
    return None if own is None else Loader(own, look)


def _named(path: Path, run_dir: Path) -> Checkpoint | None:
    """Return the checkpoint that ``--resume`` names; of a run folder the newest."""
    if path == run_dir:
        return None  # its own newest
    if (path / FOLDER).is_dir():
        found = find(path)
        if not found:
            raise UsageError(f"--resume {path}: there is no checkpoint in that run")
        return found[0]
    try:
        return checkpoint_at(path)
    except DataError as error:
        raise UsageError(f"--resume: {error}") from None


def _refuse_other_steps(loader: Loader, config: TrainConfig) -> None:
    """Make sure that steps of an epoch that are done are the ones that would be."""
    so_far = loader.facts["so_far"]
    before, now = loader.facts["config"], config.as_plain("")
    fields = ("global_batch_size", "seed", "data", "probe_epochs")
    changed = [
        f"{it}: {before[it]} -> {now[it]}" for it in fields if before[it] != now[it]
    ]
    if so_far["epoch_steps"] and changed:
        raise agreed(
            UsageError(
                f"{loader.checkpoint.path} is within an epoch, whose samples would be "
                f"others: {'; '.join(changed)}.\nExpected a checkpoint that was "
                "written after an epoch (step-...-epoch-N), or the same"
            )
        )


def _leave_newer(chosen: Checkpoint) -> None:
    for checkpoint in find(chosen.path.parent.parent):
        if checkpoint > chosen:
            aside = set_aside(checkpoint, "left")
            logger.warning("newer than --resume: %s is set aside", aside)


def _checked(
    checkpoint: Checkpoint, world: World, ranks: Ranks, look: Callable[[], object]
) -> Loader:
    why = why_broken(checkpoint, world, ranks, look)
    if why:
        raise agreed(BrokenCheckpoint(checkpoint.path, why))
    return Loader(checkpoint, look)


def keeper_of(
    trainer: Trainer,
    begun: Beginning,
    world: World,
    ranks: Ranks,
    stopper: Stopper,
    recorder: Recorder | None,
    loader: Loader | None,
    data: Data,
    blind: list[str],
) -> Keeper | None:
    """Return who keeps the training; ``None`` where it cannot be kept.

    Collective over all ranks.

    Raises:
        DataError: The data are not those that the checkpoint was trained on.
    """
    config: TrainConfig = trainer.config
    if config.dry_run:
        return None
    if blind:
        if world.is_rank_zero:
            logger.warning(
                "no checkpoints are written, and a signal, the time limit or a file "
                "stop end nothing in time: %s cannot see %s; name a folder that all "
                "nodes share with --runs-dir",
                *(list_hosts(blind), begun.run_dir),
            )
        return None
    nums = {"train": data.train.num_samples, "val": data.val.num_samples}
    if loader is not None and loader.facts["num_samples"] != nums:
        raise agreed(
            DataError(
                f"the data are not those that {loader.checkpoint.path} was trained on: "
                f"found {nums} samples, expected {loader.facts['num_samples']}"
            )
        )
    return Keeper(
        trainer,
        run_dir=begun.run_dir,
        facts={
            "run": begun.run_id,
            "config": config.as_plain(begun.run_dir.name),
            "num_samples": nums,
            "data": {
                "num_classes": data.num_classes,
                "in_channels": data.in_channels,
                "image_size": data.image_size,
            },
        },
        world=world,
        ranks=ranks,
        stopper=stopper,
        record=recorder,
        loader=loader,
    )


def say_going_on(
    console: Console, loader: Loader, begun: Beginning, recorder: Recorder
) -> None:
    """Say, and write down, from where the training goes on; on rank zero."""
    facts, checkpoint = loader.facts, loader.checkpoint
    so_far = facts["so_far"]
    num = facts["world_size"]
    console.say(
        f"going on from {shown(checkpoint.path)}: step {so_far['num_steps']}, epoch "
        f"{so_far['epoch']}, written by {num} rank{'s' * (num != 1)}"
    )
    now = begun.config.as_plain(begun.run_dir.name)
    for change in differences(facts["config"], now, MAY_CHANGE):
        console.say(f"changed since then: {change}")
    recorder.go_on(so_far["num_steps"], so_far["epoch"], checkpoint.path)

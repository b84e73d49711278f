"""All who write a run down on this rank: record, times, loggers, traces, warnings."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from mpitrain.launch import Job
from mpitrain.record.events import Listener, Listeners, Progress
from mpitrain.record.health import Health
from mpitrain.record.lines import CLOSE_SECONDS
from mpitrain.record.loggers.choice import open_loggers
from mpitrain.record.loggers.protocol import RunFacts
from mpitrain.record.recorder import Recorder, shown
from mpitrain.record.times import RankTimes
from mpitrain.train.beginning import Beginning
from mpitrain.train.evaluate import Evaluation
from mpitrain.train.first_batch import show_images
from mpitrain.train.profiling import Profiler
from mpitrain.train.stopping import Stopped
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


class Recording:
    """What this rank has of them; made by `open_recording`.

    Args:
        job: The running job.
        begun: What was asked, and the run folder.
        start_seconds: From the process's start to the ready process group.
        before: What the record was when the checkpoint was written that is gone on
            from; ``None``: there is none, or it was another run's.
        done: Steps that earlier jobs have done.

    Attributes:
        record: Rank zero's; ``None`` on the others.
        times: Where this rank's time goes.
        loggers: Those of ``--log``.
        profiler: That of ``--profile``, if it was asked for.
    """

    def __init__(
        self,
        job: Job,
        begun: Beginning,
        start_seconds: float,
        before: Mapping[str, Any] | None,
        done: int,
    ) -> None:
        world, config, run_dir = job.world, begun.config, begun.run_dir
        self.record = (
            Recorder(run_dir, world, start_seconds, before)
            if world.is_rank_zero
            else None
        )
        self.times = RankTimes(run_dir, world, start_seconds, done)
        facts = RunFacts(
            run_dir=run_dir,
            run_name=run_dir.name,
            run_id=begun.run_id,
            config=config.as_plain(run_dir.name),
            rank=world.rank,
            world_size=world.world_size,
            step=done,
            say=self.say,
        )
        self.loggers = open_loggers(config, facts)
        self.profiler = (
            Profiler(
                run_dir,
                world,
                config.profile,
                self.say if world.is_rank_zero else None,
                job.progress,
            )
            if config.profile
            else None
        )
        self._hearing: list[Listener] = [self.loggers] if self.loggers else []
        if self.record is not None:
            health = Health(world, str(config.num_workers), shown(run_dir))
            self._hearing = [self.record, *self._hearing, health]

    def say(self, line: str) -> None:
        """Print a line on the screen; on other ranks than zero into their log."""
        if self.record is not None:
            self.record.console.say(line)
        else:
            logger.info(line)

    def listen_to(self, trainer: Trainer) -> None:
        """Let a trainer tell all of them how it goes."""
        trainer.listener = Listeners(*self._hearing)
        trainer.times = self.times
        if self.profiler is not None:
            trainer.each_step.append(self.profiler.step_done)

    def begin(self, trainer: Trainer) -> None:
        """Let those begin that may take their time; `trainer` is set up."""
        if self.loggers.want_images:
            trainer.look = show_images(self.loggers.images, trainer.setup.statistics)
        self.loggers.start()

    def under_way(self) -> contextlib.ExitStack:
        """Return a context in which the training takes place."""

        def end(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None and not issubclass(kind, Stopped):
                self._cut()
                return
            self.times.close()
            if self.profiler is not None:
                self.profiler.close()

        stack = contextlib.ExitStack()
        stack.push(end)
        return stack

    def _cut(self) -> None:
        """Write what is left, in `CLOSE_SECONDS` together: others wait to hear why."""
        until = time.monotonic() + CLOSE_SECONDS
        if self.record is not None:
            self.record.hasten()
        self.times.cut()
        if self.record is not None:
            self.record.wait(max(0.0, until - time.monotonic()))

    def test_done(self, found: Evaluation, num_skipped: int) -> None:
        """Tell how good the finished model is on the test set."""
        if self.record is not None:
            self.record.test_done(found.values, found.num_samples, num_skipped)
        self.loggers.test_done(found.values)

    def stop(self, why: str, how: str, progress: Progress) -> None:
        """Let all of them end: the training stopped, and can go on.

        Args:
            why: What stopped it, and where.
            how: What to type, to go on.
            progress: Told now and then that this rank is alive.
        """
        if self.record is not None:
            self.record.stop(why, how)
        self.loggers.finish("stopped", progress)

    def finish(self, progress: Progress) -> None:
        """Let all of them end: the training is finished."""
        if self.record is not None:
            self.record.finish()
        self.loggers.finish("finished", progress)


def open_recording(
    job: Job,
    begun: Beginning,
    start_seconds: float,
    before: Mapping[str, Any] | None,
    done: int,
) -> Recording:
    """Begin to write a run down, on every rank or on none.

    Collective over all ranks, so that no rank fails, and writes so, before the record
    has begun. See `Recording`.
    """
    return job.all_or_none(
        lambda: Recording(job, begun, start_seconds, before, done), "begin the record"
    )

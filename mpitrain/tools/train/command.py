"""`python -m mpitrain`, without the name of a command: one training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.config import TrainConfig
from mpitrain.tools.command import Command
from mpitrain.tools.train.prepare import PreparedRun, prepare
from mpitrain.watchdog.process import age_seconds

if TYPE_CHECKING:
    from mpitrain.checkpoint.preemption import PreemptionHandler
    from mpitrain.mpi.world import World


class TrainCommand(Command[PreparedRun]):
    """Trains a model on all ranks; ``read`` reads the flags."""

    def __init__(self, read: Callable[[], TrainConfig]) -> None:
        self._read = read

    def prepare(self) -> PreparedRun:
        """Open the run folder."""
        return prepare(self._read())

    def run(
        self, world: World, prepared: PreparedRun, handler: PreemptionHandler
    ) -> int:
        """Train."""
        start_seconds = age_seconds()
        from mpitrain.tools.train.run import run_training

        return run_training(world, prepared, handler, start_seconds)

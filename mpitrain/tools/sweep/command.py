"""`python -m mpitrain sweep`: many trainings in one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.tools.command import Command
from mpitrain.tools.sweep.config import PreparedSweep, prepare, read_sweep

if TYPE_CHECKING:
    from mpitrain.checkpoint.preemption import PreemptionHandler
    from mpitrain.mpi.world import World


@dataclass(frozen=True)
class SweepCommand(Command[PreparedSweep]):
    """Searches hyperparameters: ``words`` are its flags, ``flags`` each training's."""

    words: Sequence[str]
    flags: Sequence[str]

    def prepare(self) -> PreparedSweep:
        """Open the folder of the sweep."""
        return prepare(read_sweep(self.words), self.flags)

    def run(
        self, world: World, prepared: PreparedSweep, handler: PreemptionHandler
    ) -> int:
        """Train what the server sends."""
        from mpitrain.tools.sweep.worker import run_sweep

        return run_sweep(world, prepared, handler)

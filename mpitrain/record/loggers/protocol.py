"""What a logger is. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
"""`(N, H, W, C)`, of 1 or 3 channels."""

Status = Literal["finished", "stopped"]
"""A training that is stopped can go on; one that fails tells nobody."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a logger is made from."""

    run_dir: Path
    """The run folder; files go there."""
    run_name: str
    """The folder's name."""
    run_id: str
    """The run's own, in all of its jobs."""
    config: Mapping[str, Any]
    """The configuration as ``config.yaml`` has it."""
    rank: int
    """Of this process; zero, but for loggers that are on all ranks."""
    world_size: int
    """Number of ranks."""
    step: int
    """Steps done before this job: what was told of later ones does not count."""
    say: Callable[[str], object]
    """Prints a line on the screen; on other ranks than zero into their log."""


class Logger:
    """Writes down how a training goes; inherit it, and override what you need.

    Called in a thread of its own, one call after the other: it may take its time. One
    that raises is warned of once, and told no more.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write down what a step, or an epoch that ended with it, came to.

        Args:
            step: Its number, from 1, over all epochs; the same one may come again, with
                other names.
            values: Numbers by name, such as ``train/loss``; they may be no numbers
                (nan).
        """

    def images(self, step: int, name: str, images: Images) -> None:
        """Write down images.

        Args:
            step: Steps done before they were seen.
            name: What they are.
            images: uint8 `(N, H, W, C)`, of 1 or 3 channels.
        """

    def flush(self) -> None:
        """Let what was written reach the disk: nothing more waits."""

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """End; the last call, if the training does not fail.

        Args:
            status: Whether it is finished, or stopped.
            summary: The last values by name.
        """

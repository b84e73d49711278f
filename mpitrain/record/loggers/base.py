"""The interface of a logger. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FILE_LOGGERS = {"csv", "openmetrics"}  # take no images, and need no package

Images: TypeAlias = "npt.NDArray[np.uint8]"  # `(N, H, W, C)`, with 1 or 3 channels

Status = Literal["finished", "stopped", "failed"]
"""How a job ended; all but a finished run can be resumed."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a logger logs."""

    run_dir: Path  # the run folder, for the logger's files
    run_name: str  # name of the run folder
    run_id: str  # unique id of the run; the same in every job that resumes it
    config: Mapping[str, Any]  # the configuration, as in ``config.yaml``
    rank: int
    """Rank of the process that is logged: 0, except with ``--wandb-all-ranks``."""
    world_size: int  # number of ranks
    step: int
    """Steps done before this job. What was logged for later steps is obsolete."""


class Logger:
    """Base class of loggers, with the method names of Lightning's: override some.

    The methods run one after the other in a process of the logger's own: they may
    block. The first exception disables the logger; the training continues.
    """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the configuration. Called once, first."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step, or of an epoch that ended with it.

        Args:
            metrics: Values by name, such as ``train/loss``; they may be nan or inf.
            step: From 1, over all epochs. It can come again, with other metrics.
        """

    def log_images(self, name: str, images: Images, step: int) -> None:
        """Log images: uint8 `(N, H, W, C)`, seen after this number of steps."""

    def save(self) -> None:
        """Write what was logged to disk. Called every few seconds."""

    def finalize(self, status: Status) -> None:
        """Close the logger. The last call."""

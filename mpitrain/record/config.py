"""Where a training is logged beside its run folder's own record; the flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from mpitrain.errors import UsageError
from mpitrain.plugins import is_reference

LOGGERS = ("csv", "tensorboard", "wandb")
"""Those that are known by name."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Loggers and profiler."""

    log: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ()
    """Loggers besides metrics.jsonl: csv, tensorboard, wandb, or
    package.module:callable."""
    log_every_steps: int = 10
    """Log every N steps (epochs are always logged)."""
    wandb_project: str | None = None
    """W&B project. Default: WANDB_PROJECT, or mpitrain."""
    wandb_group: str | None = None
    """W&B group. Default: none; with --wandb-all-ranks the name of the run."""
    wandb_tags: Annotated[tuple[str, ...], arg(metavar="TAG [TAG ...]")] = ()
    """W&B tags."""
    wandb_all_ranks: bool = False
    """Log every rank as a W&B run of one group, not only rank zero."""

    profile: int = 0
    """Profile N steps of every rank with torch.profiler, after the first 5; 0: off."""

    def __post_init__(self) -> None:
        if self.profile < 0:
            raise UsageError(f"--profile must be at least 0, found {self.profile}")
        for name in self.log:
            if name not in LOGGERS and not is_reference(name):
                raise UsageError(
                    f"--log {name!r} is not known; expected {', '.join(LOGGERS)}, or "
                    "package.module:callable for a user-defined logger"
                )
            if self.log.count(name) > 1:
                raise UsageError(f"--log names {name!r} twice; expected it once")
        if self.log_every_steps < 1:
            raise UsageError(
                f"--log-every-steps must be at least 1, found {self.log_every_steps}"
            )
        if self.wandb_all_ranks and "wandb" not in self.log:
            raise UsageError("--wandb-all-ranks needs --log wandb")

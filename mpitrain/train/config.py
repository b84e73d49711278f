"""What a training is asked to do. The command line and the YAML file are this class."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError
from mpitrain.flags import flat
from mpitrain.launch.config import LaunchConfig

HANG_TIMEOUT_SECONDS = 600.0
"""How long a training may stand still where nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a network on every slot that mpirun started, or alone without mpirun."""

    name: str | None = None
    """Name of the run and of its folder; by default made from the date."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    data: str = "digits"
    """Data set: digits (8x8 images, embedded), or package.module:callable."""
    data_dir: Path | None = None
    """Folder with the data set's files, for data sets that need one."""
    model: str = "convnet"
    """Model: convnet, or package.module:callable."""
    epochs: int = 10
    """Number of times that every training sample is seen."""
    global_batch_size: int = 64
    """Samples per step, over all ranks together."""
    micro_batch_size: int | None = None
    """Most samples that a rank takes at once; more are accumulated. Default: all."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd (Nesterov) or adamw."""
    lr: float | None = None
    """Peak learning rate, for any number of ranks. Default: 0.1 sgd, 0.001 adamw."""
    momentum: float = 0.9
    """Momentum of sgd; adamw does not use it."""
    weight_decay: float = 5e-4
    """Decay of the weights per unit of learning rate."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises; then it falls along a cosine."""
    seed: int = 1
    """Of the first weights and of the order of the samples."""
    precision: Literal["fp32", "fp64"] = "fp32"
    """Floating point of weights and inputs."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """auto: a bar on a terminal, a line per epoch in a log."""
    dry_run: bool = False
    """One step and one evaluation, to see that all works; all else is real."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(hang_timeout=HANG_TIMEOUT_SECONDS)
    )
    """How the ranks are started; its fields are flags like the others."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--epochs", self.epochs, 1),
            ("--global-batch-size", self.global_batch_size, 1),
            ("--micro-batch-size", self.micro_batch_size, 1),
            ("--lr", self.lr, 0),
            ("--momentum", self.momentum, 0),
            ("--weight-decay", self.weight_decay, 0),
            ("--warmup-epochs", self.warmup_epochs, 0),
            ("--seed", self.seed, 0),
        ):
            if value is None:
                continue
            if not math.isfinite(value):
                raise UsageError(f"{flag} must be finite, found {value!r}")
            if value < least:
                raise UsageError(f"{flag} must be at least {least}, found {value!r}")
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise UsageError(
                f"--name {self.name!r} cannot be the name of a folder of a run; "
                "expected letters, digits and _ . + = - (not first)"
            )

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of the warm-up."""
        if self.lr is not None:
            return self.lr
        return 0.1 if self.optimizer == "sgd" else 0.001

    def without_effect(self) -> list[str]:
        """Name the settings that do nothing beside the others, and why."""
        found = []
        if self.optimizer == "adamw" and self.momentum != TrainConfig.momentum:
            found.append("--momentum: adamw has none")
        if self.data == "digits" and self.data_dir is not None:
            found.append("--data-dir: digits are embedded")
        if self.warmup_epochs >= self.epochs > 1:
            found.append("the fall of the learning rate: --warmup-epochs takes all")
        return found

    def as_yaml(self, name: str) -> str:
        """Write the fields as YAML, with the name that the run really has."""
        import yaml

        values = flat({**asdict(self), "name": name})
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        return yaml.safe_dump(plain, sort_keys=False)

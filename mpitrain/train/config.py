"""What a training is asked to do. The command line and the YAML file are this class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError


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
    """Most samples that one rank takes at once; a rank's larger share of the global
    batch is accumulated over microsteps. By default the whole share at once."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd (Nesterov) or adamw."""
    lr: float = 0.1
    """Peak learning rate; not scaled with the number of ranks."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where there are any; cuda: refuse to run without."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """auto: a bar on a terminal, a line per epoch in a log."""
    dry_run: bool = False
    """One step and one evaluation, to see that all works; all else is real."""

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
            # "not >=" catches nan, too.
            if value is not None and not (least <= value < float("inf")):
                raise UsageError(f"{flag} must be at least {least}, found {value!r}")
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise UsageError(
                f"--name {self.name!r} cannot be the name of a folder of a run; "
                "expected letters, digits and _ . + = - (not first)"
            )

"""What a training is asked to do. The command line and the YAML file are `TrainConfig`.

It is one flat class, whose fields are written down in the rooms that they belong to.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from mpitrain.checkpoint.config import CheckpointConfig
from mpitrain.data.config import DataConfig
from mpitrain.errors import UsageError
from mpitrain.flags import flat
from mpitrain.launch.config import LaunchConfig
from mpitrain.models.config import ModelConfig
from mpitrain.record.config import LogConfig

HANG_TIMEOUT_SECONDS = 600.0
"""How long a training may stand still where nobody says otherwise."""

Precision = Literal["fp32", "fp64", "bf16", "fp16"]

Strategy = Literal["auto", "ddp", "fsdp", "dp", "single"]

Optimizer = Literal[
    "sgd",
    "adam",
    "adamw",
    "nadam",
    "radam",
    "rmsprop",
    "adagrad",
    "adamax",
    "adadelta",
]

LR = {"sgd": 0.05, "rmsprop": 0.01, "adagrad": 0.01, "adadelta": 1.0}
"""Peak learning rates where nobody says otherwise; else `ADAM_LR`."""

ADAM_LR = 0.001

WARMUP_EPOCHS = 5.0
"""Of a training of at least twice as many epochs, as Goyal et al. have it for ResNet-50
(https://arxiv.org/abs/1706.02677, 2.2)."""

SCALED_BATCH_SIZE = 256
"""The global batch size for which a learning rate is given that is to be scaled."""


MAY_CHANGE = frozenset(
    {
        *("name", "runs_dir", "progress"),
        *(field.name for field in fields(LaunchConfig)),
        *(f.name for f in fields(CheckpointConfig) if f.name != "best_by"),
        *(field.name for field in fields(LogConfig)),
        *("data_dir", "num_workers", "on_bad_sample", "on_nonfinite"),
        *("strategy", "hybrid_sharding", "cpu_offload", "shard_optimizer"),
        *("micro_batch_size", "channels_last", "activation_checkpointing", "compile"),
        *("deterministic", "tf32"),
    }
)
"""Fields that may be others when a run goes on: they change no result, but for its
rounding."""


@dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """Optimization."""

    epochs: int = 10
    """Number of epochs."""
    probe_epochs: int = 0
    """First train only a new head on the frozen backbone for this many epochs."""
    finetune_lr_factor: float = 0.125
    """Multiply the learning rate by this for the epochs after --probe-epochs."""
    global_batch_size: int = 64
    """Samples per step over all ranks."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Samples per forward pass of a rank; gradients are accumulated. auto: what fits
    in memory."""
    optimizer: Optimizer = "sgd"
    """Optimizer of torch.optim; sgd uses Nesterov momentum."""
    lr: float | None = None
    """Peak learning rate. Default: sgd 0.05 (less below 10 epochs), rmsprop, adagrad
    0.01, adadelta 1, others 0.001."""
    scale_lr: bool = False
    """Scale the learning rate by global batch size / 256."""
    momentum: float = 0.9
    """Momentum of sgd and rmsprop."""
    weight_decay: float = 5e-4
    """Weight decay."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup_epochs: float | None = None
    """Epochs of linear learning rate warm-up. Default: half of all, at most 5."""
    decay_epochs: int = 30
    """With --schedule step: decay the learning rate every N epochs."""
    decay_factor: float = 0.1
    """With --schedule step: multiply the learning rate by this."""
    label_smoothing: float = 0.0
    """Label smoothing, from 0 to 1."""
    mixup: float = 0.0
    """Mixup alpha; 0: off."""
    cutmix: float = 0.0
    """CutMix alpha; 0: off. With --mixup, each step uses one of both at random."""
    clip_grad_norm: float | None = None
    """Clip the gradient norm to this value."""
    ema_decay: float | None = None
    """Evaluate and save an exponential moving average of the weights with this decay
    (0.999)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop at a loss or gradient that is NaN or infinite, or skip the step."""
    seed: int = 1
    """Random seed."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--epochs", self.epochs, 0 if self.probe_epochs else 1),
            ("--probe-epochs", self.probe_epochs, 0),
            ("--finetune-lr-factor", self.finetune_lr_factor, 0),
            ("--global-batch-size", self.global_batch_size, 1),
            ("--lr", self.lr, 0),
            ("--momentum", self.momentum, 0),
            ("--weight-decay", self.weight_decay, 0),
            ("--warmup-epochs", self.warmup_epochs, 0),
            ("--decay-epochs", self.decay_epochs, 1),
            ("--decay-factor", self.decay_factor, 0),
            ("--label-smoothing", self.label_smoothing, 0),
            ("--mixup", self.mixup, 0),
            ("--cutmix", self.cutmix, 0),
            ("--clip-grad-norm", self.clip_grad_norm, 0),
            ("--ema-decay", self.ema_decay, 0),
            ("--seed", self.seed, 0),
        ):
            _check(flag, value, least)
        if self.micro_batch_size != "auto":
            _check("--micro-batch-size", self.micro_batch_size, 1)
        for flag, value in (
            ("--ema-decay", self.ema_decay),
            ("--label-smoothing", self.label_smoothing),
        ):
            if value is not None and value >= 1:
                raise UsageError(f"{flag} must be less than 1, found {value!r}")
        if self.clip_grad_norm == 0:
            raise UsageError("--clip-grad-norm must be above 0, found 0")

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of the warm-up.

        The default of sgd rises by 0.01 in each epoch of the default warm-up: ResNets
        diverge in the first epoch where it rises faster, at any batch size.
        """
        lr = self.lr
        if lr is None:
            lr = LR.get(self.optimizer, ADAM_LR)
            if self.optimizer == "sgd":
                epochs = self.epochs or self.probe_epochs
                lr *= min(1.0, epochs / (2 * WARMUP_EPOCHS))
        scale = self.global_batch_size / SCALED_BATCH_SIZE if self.scale_lr else 1.0
        return lr * scale


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Parallelism, precision and memory."""

    strategy: Strategy = "auto"
    """ddp, fsdp (sharded), dp (one process, all its GPUs), single. auto: ddp, or
    single for one rank."""
    hybrid_sharding: bool = False
    """With fsdp: shard within each node, replicate between nodes."""
    cpu_offload: bool = False
    """With fsdp: keep parameters and optimizer state in host memory."""
    shard_optimizer: bool = False
    """With ddp: shard the optimizer state (ZeRO-1)."""
    precision: Precision = "fp32"
    """bf16 and fp16: mixed precision with fp32 parameters. fp64: all in double
    precision."""
    tf32: bool = False
    """Allow TF32 matrix products on GPUs."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Memory format channels_last. auto: on GPUs with bf16 or fp16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    sync_batchnorm: bool = False
    """Synchronize batch norm over all ranks (GPUs only)."""
    deterministic: bool = False
    """Use only deterministic operations of torch; some are slower."""

    def __post_init__(self) -> None:
        for flag, is_asked in (
            ("--hybrid-sharding", self.hybrid_sharding),
            ("--cpu-offload", self.cpu_offload),
        ):
            if is_asked and self.strategy != "fsdp":
                raise UsageError(
                    f"{flag} needs --strategy fsdp, found --strategy {self.strategy}"
                )
        if self.channels_last == "always" and self.strategy == "fsdp":
            raise UsageError(
                "--channels-last always with --strategy fsdp: torch shards contiguous "
                "weights only; expected auto, or ddp"
            )
        if self.shard_optimizer and self.strategy not in ("auto", "ddp"):
            raise UsageError(
                "--shard-optimizer needs --strategy ddp, found --strategy "
                f"{self.strategy}"
                + " (it shards that state by itself)"
                * (self.strategy == "fsdp")
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    LogConfig, CheckpointConfig, StrategyConfig, LearningConfig, ModelConfig, DataConfig
):
    """Train a model on every rank that mpirun started, or on one without mpirun."""

    name: str | None = None
    """Name of the run and its folder. Default: date and time."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """Show a progress bar, or a line per epoch. auto: a bar on a terminal."""
    dry_run: bool = False
    """Run one step and one validation in a run folder of its own, without
    checkpoints."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(hang_timeout=HANG_TIMEOUT_SECONDS)
    )
    """How the ranks are started; its fields are flags like the others."""

    def __post_init__(self) -> None:
        for part in (
            *(DataConfig, LearningConfig, StrategyConfig),
            *(CheckpointConfig, LogConfig),
        ):
            part.__post_init__(self)
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise UsageError(
                f"--name {self.name!r} cannot be the name of a folder of a run; "
                "expected letters, digits and _ . + = - (not first)"
            )
        if self.dry_run and self.resume not in ("auto", "never"):
            raise UsageError(
                f"--dry-run --resume {self.resume}: a dry run begins anew, and keeps "
                "nothing; leave one of the two out"
            )

    def only_for_command(self) -> list[str]:
        """Name the fields that are set and that `Trainer` in a script ignores."""
        kinds = (DataConfig, ModelConfig, CheckpointConfig, LogConfig)
        names = {it.name for kind in kinds for it in fields(kind)}
        names |= {"name", "runs_dir", "progress"}
        names -= {"image_size", "random_crop", "random_flip", "normalize"}
        names -= {"num_workers", "on_bad_sample"}
        default = TrainConfig()
        return sorted(n for n in names if getattr(self, n) != getattr(default, n))

    def without_effect(self) -> list[str]:
        """Name the settings that do nothing beside the others, and why."""
        plain = TrainConfig
        found = []
        if self.optimizer not in ("sgd", "rmsprop") and self.momentum != plain.momentum:
            found.append(f"--momentum: {self.optimizer} has none")
        if self.data in ("digits", "synthetic") and self.data_dir is not None:
            found.append(f"--data-dir: {self.data} needs no files")
        if self.data == "digits" and self.normalize in ("data", "imagenet"):
            found.append("--normalize: the digits are taken as they are")
        if (self.warmup_epochs or 0) >= self.epochs > 1 and self.schedule != "constant":
            found.append("the fall of the learning rate: --warmup-epochs takes all")
        if (
            self.finetune_lr_factor != plain.finetune_lr_factor
            and not self.probe_epochs
        ):
            found.append("--finetune-lr-factor: there is no probe before")
        for flag, value, default in (
            ("--decay-epochs", self.decay_epochs, plain.decay_epochs),
            ("--decay-factor", self.decay_factor, plain.decay_factor),
        ):
            if value != default and self.schedule != "step":
                found.append(f"{flag}: for --schedule step")
        if self.log_every_steps != plain.log_every_steps and not self.log:
            found.append("--log-every-steps: there is no --log")
        if self.profile and self.dry_run:
            found.append("--profile: a dry run has one step")
        if self.data not in ("folder", "hdf5", "shards") and self.random_resized_crop:
            found.append(f"--random-resized-crop: not for --data {self.data}")
        for flag, given in (
            ("--wandb-project", self.wandb_project),
            ("--wandb-group", self.wandb_group),
            ("--wandb-tags", self.wandb_tags),
        ):
            if given and "wandb" not in self.log:
                found.append(f"{flag}: for --log wandb")
        return found

    def as_plain(self, name: str) -> dict[str, Any]:
        """Return the fields as a file has them, with the name that the run has."""
        return flat({**asdict(self), "name": name})

    def as_yaml(self, name: str) -> str:
        """Write the fields as YAML, with the name that the run really has."""
        import yaml

        return yaml.safe_dump(self.as_plain(name), sort_keys=False)


def _check(flag: str, value: float | None, least: float) -> None:
    if value is None:
        return
    if not math.isfinite(value):
        raise UsageError(f"{flag} must be finite, found {value!r}")
    if value < least:
        raise UsageError(f"{flag} must be at least {least}, found {value!r}")

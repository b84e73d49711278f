"""The configuration of a training: command line, YAML file and `TrainConfig` are one.

Each group is a dataclass; a field's docstring is the help of its flag. `TrainConfig` is
all groups in one flat class. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from mpitrain.errors import UsageError
from mpitrain.flags import flat
from mpitrain.help import Values
from mpitrain.plugins import is_reference

DATA_DIR = Path("data")

NAME_PATTERN = r"\w[\w.+=-]*"  # of a run or a sweep, which name folders
LOGGERS = ("csv", "tensorboard", "wandb")

START_TIMEOUT_SECONDS = 600.0  # default of a stage of the start
# Its minimum under a short hang timeout: torch may come from a slow file system.
MIN_START_TIMEOUT_SECONDS = 120.0
HANG_TIMEOUT_SECONDS = 600.0  # default of a training
TIMEOUT_SECONDS = 1800.0  # of a collective or an answer of the store; gloo's default

# Default peak learning rates; ADAM_LR for the others.
LR = {"sgd": 0.1, "rmsprop": 0.01, "adagrad": 0.01, "adadelta": 1.0}
ADAM_LR = 0.001
# Of a training of at least twice as many epochs, as in Goyal et al. for ResNet-50
# (https://arxiv.org/abs/1706.02677, 2.2).
WARMUP_EPOCHS = 5.0
SCALED_BATCH_SIZE = 256  # of the default of sgd, and what --scale-lr scales from
BITWISE_MICRO_BATCHES = 8  # of a step with --bitwise, without --micro-batch-size

Device = Literal["auto", "cpu", "cuda", "xpu"]
Backend = Literal["auto", "mpi4py", "gloo", "nccl", "xccl"]
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Strategy = Literal["auto", "ddp", "fsdp", "dp", "single"]
Optimizer = Literal[
    "sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adamax", "adadelta"
]

# The minimum of a number, where it is not 0; all must be finite.
MINIMUM: Mapping[str, float] = {
    **dict.fromkeys(("image_size", "global_batch_size", "micro_batch_size"), 1),
    **dict.fromkeys(("decay_epochs", "log_every_steps", "keep_checkpoints"), 1),
    **dict.fromkeys(("checkpoint_every_epochs", "checkpoint_every_steps"), 1),
    "fingerprint": 1,
    "synthetic_classes": 2,
    "synthetic_samples": 4,
}
ABOVE_ZERO = ("clip_grad_norm", "checkpoint_every_minutes")  # not the minimum itself
BELOW_ONE = ("ema_decay", "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, hdf5, shards,
    synthetic, or package.module:callable."""
    data_dir: Path | None = None
    """Folder of the data set, or the HDF5 file. Default: data."""
    image_size: int | None = None
    """Resize images to this height and width in pixels. Default: keep; 224 if sizes
    differ."""
    num_workers: int | Literal["auto"] = "auto"
    """Data-loading processes per rank; 0: none. auto: cores - 1, at most 8, for
    folder, hdf5 and shards; else 0."""
    random_crop: int = 0
    """Pad training images by this many pixels and crop at random."""
    random_flip: bool = False
    """Flip training images horizontally at random."""
    random_resized_crop: bool = False
    """Crop training images at random position and scale (folder, hdf5, shards)."""
    normalize: Literal["auto", "data", "imagenet", "none"] = "auto"
    """Mean and standard deviation to normalize images with. auto: data if in memory,
    else imagenet; custom data: none."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Stop at a sample that cannot be read, or skip and count it."""
    synthetic_samples: int = 1024
    """Training samples of --data synthetic; a quarter as many for validation."""
    synthetic_classes: int = 10
    """Classes of --data synthetic."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    model: str = "convnet"
    """convnet, a torchvision model (resnet50), timm:NAME, hub:REPO_OR_DIR:ENTRY, or
    package.module:callable."""
    weights: str | None = None
    """Initial weights: a file, default, or a name that the library knows. Default:
    random."""


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
    micro_batch_size: int | None = None
    """Samples per forward pass of a rank; gradients are accumulated. Default: all of
    the rank's."""
    optimizer: Optimizer = "sgd"
    """Optimizer of torch.optim; sgd uses Nesterov momentum."""
    lr: float | None = None
    """Peak learning rate. Default: sgd 0.1 (less below a batch size of 256), rmsprop,
    adagrad 0.01, adadelta 1, others 0.001."""
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
    """Evaluate and save an exponential moving average (EMA), such as of decay 0.999."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stop at a loss or gradient that is NaN or infinite, or skip the step."""
    seed: int = 1
    """Random seed."""

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of the warm-up.

        The default of sgd is torchvision's and that of Goyal et al., 0.1 for a batch of
        256. Smaller batches get it times sqrt(batch / 256): in proportion to the batch
        the digits would learn too slowly (0.05 at the default batch of 64).
        """
        relative = self.global_batch_size / SCALED_BATCH_SIZE
        lr = self.lr
        if lr is None:
            lr = LR.get(self.optimizer, ADAM_LR)
            if self.optimizer == "sgd" and not self.scale_lr:
                lr *= math.sqrt(min(1.0, relative))
        return lr * relative if self.scale_lr else lr


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
    """bf16, fp16: mixed precision with fp32 parameters. fp64: double precision."""
    tf32: bool = False
    """Allow TF32 matrix products on GPUs."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: Literal["auto", "always", "never"] = "auto"
    """Memory format channels_last. auto: on GPUs with bf16 or fp16."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    find_unused_parameters: Literal["auto", "always", "never"] = "auto"
    """With ddp: a weight may take no part in a step. auto: in custom models."""
    sync_batchnorm: bool = False
    """Synchronize batch norm over all ranks (GPUs only)."""
    deterministic: bool = False
    """Use only deterministic operations of torch; some are slower."""
    bitwise: bool = False
    """Same bits on any number of ranks, up to that of a step's micro-batches
    (default: 8), which are summed in a fixed order."""
    balance: Literal["auto", "off"] = "auto"
    """With --bitwise: give slow ranks fewer micro-batches. auto: with ddp."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, resuming and time limit."""

    checkpoint_every_epochs: int | None = 1
    """Save a checkpoint every N epochs; None: not per epoch."""
    checkpoint_every_steps: int | None = None
    """Save a checkpoint every N steps."""
    checkpoint_every_minutes: float | None = 10.0
    """Save a checkpoint every N minutes; None: off."""
    keep_checkpoints: int | None = 3
    """Keep the N newest checkpoints and the best one; None: all."""
    best_by: str | None = None
    """Validation metric of the best checkpoint: NAME, min:NAME or max:NAME. Default:
    accuracy, else loss."""
    resume: str = "auto"
    """auto: resume the run of this --name. never: fail if it exists. Or a run folder
    or checkpoint that a new run starts from."""
    new_run: bool = False
    """If the run exists, start NAME-2, NAME-3, ..."""
    time_limit: str | None = None
    """Save a checkpoint and stop before this much time ([[hours:]minutes:]seconds)
    has passed."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Loggers and profiler."""

    log: Annotated[tuple[str, ...], Values("NAME [NAME ...]")] = ()
    """Loggers besides metrics.jsonl: csv, tensorboard, wandb, or
    package.module:callable."""
    log_every_steps: int = 10
    """Log every N steps (epochs are always logged)."""
    wandb_project: str | None = None
    """W&B project. Default: WANDB_PROJECT, or mpitrain."""
    wandb_group: str | None = None
    """W&B group. Default: none; with --wandb-all-ranks the name of the run."""
    wandb_tags: Annotated[tuple[str, ...], Values("TAG [TAG ...]")] = ()
    """W&B tags."""
    wandb_all_ranks: bool = False
    """Log every rank as a W&B run of one group, not only rank zero."""
    fingerprint: int | None = None
    """Record a hash of each weight every N steps, for mpitrain diff."""
    profile: int = 0
    """Profile N steps of every rank with torch.profiler, after the first 5; 0: off."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch."""

    device: Device = "auto"
    """Device of the ranks. auto: GPUs if there are any. cuda, xpu: fail without."""
    backend: Backend = "auto"
    """torch.distributed backend. auto: mpi4py on CPUs, nccl on GPUs."""
    interface: str | None = None
    """Network interface between nodes, such as ib0. Default: the best that works."""
    start_timeout: float | None = None
    """Seconds for each stage of the start and the first step. Default: 120 to 600,
    as --hang-timeout."""
    hang_timeout: float | None = None
    """End the job with status 76 after this many seconds without progress; None:
    never."""

    def __post_init__(self) -> None:
        if self.interface is not None and not self.interface.strip():
            raise UsageError("--interface is empty; expected a name such as ib0")
        for flag in ("--start-timeout", "--hang-timeout"):
            value = getattr(self, flag[2:].replace("-", "_"))
            if value is not None and not 0 < value < math.inf:
                raise UsageError(
                    f"{flag} must be a number of seconds above 0, found {value!r}"
                )

    def as_arguments(self) -> dict[str, Any]:
        """Return the arguments of `mpitrain.init`."""
        return {
            "device": self.device,
            "backend": self.backend,
            "interface": self.interface,
            "start_timeout_seconds": self.start_timeout,
            "hang_timeout_seconds": self.hang_timeout,
        }


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
        for error in self._errors():
            raise UsageError(error)

    def _errors(self) -> Iterator[str]:
        for name, value in vars(self).items():
            if isinstance(value, int | float):  # of a bool, too, which is 0 or 1
                flag, minimum = "--" + name.replace("_", "-"), MINIMUM.get(name, 0)
                if not math.isfinite(value):
                    yield f"{flag} must be finite, found {value!r}"
                if value < minimum:
                    yield f"{flag} must be at least {minimum}, found {value!r}"
                if value == 0 and name in ABOVE_ZERO:
                    yield f"{flag} must be above 0, found 0"
                if value >= 1 and name in BELOW_ONE:
                    yield f"{flag} must be less than 1, found {value!r}"
        if not self.epochs and not self.probe_epochs:
            yield "--epochs must be at least 1, found 0"
        yield from self._strategy_errors()
        yield from self._run_errors()

    def _strategy_errors(self) -> Iterator[str]:
        found = f"found --strategy {self.strategy}"
        for name in ("hybrid_sharding", "cpu_offload"):
            if getattr(self, name) and self.strategy != "fsdp":
                yield f"--{name.replace('_', '-')} needs --strategy fsdp, {found}"
        if self.channels_last == "always" and self.strategy == "fsdp":
            yield (
                "--channels-last always with --strategy fsdp: torch shards contiguous "
                "weights only; expected auto, or ddp"
            )
        if self.shard_optimizer and self.strategy not in ("auto", "ddp"):
            itself = " (it shards that state by itself)" * (self.strategy == "fsdp")
            yield f"--shard-optimizer needs --strategy ddp, {found}{itself}"
        names = ("sync_batchnorm", "compile", "hybrid_sharding", "cpu_offload")
        flags = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        flags += ["--strategy dp"] * (self.strategy == "dp")
        if self.bitwise and flags:
            yield (
                f"--bitwise does not go with {', '.join(flags)}: the last bits would "
                "depend on the number of ranks; expected one of both"
            )

    def _run_errors(self) -> Iterator[str]:
        for name in self.log:
            if name not in LOGGERS and not is_reference(name):
                yield (
                    f"--log {name!r} is not known; expected {', '.join(LOGGERS)}, or "
                    "package.module:callable for a user-defined logger"
                )
            if self.log.count(name) > 1:
                yield f"--log names {name!r} twice; expected it once"
        if self.wandb_all_ranks and "wandb" not in self.log:
            yield "--wandb-all-ranks needs --log wandb"
        if not re.fullmatch(r"((min|max):)?[^:]+", self.best_by or "accuracy"):
            yield (
                f"--best-by {self.best_by!r}: expected the name of a metric, min:NAME "
                "or max:NAME"
            )
        if self.new_run and self.resume == "never":
            yield "--new-run never resumes; leave --resume never out"
        seconds_of(self.time_limit)  # refuses others
        if self.name is not None and not re.fullmatch(NAME_PATTERN, self.name):
            yield (
                f"--name {self.name!r} cannot be the name of a folder of a run; "
                "expected letters, digits and _ . + = - (not first)"
            )
        if self.dry_run and self.resume not in ("auto", "never"):
            yield (
                f"--dry-run --resume {self.resume}: a dry run begins anew, and keeps "
                "nothing; leave one of the two out"
            )

    def only_for_command(self) -> list[str]:
        """Name the fields that are set and that `Trainer` in a script ignores."""
        kinds = (DataConfig, ModelConfig, CheckpointConfig, LogConfig)
        names = {field.name for kind in kinds for field in fields(kind)}
        names |= {"name", "runs_dir", "progress"}
        names -= {"image_size", "random_crop", "random_flip", "normalize"}
        names -= {"num_workers", "on_bad_sample"}
        return sorted(n for n in names if getattr(self, n) != getattr(TrainConfig, n))

    def uses_channels_last(self, device: str) -> bool:
        """Return whether images are in the channels-last memory format."""
        if self.strategy == "fsdp":
            return False  # torch shards contiguous weights only
        if self.channels_last == "auto":
            return device != "cpu" and self.precision in ("bf16", "fp16")
        return self.channels_last == "always"

    @property
    def bitwise_micro_batch_size(self) -> int:
        """Samples of a micro-batch with `bitwise`."""
        size = -(-self.global_batch_size // BITWISE_MICRO_BATCHES)
        return self.micro_batch_size or size

    @property
    def may_change(self) -> frozenset[str]:
        """`MAY_CHANGE` of this configuration."""
        return MAY_CHANGE - CHANGES_BITS if self.bitwise else MAY_CHANGE

    def without_effect(self) -> list[str]:
        """Name the settings that do nothing beside the others, and why."""
        of_wandb = "wandb" not in self.log and "for --log wandb"
        of_step = self.schedule != "step" and "for --schedule step"
        is_digits = self.data == "digits" and self.normalize != "none"
        no_files = self.data in ("digits", "synthetic")
        no_crop = self.data not in ("folder", "hdf5", "shards")
        no_momentum = self.optimizer not in ("sgd", "rmsprop")
        reasons = {
            "balance": (not self.bitwise and "for --bitwise")
            or (self.strategy == "fsdp" and "for --strategy ddp"),
            "momentum": no_momentum and f"{self.optimizer} has none",
            "data_dir": no_files and f"{self.data} needs no files",
            "normalize": is_digits and "the digits are taken as they are",
            "random_resized_crop": no_crop and f"not for --data {self.data}",
            "finetune_lr_factor": not self.probe_epochs and "there is no probe before",
            **dict.fromkeys(("decay_epochs", "decay_factor"), of_step),
            "log_every_steps": not self.log and "there is no --log",
            "profile": self.dry_run and "a dry run has one step",
            **dict.fromkeys(("wandb_project", "wandb_group", "wandb_tags"), of_wandb),
        }
        found = [
            f"--{name.replace('_', '-')}: {reason}"
            for name, reason in reasons.items()
            if reason and getattr(self, name) != getattr(TrainConfig, name)
        ]
        if (self.warmup_epochs or 0) >= self.epochs > 1 and self.schedule != "constant":
            found.append("the fall of the learning rate: --warmup-epochs takes all")
        return found

    def as_plain(self, name: str) -> dict[str, Any]:
        """Return the fields as a file has them, with the name that the run has."""
        return flat({**asdict(self), "name": name})

    def as_yaml(self, name: str) -> str:
        """Write the fields as YAML, with the name that the run really has."""
        import yaml

        return yaml.safe_dump(self.as_plain(name), sort_keys=False)


def seconds_of(time: str | None) -> float | None:
    """Read a time, in seconds; ``None`` for no time.

    >>> seconds_of("90"), seconds_of("1:30"), seconds_of("2:00:00")
    (90.0, 90.0, 7200.0)
    """
    if time is None:
        return None
    total = 0.0
    if re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", time):
        for part in time.split(":"):
            total = 60 * total + float(part)
    if not total:
        raise UsageError(
            f"--time-limit {time!r}: expected hours:minutes:seconds, minutes:seconds "
            "or seconds, more than 0"
        )
    return total


def default_start_timeout(
    hang_timeout: float | None, start_timeout: float | None = None
) -> float:
    """Return the seconds that a stage of the start may take.

    >>> [default_start_timeout(hang) for hang in (None, 8, 300, 3600)]
    [600.0, 120.0, 300, 600.0]
    >>> default_start_timeout(8, 1800)
    1800
    """
    longest = max(hang_timeout or START_TIMEOUT_SECONDS, MIN_START_TIMEOUT_SECONDS)
    return start_timeout or min(longest, START_TIMEOUT_SECONDS)


MAY_CHANGE = frozenset(
    {
        *("name", "runs_dir", "progress"),
        *(field.name for field in fields(LaunchConfig)),
        *(f.name for f in fields(CheckpointConfig) if f.name != "best_by"),
        *(field.name for field in fields(LogConfig)),
        *("data_dir", "num_workers", "on_bad_sample", "on_nonfinite"),
        *("strategy", "hybrid_sharding", "cpu_offload", "shard_optimizer"),
        *("micro_batch_size", "channels_last", "activation_checkpointing", "compile"),
        *("deterministic", "tf32", "balance", "find_unused_parameters"),
    }
)
"""Fields that may change when a run is resumed: they change no result, except for its
rounding, and what follows a bad sample or a step that is not finite."""

CHANGES_BITS = frozenset(
    {"micro_batch_size", "channels_last", "activation_checkpointing", "tf32"}
)
"""Of `MAY_CHANGE` those that change the rounding with ``--bitwise``."""

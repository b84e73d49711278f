"""The configuration of a training: command line, YAML file and `TrainConfig` are one.

Each group is a dataclass; a field's docstring is the help of its flag. `TrainConfig` is
all groups in one flat class. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mpitrain.errors import UsageError
from mpitrain.plugins import is_reference, plugins_of
from mpitrain.settings import FlagFacts, check_values, facts_of, flag_name, setting

DATA_DIR = Path("data")
NAME_PATTERN = r"\w[\w.+=-]*"  # of a run or a sweep, which name folders
LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "trackio", "openmetrics")
TASK_PREFIX = "task."  # of the names of `TrainConfig.task_arguments`

START_TIMEOUT_SECONDS = 600.0  # default of a stage of the start
MIN_START_TIMEOUT_SECONDS = 120.0  # with a short hang timeout: torch loads slowly
TIMEOUT_SECONDS = 1800.0  # of a collective or an answer of the store; gloo's default

# Default peak learning rates; ADAM_LR for the others.
LR = {"sgd": 0.1, "rmsprop": 0.01, "adagrad": 0.01, "adadelta": 1.0}
ADAM_LR = 0.001
WARMUP_EPOCHS = 5.0  # at most half of all; Goyal et al., arXiv 1706.02677, 2.2
SCALED_BATCH_SIZE = 256  # of the default of sgd, and what --scale-lr scales from
BITWISE_MICRO_BATCHES = 8  # of a step with --bitwise, without --micro-batch-size

NumWorkers = int | Literal["auto"]
Device = Literal["auto", "cpu", "cuda", "xpu"]
Backend = Literal["auto", "mpi4py", "gloo", "nccl", "xccl"]
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Strategy = Literal["auto", "ddp", "fsdp", "dp", "single"]
Optimizer = Literal[
    "sgd", "adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adamax", "adadelta"
]

# What may be said of a field in one word; see `setting`.
command_only = partial(setting, is_for_command=True)  # `Trainer` ignores it
resumable = partial(setting, may_change=True)  # may change when a run is resumed
run_setting = partial(setting, is_for_command=True, may_change=True)  # both


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data: str = command_only("digits", is_common=True)
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, hdf5, shards,
    synthetic, or package.module:callable."""
    data_dir: Path | None = run_setting(
        None, is_common=True, not_with=("data", "digits", "synthetic")
    )
    """Folder of the data set, or the HDF5 file. Default: data."""
    image_size: int | None = setting(None, minimum=1, is_common=True, is_for_task=True)
    """Resize images to this height and width. Default: keep; 224 if sizes differ."""
    num_workers: NumWorkers | None = resumable(None, minimum=0, is_common=True)
    """Data-loading processes per rank. auto: finds the best number. Default: auto for
    folder, hdf5 and shards; else 0."""
    random_crop: int = setting(0, minimum=0, is_for_task=True)
    """Pad training images by this many pixels and crop at random."""
    random_flip: bool = setting(False, is_for_task=True)
    """Flip training images horizontally at random."""
    random_resized_crop: bool = command_only(
        False, only_with=("data", "folder", "hdf5", "shards")
    )
    """Crop training images at random position and scale (folder, hdf5, shards)."""
    normalize: Literal["auto", "data", "imagenet", "none"] = "auto"
    """Mean and standard deviation to normalize images with. auto: data if in memory,
    else imagenet; custom data: none."""
    on_bad_sample: Literal["stop", "skip"] = resumable("stop")
    """Stop at a sample that cannot be read, or skip and count it."""
    synthetic_samples: int = command_only(1024, minimum=4)
    """Training samples of --data synthetic; a quarter as many for validation."""
    synthetic_classes: int = command_only(10, minimum=2)
    """Classes of --data synthetic."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    task: str | None = command_only(None)
    """package.module:callable that returns a Trainer, or a Task, of your own."""
    task_arguments: tuple[tuple[str, Any], ...] = command_only((), has_flag=False)
    """Values of the arguments of `task`, by the names of their flags, task.NAME."""
    model: str = command_only("convnet", is_common=True)
    """convnet, a torchvision model (resnet50), timm:NAME, hub:REPO_OR_DIR:ENTRY, or
    package.module:callable."""
    weights: str | None = command_only(None, is_common=True)
    """Initial weights: a file or folder, default, or a name that the library knows.
    Default: random."""


@dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """Optimization."""

    epochs: int = setting(10, minimum=0, is_common=True, not_with=("max_steps",))
    """Number of epochs."""
    max_steps: int | None = setting(None, minimum=1, is_common=True)
    """Train for this many steps, in as many epochs as they take, not --epochs."""
    validate_every_steps: int | None = setting(None, minimum=1)
    """Validate every N steps, too, not only at the end of an epoch."""
    probe_epochs: int = setting(0, minimum=0)
    """First train only a new head on the frozen backbone for this many epochs."""
    finetune_lr_factor: float = setting(0.125, minimum=0, only_with=("probe_epochs",))
    """Multiply the learning rate by this for the epochs after --probe-epochs."""
    global_batch_size: int = setting(64, minimum=1, is_common=True)
    """Samples per step over all ranks."""
    micro_batch_size: int | None = resumable(
        None, minimum=1, changes_bits=True, is_common=True
    )
    """Samples per forward pass; gradients are accumulated. Default: all of the rank's;
    with --bitwise an eighth of the step."""
    optimizer: Optimizer = setting("sgd", is_common=True)
    """Optimizer of torch.optim; sgd uses Nesterov momentum."""
    lr: float | None = setting(None, minimum=0, is_common=True)
    """Peak learning rate. Default: sgd 0.1 (less below a batch size of 256), rmsprop,
    adagrad 0.01, adadelta 1, others 0.001."""
    scale_lr: bool = False
    """Scale the learning rate by global batch size / 256."""
    momentum: float = setting(0.9, minimum=0, only_with=("optimizer", "sgd", "rmsprop"))
    """Momentum of sgd and rmsprop."""
    weight_decay: float = setting(5e-4, minimum=0, is_common=True)
    """Weight decay."""
    bias_decay: bool = True
    """Decay all weights; --no-bias-decay: not those with fewer than 2 dimensions."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup_epochs: float | None = setting(None, minimum=0, not_with=("warmup_steps",))
    """Epochs of linear learning rate warm-up. Default: half of all, at most 5."""
    warmup_steps: int | None = setting(None, minimum=0)
    """Steps of linear learning rate warm-up, instead of epochs."""
    decay_epochs: int = setting(30, minimum=1, only_with=("schedule", "step"))
    """With --schedule step: decay the learning rate every N epochs."""
    decay_factor: float = setting(0.1, minimum=0, only_with=("schedule", "step"))
    """With --schedule step: multiply the learning rate by this."""
    label_smoothing: float = setting(0.0, minimum=0, below=1, is_for_task=True)
    """Label smoothing, from 0 to 1."""
    mixup: float = setting(0.0, minimum=0, is_for_task=True)
    """Mixup alpha; 0: off."""
    cutmix: float = setting(0.0, minimum=0, is_for_task=True)
    """CutMix alpha; 0: off. With --mixup, each step uses one of both at random."""
    clip_grad_norm: float | None = setting(None, above=0)
    """Clip the gradient norm to this value."""
    ema_decay: float | None = setting(None, minimum=0, below=1)
    """Evaluate and save an exponential moving average (EMA), such as of decay 0.999."""
    on_nonfinite: Literal["stop", "skip"] = resumable("stop")
    """Stop at a loss or gradient that is NaN or infinite, or skip the step."""
    seed: int = setting(1, minimum=0, is_common=True)
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

    strategy: Strategy = resumable("auto", is_common=True)
    """ddp, fsdp (sharded), dp (one process, all its GPUs), single. auto: ddp, or
    single for one rank."""
    hybrid_sharding: bool = resumable(False)
    """With fsdp: shard within each node, replicate between nodes."""
    cpu_offload: bool = resumable(False)
    """With fsdp: keep parameters and optimizer state in host memory."""
    shard_optimizer: bool = resumable(False)
    """With ddp: shard the optimizer state (ZeRO-1)."""
    precision: Precision = setting("fp32", is_common=True)
    """bf16, fp16: mixed precision with fp32 parameters. fp64: double precision."""
    tf32: bool = resumable(False, changes_bits=True)
    """Allow TF32 matrix products on GPUs."""
    compile: bool = resumable(False)
    """Compile the model with torch.compile."""
    channels_last: Literal["auto", "always", "never"] = resumable(
        "auto", changes_bits=True
    )
    """Memory format channels_last. auto: on GPUs with bf16 or fp16."""
    activation_checkpointing: bool = resumable(False, changes_bits=True)
    """Recompute activations in the backward pass to save memory."""
    find_unused_parameters: Literal["auto", "always", "never"] = resumable("auto")
    """With ddp: a weight may take no part in a step. auto: in custom models."""
    sync_batchnorm: bool = False
    """Synchronize batch norm over all ranks (GPUs only)."""
    deterministic: bool = resumable(False)
    """Use only deterministic operations of torch; some are slower."""
    bitwise: bool = False
    """Same bits on any number of ranks; at most one rank per micro-batch of a step."""
    verify_every: int | None = resumable(None, minimum=1)
    """With ddp: every N steps compare the ranks, to find one that computes wrongly."""
    balance: Literal["auto", "off"] = resumable("auto", only_with=("bitwise",))
    """With --bitwise and ddp, auto: give slow ranks fewer micro-batches."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, resuming and time limit."""

    checkpoint_every_epochs: int | None = run_setting(1, minimum=1)
    """Save a checkpoint every N epochs; None: not per epoch."""
    checkpoint_every_steps: int | None = run_setting(None, minimum=1)
    """Save a checkpoint every N steps."""
    checkpoint_every_minutes: float | None = run_setting(10.0, above=0, is_common=True)
    """Save a checkpoint every N minutes; None: off."""
    checkpoint_memory: float = run_setting(0.25, minimum=0, below=1)
    """Share of a node's free memory for checkpoints of `supervise --restarts`."""
    keep_checkpoints: int | None = run_setting(3, minimum=1)
    """Keep the N newest checkpoints and the best one; None: all."""
    best_by: str | None = command_only(None)
    """Metric of the best checkpoint: min:NAME, max:NAME, or NAME (loss, error, mae,
    ...: min). Default: accuracy, else loss."""
    early_stopping: int | None = command_only(None, minimum=1)
    """Finish after N validations in a row without a better --best-by."""
    resume: str = run_setting("auto", is_common=True, is_set_by_sweep=True)
    """auto: resume the run of --name. never: fail if it exists. Or a run or checkpoint
    to start from."""
    new_run: bool = run_setting(False, is_set_by_sweep=True)
    """If the run exists, start NAME-2, NAME-3, ..."""
    time_limit: str | None = run_setting(None, is_common=True, is_set_by_sweep=True)
    """Save a checkpoint and stop before so much time ([[hours:]minutes:]seconds)."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Loggers and profiler."""

    log: tuple[str, ...] = run_setting((), metavar="NAME [NAME ...]", is_common=True)
    """Loggers besides metrics.jsonl: csv, tensorboard, wandb, mlflow, trackio,
    openmetrics, or package.module:callable."""
    log_every_steps: int = run_setting(10, minimum=1, only_with=("log",))
    """Log every N steps (epochs are always logged)."""
    wandb_project: str | None = run_setting(None, only_with=("log", "wandb"))
    """W&B project. Default: WANDB_PROJECT, or mpitrain."""
    wandb_group: str | None = run_setting(None, only_with=("log", "wandb"))
    """W&B group. Default: none; with --wandb-all-ranks the name of the run."""
    wandb_tags: tuple[str, ...] = run_setting(
        (), metavar="TAG [TAG ...]", only_with=("log", "wandb")
    )
    """W&B tags."""
    wandb_all_ranks: bool = run_setting(False)
    """Log every rank as a W&B run of one group, not only rank zero."""
    fingerprint: int | None = run_setting(None, minimum=1, in_diff=False)
    """Record a hash of each weight every N steps, for mpitrain diff."""
    profile: int = run_setting(0, minimum=0, not_with=("dry_run",))
    """Profile N steps of every rank with torch.profiler, after the first 5; 0: off."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch."""

    device: Device = resumable("auto", is_common=True)
    """Device of the ranks. auto: GPUs if there are any. cuda, xpu: fail without."""
    backend: Backend = resumable("auto")
    """torch.distributed backend. auto: mpi4py on CPUs, nccl on GPUs."""
    interface: str | None = resumable(None)
    """Network interface between nodes, such as ib0. Default: the best that works."""
    start_timeout: float | None = resumable(None, above=0)
    """Seconds for each stage of the start, and the first step of a training. Default:
    --hang-timeout, but 120 to 600."""
    hang_timeout: float | None = resumable(None, above=0, is_common=True)
    """End the job with status 76 after this many seconds without progress; None:
    never."""

    def __post_init__(self) -> None:
        if self.interface is not None and not self.interface.strip():
            raise UsageError("--interface is empty; expected a name such as ib0")
        check_values(self, vars(self))

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

    name: str | None = run_setting(
        None, is_common=True, is_set_by_sweep=True, in_diff=False
    )
    """Name of the run and its folder. Default: date and time."""
    runs_dir: Path = run_setting(Path("runs"), is_set_by_sweep=True, in_diff=False)
    """Folder that holds the run folders."""
    progress: Literal["auto", "bar", "lines"] = run_setting("auto")
    """Show a progress bar, or a line per epoch. auto: a bar on a terminal."""
    dry_run: bool = setting(False, is_common=True, is_set_by_sweep=True)
    """Run one step and one validation in a run folder of its own, without
    checkpoints."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(hang_timeout=600.0)
    )
    """How the ranks are started; its fields are flags like the others."""

    def __post_init__(self) -> None:
        check_values(self, vars(self))
        for error in self._errors():
            raise UsageError(error)

    def _errors(self) -> Iterator[str]:
        if not self.epochs and not self.probe_epochs:
            yield "--epochs must be at least 1, found 0"
        if self.max_steps and self.probe_epochs:
            yield "--max-steps does not go with --probe-epochs; expected --epochs"
        yield from self._strategy_errors()
        yield from self._run_errors()

    def _strategy_errors(self) -> Iterator[str]:
        found = f"found --strategy {self.strategy}"
        for name in ("hybrid_sharding", "cpu_offload"):
            if getattr(self, name) and self.strategy != "fsdp":
                yield f"{flag_name(name)} needs --strategy fsdp, {found}"
        if self.channels_last == "always" and self.strategy == "fsdp":
            yield (
                "--channels-last always with --strategy fsdp: torch shards contiguous "
                "weights only; expected auto, or ddp"
            )
        if self.shard_optimizer and self.strategy not in ("auto", "ddp"):
            itself = " (it shards that state by itself)" * (self.strategy == "fsdp")
            yield f"--shard-optimizer needs --strategy ddp, {found}{itself}"
        names = ("sync_batchnorm", "compile", "hybrid_sharding", "cpu_offload")
        flags = [flag_name(name) for name in names if getattr(self, name)]
        flags += ["--strategy dp"] * (self.strategy == "dp")
        if self.bitwise and flags:
            yield (
                f"--bitwise does not go with {', '.join(flags)}: the last bits would "
                "depend on the number of ranks; expected one of both"
            )

    def _run_errors(self) -> Iterator[str]:
        known = (*LOGGERS, *plugins_of("loggers")) if self.log else ()
        for name in self.log:
            if name not in known and not is_reference(name):
                yield (
                    f"--log {name!r} is not known; expected {', '.join(known)}, or "
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
            yield f"--dry-run begins anew; expected no --resume {self.resume} with it"

    @property
    def changed(self) -> dict[str, FlagFacts]:
        """The facts of the fields, without `launch`, that have not their default."""
        return {
            name: facts
            for name, facts in sorted(facts_of(self).items())
            if getattr(self, name, None) != getattr(TrainConfig, name, None)
        }

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
        """Names of the fields that may change when a run is resumed."""
        return frozenset(
            name
            for name, facts in facts_of(self).items()
            if facts.may_change and not (self.bitwise and facts.changes_bits)
        )

    def without_effect(self, *, has_own_data: bool = False) -> list[str]:
        """Name the settings that do nothing beside the others, and why."""
        changed, found = self.changed, []
        for name, facts in changed.items():
            if has_own_data and "data" in (*facts.only_with[:1], *facts.not_with[:1]):
                continue
            if facts.only_with and not self._has(*facts.only_with):
                found.append(f"{flag_name(name)} (for {_typed(*facts.only_with)})")
            if facts.not_with and self._has(*facts.not_with):
                found.append(f"{flag_name(name)} (not for {_typed(*facts.not_with)})")
        if "balance" in changed and self.bitwise and self.strategy == "fsdp":
            found.append("--balance (for --strategy ddp)")
        is_plain = self.data == "digits" and not has_own_data
        if is_plain and self.normalize not in ("auto", "none"):
            found.append("--normalize (the digits are taken as they are)")
        has_fall = self.schedule != "constant" and not self.max_steps
        if (self.warmup_epochs or 0) >= self.epochs > 1 and has_fall:
            found.append("the fall of the learning rate (--warmup-epochs takes all)")
        return found

    def _has(self, name: str, *values: str) -> bool:
        value = getattr(self, name)
        found = value if type(value) is tuple else (value,)
        return not {*values}.isdisjoint(found) if values else bool(value)

    def as_plain(self, name: str) -> dict[str, Any]:
        """Return the flags as a file has them, with the name that the run has."""
        values = {**asdict(self), "name": name}
        values |= values.pop("launch") | dict(values.pop("task_arguments"))
        return {name: _plain(value) for name, value in values.items()}

    def as_yaml(self, name: str) -> str:
        """Write the fields as YAML, with the name that the run really has."""
        import yaml

        return yaml.safe_dump(self.as_plain(name), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(it) for it in value]
    return str(value) if isinstance(value, Path) else value


def _typed(name: str, *values: str) -> str:
    return f"{flag_name(name)} {' or '.join(values)}".strip()


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

"""`python -m mpitrain export`: write the model of a run, without MPI."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpitrain.checkpoint.format import BrokenCheckpoint
from mpitrain.checkpoint.layout import (
    FOLDER,
    Checkpoint,
    best_of,
    checkpoint_at,
    list_checkpoints,
)
from mpitrain.checkpoint.resume import check
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import EMA, MODEL
from mpitrain.data.samples import digest
from mpitrain.errors import UsageError
from mpitrain.files import filling, replacing
from mpitrain.models.build import build_model
from mpitrain.models.state_dict_file import write_state_dict
from mpitrain.plugins import is_reference
from mpitrain.settings import setting
from mpitrain.tools import export_folder
from mpitrain.tools.export_folder import Weights

Format = Literal[
    "state_dict", "safetensors", "huggingface", "dcp", "torchscript", "exported-program"
]
FOLDERS = ("huggingface", "dcp")
KNOWN_INPUTS = ("resize", "center_crop", "mean", "std", "classes")
PROGRAMS = ("torchscript", "exported-program")  # with the model's code


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the model of a run's newest complete checkpoint to a file or folder."""

    run: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME, or one of its checkpoints."""
    output: Path = setting(metavar="OUTPUT", is_positional=True)
    """The file to write, replaced only when complete; of huggingface and dcp a new
    folder."""
    best: bool = False
    """Take the best checkpoint by the run's --best-by, not the newest."""
    format: Format = "state_dict"
    """state_dict (for torch.load), safetensors, huggingface (for from_pretrained of
    Transformers, or timm), dcp (for torch.distributed.checkpoint), or with the model's
    code torchscript or exported-program (torch.export)."""
    model: str | None = None
    """Repeat the run's --model for torchscript or exported-program, if it is
    user-defined or from torch.hub: its code is run."""
    average: bool = True
    """Take the EMA of the weights, if the run has one (default)."""
    normalize: bool = False
    """Put the run's normalization into torchscript or exported-program, which then
    takes floats from 0 to 1."""
    max_shard_gb: float | None = setting(None, above=0.0)
    """Gigabytes of one file of huggingface, at most, unless one weight has more.
    Default: 5."""


def export(config: ExportConfig) -> str:
    """Write the model; return a line that says what was written."""
    kind, output = config.format, config.output
    is_folder = kind in FOLDERS
    is_there = output.exists() if is_folder else output.is_dir()
    if is_there or not output.absolute().parent.is_dir():
        what = "the name of a new folder" if is_folder else "a file"
        raise UsageError(
            f"{output} cannot be written; expected {what} in an existing folder"
        )
    if config.max_shard_gb is not None and kind != "huggingface":
        raise UsageError(f"--max-shard-gb: found --format {kind}, expected huggingface")
    checkpoint = choose_checkpoint(config.run, best=config.best)
    reader = CheckpointReader(checkpoint)
    inputs = (reader.metadata["trainer"] or {}).get("inputs") or {}
    if config.normalize and (kind not in PROGRAMS or not inputs.get("mean")):
        raise UsageError(
            f"--normalize: found --format {kind}, mean {inputs.get('mean')}; "
            "expected torchscript or exported-program, and a run that normalizes images"
        )
    weights = Weights(reader, find_weights(reader, average=config.average))
    if not weights.stored:
        names = ", ".join(reader.metadata.get("objects") or ())
        raise UsageError(
            f"{checkpoint.path} has no model, but {names or 'nothing'}; expected a "
            "loop that saves one by the name model: save(step, model=model, ...)"
        )
    try:
        with (filling if is_folder else replacing)(output) as beside:
            _write(config, weights, reader.metadata, beside)
    except OSError as error:
        raise UsageError(f"{output}: {error.strerror or error}") from None
    num = sum(of.shape.numel() for of in weights.stored.values())
    return (
        f"{output}: {kind} of {num:,} numbers in {len(weights.stored)} tensors, "
        f"from {checkpoint.path}"
        + _inputs_lines(inputs, config.format, is_inside=config.normalize)
    )


def _inputs_lines(inputs: dict[str, Any], kind: str, *, is_inside: bool) -> str:
    """Say what the model takes and returns, as far as the checkpoint knows."""
    if not inputs:
        return ""
    size, crop, mean = (inputs.get(it) for it in ("resize", "center_crop", "mean"))
    steps = []
    if size and crop:
        whole = f"kept whole if {crop}x{crop} already"
        # The files of other libraries have no word for it.
        whole += ", but by the folder's config" if kind == "huggingface" else ""
        steps = [f"shorter side resized to {size}, center crop {crop} ({whole})"]
    elif size:
        steps = [f"resized to {size}"]
    if mean:
        where = " (is inside)" if is_inside else ""
        numbers = f"mean {mean}, std {inputs.get('std')}"
        steps.append(f"pixels from 0 to 1, normalized by {numbers}{where}")
    # A custom task has keys of its own.
    steps += [f"{key} {inputs[key]}" for key in inputs if key not in KNOWN_INPUTS]
    classes = inputs.get("classes")
    named = f"\nclasses: {', '.join(map(str, classes))}" if classes else ""
    return f"\ninputs: {'; '.join(steps) or 'as in the data set'}{named}"


def choose_checkpoint(path: Path, *, best: bool) -> Checkpoint:
    """Return the newest or best complete checkpoint of a run, or the named one."""
    if not (path / FOLDER).is_dir():
        named = checkpoint_at(path.absolute())
        check(named)
        return named
    found = list_checkpoints(path.absolute())
    while checkpoint := best_of(found) if best else next(iter(found), None):
        if is_complete(checkpoint):
            return checkpoint
        found.remove(checkpoint)
    kind = "with a metric" if best else "that is complete"
    raise UsageError(f"{path} has no checkpoint {kind}")


def is_complete(checkpoint: Checkpoint) -> bool:
    """Check the files of a checkpoint, and print what is wrong with them."""
    try:
        check(checkpoint)
    except BrokenCheckpoint as broken:
        print(f"warning: {broken}", flush=True)
        return False
    return True


def find_weights(reader: CheckpointReader, *, average: bool) -> dict[str, str]:
    """Return the names in a checkpoint of the weights of a model, or of their EMA."""
    sources = {name: MODEL + name for name in reader.stored(MODEL)}
    averages = reader.stored(EMA) if average else {}
    # A weight of two names has two equal tensors, and its average the first name.
    others = [name for name in sources if averages and name not in averages]
    weights, first_names = Weights(reader, sources), {}
    for name in averages if others else ():
        first_names[_identity(weights.read(name))] = name
    for name in others:
        if found := first_names.get(_identity(weights.read(name))):
            sources[name] = EMA + found
    return sources | {name: EMA + name for name in averages}


def read_weights(reader: CheckpointReader, *, average: bool) -> dict[str, Tensor]:
    """Read a model's plain ``state_dict``, or its EMA where there is one."""
    return Weights(reader, find_weights(reader, average=average)).read_all()


def read_tensors(reader: CheckpointReader, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix, by the rest."""
    sources = {name: prefix + name for name in reader.stored(prefix)}
    return Weights(reader, sources).read_all()


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return digest(tensor), tensor.shape, tensor.dtype


def _write(
    config: ExportConfig, weights: Weights, metadata: dict[str, Any], path: Path
) -> None:
    kind = config.format
    if kind == "safetensors":
        export_folder.write_safetensors(path, weights, weights.stored)
    elif kind == "huggingface":
        found = metadata.get("model_config")  # not in older checkpoints
        trainer, max_bytes = metadata["trainer"], (config.max_shard_gb or 5.0) * 1e9
        export_folder.write_huggingface(path, weights, found, trainer, max_bytes)
    elif kind == "dcp":
        export_folder.write_dcp(path, weights, metadata["extra_state"])
    elif kind == "state_dict":
        outline, extra = weights.outline(), metadata["extra_state"]
        values = ((name, weights.read(name)) for name in outline)
        write_state_dict(path, outline | extra, chain(values, extra.items()))
    else:
        model = _rebuild(weights.read_all(), metadata, config.model)
        if config.normalize:
            model = _normalized(model, metadata["trainer"])
        data = _trainer(metadata)["data"]
        # Two samples: torch.export takes a size of 1 for a constant.
        size = (2, data["in_channels"], data["image_size"], data["image_size"])
        dtype = next(iter(model.parameters())).dtype
        example = torch.zeros(size, dtype=dtype)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is to go, one day
            if kind == "torchscript":
                trace: Any = torch.jit.trace
                torch.jit.save(trace(model, example), str(path))
            else:
                shapes = ({0: torch.export.Dim.AUTO},)
                program = torch.export.export(model, (example,), dynamic_shapes=shapes)
                with path.open("wb") as opened:
                    torch.export.save(program, opened)


def _rebuild(
    state: dict[str, Tensor], metadata: dict[str, Any], typed: str | None
) -> nn.Module:
    config, data = _trainer(metadata)["config"], _trainer(metadata)["data"]
    name = config["model"]
    runs_code = is_reference(name) and not name.startswith("timm:")
    if runs_code and typed != name:
        raise UsageError(
            f"the run's model is {name!r}, whose code would be run; expected --model "
            f"{name}, if you trust it"
        )
    model = build_model(name, seed=config["seed"], **data)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if torch.float64 in dtypes:
        model = model.double()
    model.load_state_dict({**state, **metadata["extra_state"]})
    return model.eval()


def _normalized(model: nn.Module, trainer: dict[str, Any]) -> nn.Module:
    """Put a batch norm with the run's mean and deviation before a model."""
    channels, dtype = trainer["data"]["in_channels"], next(model.parameters()).dtype
    # A layer of torch's own, which every format knows; it divides by sqrt(var + eps).
    norm = nn.BatchNorm2d(channels, eps=0.0, affine=False, dtype=dtype)
    mean, std = (torch.tensor(trainer["inputs"][name]) for name in ("mean", "std"))
    state = {
        "running_mean": mean.expand(channels),
        "running_var": std.expand(channels) ** 2,
    }
    norm.load_state_dict(state, strict=False)
    return nn.Sequential(norm, model).eval()


def _trainer(metadata: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] | None = metadata["trainer"]
    if found is None or found["data"] is None:
        raise UsageError(
            "--format: the checkpoint was written by a script; expected state_dict or "
            "safetensors, which need no model"
        )
    return found

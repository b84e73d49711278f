"""`python -m mpitrain export`: write the model of a run to a file, without MPI."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
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
from mpitrain.files import replacing
from mpitrain.models.build import build_model
from mpitrain.plugins import is_reference, require
from mpitrain.settings import setting

Format = Literal["state_dict", "safetensors", "torchscript", "exported-program"]
PLAIN = ("state_dict", "safetensors")  # without the model's code


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the model of a run's newest complete checkpoint to a file."""

    run: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME, or one of its checkpoints."""
    output: Path = setting(metavar="FILE", is_positional=True)
    """The file to write; replaced only when complete."""
    best: bool = False
    """Take the best checkpoint by the run's --best-by, not the newest."""
    format: Format = "state_dict"
    """state_dict (for torch.load), safetensors, or with the model's code
    torchscript or exported-program (torch.export)."""
    model: str | None = None
    """Repeat the run's --model for torchscript or exported-program, if it is
    user-defined or from torch.hub: its code is run."""
    average: bool = True
    """Take the EMA of the weights, if the run has one (default)."""
    normalize: bool = False
    """Put the run's normalization into torchscript or exported-program, which then
    takes floats from 0 to 1."""


def export(config: ExportConfig) -> str:
    """Write the model; return a line that says what was written."""
    if config.output.is_dir() or not config.output.absolute().parent.is_dir():
        raise UsageError(
            f"{config.output} cannot be written; expected a file in an existing folder"
        )
    checkpoint = choose_checkpoint(config.run, best=config.best)
    reader = CheckpointReader(checkpoint)
    inputs = (reader.metadata["trainer"] or {}).get("inputs") or {}
    if config.normalize and (config.format in PLAIN or not inputs.get("mean")):
        raise UsageError(
            f"--normalize: found --format {config.format}, mean {inputs.get('mean')}; "
            "expected torchscript or exported-program, and a run that normalizes images"
        )
    state = read_weights(reader, average=config.average)
    if not state:
        names = ", ".join(reader.metadata.get("objects") or ())
        raise UsageError(
            f"{checkpoint.path} has no model, but {names or 'nothing'}; expected a "
            "loop that saves one by the name model: save(step, model=model, ...)"
        )
    try:
        with replacing(config.output) as beside:
            _write(config, state, reader.metadata, beside)
    except OSError as error:
        raise UsageError(f"{config.output}: {error.strerror or error}") from None
    num = sum(tensor.numel() for tensor in state.values())
    return (
        f"{config.output}: {config.format} of {num:,} numbers in {len(state)} tensors, "
        f"from {checkpoint.path}{_inputs_lines(inputs, is_inside=config.normalize)}"
    )


def _inputs_lines(inputs: dict[str, Any], *, is_inside: bool) -> str:
    """Say what the model takes and returns, as far as the checkpoint knows."""
    if not inputs:
        return ""
    size, crop, classes = inputs["resize"], inputs["center_crop"], inputs["classes"]
    steps = [f"shorter side resized to {size}, center crop {crop}"] if crop else []
    steps += [f"resized to {size}"] if size and not crop else []
    if inputs["mean"]:
        where = " (is inside)" if is_inside else ""
        numbers = f"mean {inputs['mean']}, std {inputs['std']}"
        steps.append(f"pixels from 0 to 1, normalized by {numbers}{where}")
    named = f"\nclasses: {', '.join(classes)}" if classes else ""
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


def read_weights(reader: CheckpointReader, *, average: bool) -> dict[str, Tensor]:
    """Read a model's plain ``state_dict``, or its EMA where there is one."""
    state = read_tensors(reader, MODEL)
    averages = read_tensors(reader, EMA) if average else {}
    # A weight of two names has two equal tensors, and its average the first name.
    first_names = {_identity(state[name]): name for name in averages}
    for name, tensor in state.items() if averages else ():
        of = name if name in averages else first_names.get(_identity(tensor), "")
        if of:
            state[name] = averages[of].clone()
    return state


def read_tensors(reader: CheckpointReader, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix, by the rest."""
    stored = reader.stored(prefix).items()
    found = {name: torch.empty(of.shape, dtype=of.dtype) for name, of in stored}
    reader.load({prefix + name: tensor for name, tensor in found.items()})
    return found


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return digest(tensor), tensor.shape, tensor.dtype


def _write(
    config: ExportConfig, state: dict[str, Tensor], metadata: dict[str, Any], file: Path
) -> None:
    kind = config.format
    if kind == "state_dict":
        torch.save({**state, **metadata["extra_state"]}, file)
    elif kind == "safetensors":
        require("safetensors", "--format safetensors")
        library = importlib.import_module("safetensors.torch")
        library.save_file(state, str(file))
    else:
        model = _rebuild(state, metadata, config.model)
        if config.normalize:
            model = _normalized(model, metadata["trainer"])
        data = _trainer(metadata)["data"]
        size = (2, data["in_channels"], data["image_size"], data["image_size"])
        dtype = next(iter(model.parameters())).dtype
        example = torch.zeros(size, dtype=dtype)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is to go, one day
            if kind == "torchscript":
                trace: Any = torch.jit.trace
                torch.jit.save(trace(model, example), str(file))
            else:
                shapes = ({0: torch.export.Dim.AUTO},)
                program = torch.export.export(model, (example,), dynamic_shapes=shapes)
                with file.open("wb") as opened:
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

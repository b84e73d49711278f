"""`python -m mpitrain export`: write the model of a run to a file, without MPI."""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from tyro.conf import Positional, arg

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
from mpitrain.errors import UsageError
from mpitrain.models.build import build_model
from mpitrain.plugins import is_reference, require

Format = Literal["state_dict", "safetensors", "torchscript", "exported-program"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write the model of a run's newest complete checkpoint to a file."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder, such as runs/NAME, or one of its checkpoints."""
    output: Annotated[Positional[Path], arg(metavar="FILE")]
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


def export(config: ExportConfig) -> str:
    """Write the model; return a line that says what was written."""
    if config.output.is_dir() or not config.output.absolute().parent.is_dir():
        raise UsageError(
            f"{config.output} cannot be written; expected a file in an existing folder"
        )
    checkpoint = choose_checkpoint(config.run, best=config.best)
    reader = CheckpointReader(checkpoint)
    state = read_weights(reader, average=config.average)
    beside = config.output.with_name(f".{config.output.name}.{os.getpid()}")
    try:
        _write(config, state, reader.metadata, beside)
        os.replace(beside, config.output)
    except OSError as error:
        raise UsageError(f"{config.output}: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
    num = sum(tensor.numel() for tensor in state.values())
    return (
        f"{config.output}: {config.format} of {num:,} numbers in {len(state)} tensors, "
        f"from {checkpoint.path}"
    )


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
    state: dict[str, Tensor] = {}
    asked: dict[str, Tensor] = {}
    averages = reader.stored(EMA) if average else {}
    for name, outline in reader.stored(MODEL).items():
        tensor = torch.empty(outline.shape, dtype=outline.dtype)
        state[name] = tensor
        asked[(EMA if name in averages else MODEL) + name] = tensor
    reader.load(asked)
    return state


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


def _trainer(metadata: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] | None = metadata["trainer"]
    if found is None or found["data"] is None:
        raise UsageError(
            "--format: the checkpoint was written by a script; expected state_dict or "
            "safetensors, which need no model"
        )
    return found

"""`python -m mpitrain export`: the model out of a run, without MPI, on any machine."""

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
from mpitrain.checkpoint.reader import CheckpointReader, check
from mpitrain.checkpoint.tensors import EMA, MODEL
from mpitrain.errors import UsageError
from mpitrain.models.build import build_model
from mpitrain.models.fetch import is_own

Format = Literal["state_dict", "safetensors", "torchscript", "exported-program"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Take the model out of a run: its newest whole checkpoint, of any strategy."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder, such as runs/NAME, or one of its checkpoints."""
    output: Annotated[Positional[Path], arg(metavar="FILE")]
    """The file to write, whole or not at all."""
    best: bool = False
    """The checkpoint that is best by the run's --best-by, not the newest."""
    format: Format = "state_dict"
    """state_dict: for torch.load. safetensors. torchscript and
    exported-program (torch.export) hold the model's code, too."""
    model: str | None = None
    """With torchscript and exported-program, for a model of your own or of
    torch.hub: its --model once more, since its code is run."""
    average: bool = True
    """Take the moving average of the weights, where the run kept one."""


def export(config: ExportConfig) -> str:
    """Write the model.

    Args:
        config: Which, and where to.

    Returns:
        What was written, in a line.

    Raises:
        UsageError: There is no whole checkpoint, or the file cannot be written.
        DataError: The model cannot be built or traced.
    """
    if config.output.is_dir() or not config.output.absolute().parent.is_dir():
        raise UsageError(
            f"{config.output} cannot be written; expected the name of a file in a "
            "folder that is there"
        )
    checkpoint = chosen(config.run, best=config.best)
    loader = CheckpointReader(checkpoint)
    state = weights_in(loader, average=config.average)
    beside = config.output.with_name(f".{config.output.name}.{os.getpid()}")
    try:
        _write(config, state, loader.metadata, beside)
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


def chosen(path: Path, *, best: bool) -> Checkpoint:
    """Return a whole checkpoint of a run, or the one that was named.

    Broken ones are left where they are, and told.

    Raises:
        UsageError: There is none.
    """
    if not (path / FOLDER).is_dir():
        named = checkpoint_at(path.absolute())
        check(named)
        return named
    found = list_checkpoints(path.absolute())
    while checkpoint := best_of(found) if best else next(iter(found), None):
        try:
            check(checkpoint)
        except BrokenCheckpoint as broken:
            print(f"warning: {broken}", flush=True)
            found.remove(checkpoint)
        else:
            return checkpoint
    kind = "that was judged" if best else "that is whole"
    raise UsageError(f"{path} has no checkpoint {kind}")


def weights_in(loader: CheckpointReader, *, average: bool) -> dict[str, Tensor]:
    """Read a model's plain ``state_dict``, whole, whatever ranks have written it.

    Args:
        loader: Of its checkpoint.
        average: Whether to take the moving average of weights, where there is one.
    """
    state: dict[str, Tensor] = {}
    asked: dict[str, Tensor] = {}
    averages = loader.tensor_metadata(EMA) if average else {}
    for name, outline in loader.tensor_metadata(MODEL).items():
        tensor = torch.empty(outline.size, dtype=outline.properties.dtype)
        state[name] = tensor
        asked[(EMA if name in averages else MODEL) + name] = tensor
    loader.load(asked)
    return state


def _write(
    config: ExportConfig, state: dict[str, Tensor], facts: dict[str, Any], file: Path
) -> None:
    kind = config.format
    if kind == "state_dict":
        torch.save({**state, **facts["extra_state"]}, file)
    elif kind == "safetensors":
        try:
            library = importlib.import_module("safetensors.torch")
        except ImportError:
            raise UsageError(
                "--format safetensors wants a package that is not here: "
                "pip install safetensors"
            ) from None
        library.save_file(state, str(file))
    else:
        model = _rebuilt(state, facts, config.model)
        data = _trainer(facts)["data"]
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


def _rebuilt(
    state: dict[str, Tensor], facts: dict[str, Any], typed: str | None
) -> nn.Module:
    config, data = _trainer(facts)["config"], _trainer(facts)["data"]
    name = config["model"]
    is_theirs = is_own(name) and name != "convnet"
    if (is_theirs or name.startswith("hub:")) and typed != name:
        raise UsageError(
            f"the run's model is {name!r}, whose code would be run; expected --model "
            f"{name}, if you know it"
        )
    model = build_model(name, seed=config["seed"], **data)
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if torch.float64 in dtypes:
        model = model.double()
    model.load_state_dict({**state, **facts["extra_state"]})
    return model.eval()


def _trainer(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what a training of the command line has saved of itself."""
    found: dict[str, Any] | None = metadata["trainer"]
    if found is None or found["data"] is None:
        raise UsageError(
            "--format: the checkpoint was written by a script; expected state_dict or "
            "safetensors, which need no model"
        )
    return found

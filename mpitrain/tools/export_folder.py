"""Folders of weights for other programs, written tensor by tensor.

huggingface     config.json and safetensors: Transformers' `from_pretrained`, timm's
                ``local-dir:``
dcp             torch.distributed.checkpoint: `load`
"""

from __future__ import annotations

import importlib
import json
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.errors import UsageError

NAMES = {
    getattr(torch, dtype): name
    for dtype, name in (
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16")),
        *(("bfloat16", "BF16"), ("complex64", "C64"), ("bool", "BOOL")),
        *(("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")),
        *(("int64", "I64"), ("int32", "I32"), ("int16", "I16"), ("int8", "I8")),
        *(("uint64", "U64"), ("uint32", "U32"), ("uint16", "U16"), ("uint8", "U8")),
    )
}
"""What safetensors calls them."""


class Weights:
    """The weights of a checkpoint, each read when it is asked for.

    ``sources`` has the names in the checkpoint, by the names of the weights.
    """

    def __init__(self, reader: CheckpointReader, sources: Mapping[str, str]) -> None:
        self._reader, self._sources = reader, sources
        stored = reader.stored("")
        self.stored = {name: stored[of] for name, of in sources.items()}

    def num_bytes(self, name: str) -> int:
        """Return the size of a weight."""
        return self.stored[name].shape.numel() * self.stored[name].dtype.itemsize

    def read(self, name: str) -> Tensor:
        """Read a weight anew."""
        of = self.stored[name]
        tensor = torch.empty(of.shape, dtype=of.dtype)
        self._reader.load({self._sources[name]: tensor})
        return tensor

    def outline(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes and dtypes without memory, by name."""
        return {
            name: torch.empty(of.shape, dtype=of.dtype, device="meta")
            for name, of in self.stored.items()
        }

    def read_all(self) -> dict[str, Tensor]:
        """Read all, by name."""
        return {name: self.read(name) for name in self.stored}


def write_safetensors(file: Path, weights: Weights, names: Iterable[str]) -> None:
    """Write some of the weights in the format of safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start, stored = 0, weights.stored
    # As safetensors does: then each begins at a multiple of the size of its numbers.
    names = sorted(names, key=lambda name: -stored[name].dtype.itemsize)
    for name in names:
        if (dtype := stored[name].dtype) not in NAMES:
            raise UsageError(
                f"{name} is {str(dtype)[6:]}, which safetensors cannot hold; expected "
                "--format state_dict or dcp"
            )
        end = start + weights.num_bytes(name)
        of = {"shape": list(stored[name].shape), "data_offsets": [start, end]}
        header[name] = {"dtype": NAMES[dtype], **of}
        start = end
    encoded = json.dumps(header).encode()
    # The length before it has 8 bytes: so the data begin at a multiple of 8, too.
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            flat = weights.read(name).reshape(-1)
            opened.write(flat.view(torch.uint8).numpy().data)


def write_huggingface(
    folder: Path,
    weights: Weights,
    found: Mapping[str, Any] | None,
    trainer: Mapping[str, Any] | None,
    max_shard_bytes: float,
) -> None:
    """Write ``config.json`` and shards of weights into a folder.

    ``found`` is `model_config` 's, ``trainer`` what a checkpoint has of a `Trainer`.
    """
    if found is None:
        raise UsageError(
            "--format huggingface: the checkpoint has no config: its model is neither "
            "a PreTrainedModel of Transformers nor one of timm. Expected --format "
            "safetensors or dcp"
        )
    is_timm = found["library"] == "timm"
    files = dict(found["files"])
    config = files["config.json"]
    inputs = (trainer or {}).get("inputs") or {}
    classes = inputs.get("classes") or ()
    if is_timm:
        cfg, images = config["pretrained_cfg"], _images(trainer)
        for name in images:  # those of the pretrained weights
            cfg.pop(f"test_{name}", None)
        cfg |= images
        if len(classes) == config["num_classes"]:
            config["label_names"] = classes
    else:
        labels = config.get("id2label") or {}
        has_names = any(it != f"LABEL_{number}" for number, it in labels.items())
        # 2: Transformers' default, which it leaves out.
        if len(classes) == (len(labels) or 2) and not has_names:
            config["id2label"] = dict(enumerate(classes))
            config["label2id"] = {it: number for number, it in enumerate(classes)}
        if processor := _image_processor(inputs, config.get("num_channels", 0)):
            files["preprocessor_config.json"] = processor
        dtypes = [of.dtype for of in weights.stored.values()]
        floats = [dtype for dtype in dtypes if dtype.is_floating_point]
        config["dtype"] = str(floats[0]).removeprefix("torch.")
    # Transformers ties them when it loads; timm wants all names.
    tied = [] if is_timm else found["tied"]
    names = [name for name in weights.stored if name not in tied]
    shards: list[list[str]] = [[]]
    size = 0
    for name in names:
        size += weights.num_bytes(name)
        if shards[-1] and size > max_shard_bytes:
            shards.append([])
            size = weights.num_bytes(name)
        shards[-1].append(name)
    file_of: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        which = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        write_safetensors(folder / f"model{which}.safetensors", weights, part)
        file_of |= dict.fromkeys(part, f"model{which}.safetensors")
    if len(shards) > 1:
        total = {"total_size": sum(map(weights.num_bytes, names))}
        index = {"metadata": total, "weight_map": file_of}
        files["model.safetensors.index.json"] = index
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def _images(trainer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return timm's words for how the run has resized and normalized images."""
    inputs, data = ((trainer or {}).get(name) or {} for name in ("inputs", "data"))
    found: dict[str, Any] = {}
    if data:
        channels, size = data["in_channels"], data["image_size"]
        found["input_size"] = [channels, size, size]
    if data and inputs:
        for name, default in (("mean", 0.0), ("std", 1.0)):
            values = inputs.get(name) or [default]
            found[name] = values * channels if len(values) == 1 else values
    if "resize" in inputs:  # of a task with images
        crop = inputs.get("center_crop")
        found["crop_pct"] = crop / inputs["resize"] if crop else 1.0
        found["crop_mode"] = "center" if crop else "squash"
        found["interpolation"] = "bilinear"
    return found


def _image_processor(inputs: Mapping[str, Any], channels: int) -> dict[str, Any] | None:
    """Return Transformers' form of how the run has resized and normalized images."""
    mean, std = inputs.get("mean"), inputs.get("std")
    if not mean or not std or channels != 3:
        return None
    resize, crop = inputs.get("resize"), inputs.get("center_crop")
    found: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",  # it has all of these steps
        "do_convert_rgb": True,
        "do_resize": bool(resize),
        "resample": 2,  # PIL's number of bilinear
        "do_center_crop": bool(crop),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [*mean] * (channels // len(mean)),
        "image_std": [*std] * (channels // len(std)),
    }
    if resize:
        square = {"height": resize, "width": resize}
        found["size"] = {"shortest_edge": resize} if crop else square
    if crop:
        found["crop_size"] = {"height": crop, "width": crop}
    return found


def write_dcp(folder: Path, weights: Weights, extra_state: Mapping[str, Any]) -> None:
    """Write weights for `torch.distributed.checkpoint.load`, without process group."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    class SavePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        """Plans from shapes alone, and reads a weight when it is written."""

        def lookup_object(self, index: Any) -> Any:
            is_weight = index.fqn in weights.stored
            return (
                weights.read(index.fqn) if is_weight else super().lookup_object(index)
            )

    # A file for each weight: of one file torch holds all until it is written (2.14).
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    state = {**weights.outline(), **extra_state}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=True)
    except dcp.CheckpointException as error:  # it wraps what happened
        raise error.failures[0][0] from None

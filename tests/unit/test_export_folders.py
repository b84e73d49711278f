"""Weights of any type, written for others and read by us one by one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from mpitrain.checkpoint import format, layout
from mpitrain.checkpoint.layout import Checkpoint
from mpitrain.checkpoint.storage import StoredTensor, TensorWriter, local_chunks
from mpitrain.errors import UsageError
from mpitrain.tools.export import ExportConfig, export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CONFIG = {"library": "transformers", "files": {"config.json": {"a": 1}}, "tied": []}


def write(run_dir: Path, tensors: dict[str, Tensor], **metadata: Any) -> Checkpoint:
    """Write the checkpoint of a loop with a model of these tensors."""
    found: dict[str, Any] = {"run": "a", "step": 1, "world_size": 1, "extra_state": {}}
    found |= {"metric": None, "user_state": {}, "trainer": None, **metadata}
    path = run_dir / layout.FOLDER / layout.name_of(1)
    path.parent.mkdir(parents=True)
    writer = TensorWriter(path, metadata=format.encode_json(found))
    tensors = {f"model/{name}": tensor for name, tensor in tensors.items()}
    writer.copy_to_host(local_chunks(tensors))
    index = {name: StoredTensor(it.dtype, it.shape) for name, it in tensors.items()}
    writer.commit(index, [writer.write()])
    return layout.checkpoint_at(path)


def any_tensors() -> dict[str, Tensor]:
    """Types in an order that leaves none where its size wants it."""
    dtypes = (
        *(torch.uint8, torch.bool, torch.float64, torch.int8, torch.bfloat16),
        *(torch.complex64, torch.float16, torch.int64, torch.float8_e4m3fn),
        *(torch.float32, torch.uint16, torch.int32, torch.int16, torch.float8_e5m2),
    )
    found = {str(it)[6:]: torch.arange(15).view(3, 5).to(it) for it in dtypes}
    found["bits"] = torch.rand(3) > 0.5
    return found | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}


@pytest.mark.parametrize("kind", ["safetensors", "huggingface", "dcp"])
def test_weights_of_any_type_come_back(kind: Any, tmp_path: Path) -> None:
    tensors, out = any_tensors(), tmp_path / "out"
    write(tmp_path, tensors, model_config=CONFIG)
    export(ExportConfig(run=tmp_path, output=out, format=kind))
    if kind == "dcp":
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load(found, checkpoint_id=out, no_dist=True)
    else:
        found = load_file(out if kind == "safetensors" else out / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].tolist() == tensor.tolist()


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.complex128)}
    write(tmp_path, tensors, model_config=CONFIG)
    for kind in ("safetensors", "huggingface"):
        with pytest.raises(UsageError, match=r"b is complex128, .* state_dict or dcp"):
            export(ExportConfig(run=tmp_path, output=tmp_path / "x", format=kind))  # type: ignore[arg-type]
    assert [it.name for it in tmp_path.iterdir()] == ["checkpoints"]
    export(ExportConfig(run=tmp_path, output=tmp_path / "x", format="dcp"))


def test_a_size_of_shards_is_for_huggingface_alone(tmp_path: Path) -> None:
    config = ExportConfig(run=tmp_path, output=tmp_path / "x", max_shard_gb=1.0)
    with pytest.raises(UsageError, match="--max-shard-gb: found --format state_dict"):
        export(config)


def test_a_checkpoint_of_before_has_no_config(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(UsageError, match="has no config"):
        export(ExportConfig(run=tmp_path, output=tmp_path / "x", format="huggingface"))


def test_extra_state_is_in_a_folder_of_dcp(tmp_path: Path) -> None:
    extra = {"norm._extra_state": {"steps": 3}}
    write(tmp_path, {"a": torch.ones(2)}, extra_state=extra)
    export(ExportConfig(run=tmp_path, output=tmp_path / "x", format="dcp"))
    state = {"a": torch.zeros(2), "norm._extra_state": {"steps": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "x", no_dist=True)
    assert state["norm._extra_state"] == {"steps": 3}


EXPORTS = """
import re, sys
from pathlib import Path
import torch, torch.distributed.checkpoint
from mpitrain.tools.export import ExportConfig, export

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", status)[1]) / 1000

small, large, kind = sys.argv[1:]
export(ExportConfig(run=Path(small), output=Path(small, "x"), format=kind))
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
export(ExportConfig(run=Path(large), output=Path(large, "x"), format=kind))
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("kind", ["safetensors", "huggingface", "dcp"])
def test_a_model_is_exported_in_a_fraction_of_its_memory(
    kind: str, tmp_path: Path
) -> None:
    """Of 400 MB, in 40 weights."""
    state = {f"{i}.weight": torch.full((2500, 1000), float(i)) for i in range(40)}
    write(tmp_path / "large", state, model_config=CONFIG)
    del state
    write(tmp_path / "small", {"a": torch.ones(2)}, model_config=CONFIG)
    words = (str(tmp_path / "small"), str(tmp_path / "large"), kind)
    done = subprocess.run(
        [sys.executable, "-c", EXPORTS, *words],
        check=True,
        capture_output=True,
        text=True,
    )
    # torch's writer leaves some to the garbage collector.
    assert float(done.stdout) < (200 if kind == "dcp" else 100)


LOADS = """
import re, sys
from pathlib import Path
import torch
from torch import nn
from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import load_model

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", status)[1]) / 1000

model = nn.Sequential(*(nn.Linear(1000, 2500, bias=False) for _ in range(40)))
(checkpoint,) = list_checkpoints(Path(sys.argv[1]))
load_model(CheckpointReader(checkpoint), model)  # what it imports is not the load's
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
load_model(CheckpointReader(checkpoint), model)
print(memory("VmHWM") - before)
assert all(float(it.weight.mean()) == i for i, it in enumerate(model))
"""


def test_a_checkpoint_goes_into_the_model_weight_by_weight(tmp_path: Path) -> None:
    state = {f"{i}.weight": torch.full((2500, 1000), float(i)) for i in range(40)}
    write(tmp_path, state)
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(done.stdout) < 100  # of 400

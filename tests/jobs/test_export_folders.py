"""What `export` writes for Transformers, timm and PyTorch's DCP, read by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from data_files import idx_bytes
from export_jobs import export
from launcher import Mpi, mpirun, slow
from safetensors import safe_open
from torch import Tensor, nn

from mpitrain.errors import UsageError
from mpitrain.models.build import build_and_load, build_model
from mpitrain.models.weight_files import read_state
from mpitrain.models.weights import load_state
from mpitrain.tools.export import ExportConfig
from mpitrain.tools.export import export as write_model

pytestmark = [
    pytest.mark.xdist_group("export-folders"),
    pytest.mark.usefixtures("warm_starts"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

SCRIPT = """
import sys, torch, mpitrain
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

sizes = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2}
torch.manual_seed(1)
model = BertForMaskedLM(BertConfig(
    **sizes, num_hidden_layers=2, intermediate_size=32, hidden_dropout_prob=0.0
))
data = TensorDataset(torch.arange(32 * 6).view(32, 6) % 100, torch.arange(32) % 100)
config = mpitrain.TrainConfig(
    epochs=2, global_batch_size=8, strategy="fsdp", ema_decay=0.5
)

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(
        outputs.logits[:, 0], targets, reduction="none"
    )

with mpitrain.init(device="cpu"):
    trainer = mpitrain.Trainer(
        model, data, None, config, loss=loss,
        callbacks=mpitrain.default_callbacks("runs/bert", config),
    )
    trainer.fit()
    # Loops of one's own, one with a model of no library.
    own = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).double()
    mpitrain.Checkpointer("runs/own").save(1, model=own)
    loop = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_head=2, n_layer=1))
    mpitrain.Checkpointer("runs/loop").save(1, model=DistributedDataParallel(loop))
"""


@pytest.fixture(scope="module")
def folder(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks: BERT by FSDP with EMA, a model of no library, one of timm."""
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    made = tmp_path_factory.mktemp("folders")
    (made / "script.py").write_text(SCRIPT)
    raw = made / "MNIST/raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, num in (("train", 64), ("t10k", 32)):
        images, labels = random.integers(0, 90, (num, 28, 28)), np.arange(num) % 10
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (raw / f"{part}-{name}-ubyte").write_bytes(idx_bytes(array))
    vit = ("--model", "timm:test_vit", "--image-size", "32", "--epochs", "1")
    data = ("--data", "mnist", "--data-dir", ".", "--global-batch-size", "32")
    more = ("--name", "vit", "--device", "cpu")
    script = ("run", "--device", "cpu", "script.py")
    for words in (script, (*vit, *data, *more)):
        done = mpirun(
            openmpi, 2, "-m", "mpitrain", *words, cwd=made, timeout_seconds=400
        )
        assert done.status == 0, done.out + done.err
    return made


def exported(folder: Path, run: str, name: str, kind: str, **more: Any) -> Path:
    out = folder / name
    config = ExportConfig(run=folder / run, output=out, format=kind, **more)  # type: ignore[arg-type]
    assert write_model(config).startswith(f"{out}: {kind} of ")
    assert not list(folder.glob(".*"))
    return out


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(2, 6)).logits  # type: ignore[no-any-return]


def trained(folder: Path) -> dict[str, Tensor]:
    """The weights of the run of BERT, averages."""
    state: dict[str, Tensor] = torch.load(
        folder / "runs/bert/model.pt", weights_only=True
    )
    return state


@pytest.mark.parametrize("max_shard_gb", [None, 0.00001])
def test_transformers_builds_the_model_from_the_folder(
    max_shard_gb: float | None, folder: Path
) -> None:
    import transformers

    more = {"max_shard_gb": max_shard_gb} if max_shard_gb else {}
    name = f"hf-{max_shard_gb}"
    out = exported(folder, "runs/bert", name, "huggingface", **more)
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(model) is transformers.BertForMaskedLM
    expected = trained(folder)
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    files = sorted(out.glob("*.safetensors"))
    names = [name for it in files for name in safe_open(it, "pt").keys()]  # noqa: SIM118
    # Of the two tied weights each is written once.
    assert len(names) == len(set(names)) == len(expected) - 2
    if max_shard_gb:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(names)
        assert index["metadata"]["total_size"] == sum(
            expected[name].nbytes for name in names
        )
        assert len(files) > 2
        for it in files:
            with safe_open(it, "pt") as opened:
                held = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert len(held) == 1 or sum(held) <= 10_000
    else:
        assert [it.name for it in files] == ["model.safetensors"]
    # And by us.
    ours = transformers.BertForMaskedLM(model.config)
    assert "new" not in load_state(ours, read_state(out)[0], "hf")
    assert torch.equal(logits(ours), logits(model))


def test_timm_builds_the_model_from_the_folder(folder: Path) -> None:
    import timm

    out = exported(folder, "runs/vit", "timm", "huggingface")
    model = timm.create_model(f"local-dir:{out}", pretrained=True)
    sizes: dict[str, Any] = {"num_classes": 10, "in_channels": 1, "image_size": 32}
    source = build_model("timm:test_vit", seed=5, **sizes)
    source.load_state_dict(torch.load(folder / "runs/vit/model.pt", weights_only=True))
    images = torch.rand(3, 1, 32, 32)
    with torch.no_grad():
        expected = source.eval()(images)
        assert torch.equal(model.eval()(images), expected)
        ours = build_and_load("timm:test_vit", seed=6, weights=str(out), **sizes)[0]
        assert torch.equal(ours.eval()(images), expected)
    inputs = json.loads((folder / "runs/vit/inputs.json").read_text())
    config = timm.data.resolve_model_data_config(model)
    assert inputs["mean"][0] < 0.3
    assert [*config["mean"]] == pytest.approx(inputs["mean"])
    assert [*config["std"]] == pytest.approx(inputs["std"])
    assert tuple(config["input_size"]) == (1, 32, 32)
    assert config["crop_pct"] == 1.0
    named = json.loads((out / "config.json").read_text())["label_names"]
    assert named == inputs["classes"]


def test_a_model_of_a_custom_loop_has_its_config_too(folder: Path) -> None:
    import transformers

    out, file = exported(folder, "runs/loop", "gpt", "huggingface"), folder / "state.pt"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    write_model(ExportConfig(run=folder / "runs/loop", output=file))
    state = torch.load(file, weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert (out / "generation_config.json").exists()


def test_a_model_without_a_config_names_the_other_formats(folder: Path) -> None:
    config = ExportConfig(
        run=folder / "runs/own", output=folder / "x", format="huggingface"
    )
    words = "the checkpoint has no config.*--format safetensors or dcp"
    with pytest.raises(UsageError, match=f"(?s)--format huggingface: {words}"):
        write_model(config)
    assert not list(folder.glob("*x*"))


def test_torch_loads_the_folder_of_dcp(folder: Path) -> None:
    out = exported(folder, "runs/own", "dcp", "dcp")
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double()
    expected = {name: it.clone() for name, it in model.state_dict().items()}
    state = model.state_dict()
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert not torch.equal(state["0.weight"], expected["0.weight"])
    ours = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double()
    assert load_state(ours, read_state(out)[0], "dcp") == "7 tensors"
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    # Tied weights have all names here: torch asks for them.
    out = exported(folder, "runs/bert", "bert-dcp", "dcp")
    found = {name: torch.zeros_like(it) for name, it in trained(folder).items()}
    dcp.load(found, checkpoint_id=out, no_dist=True)
    for name, tensor in trained(folder).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["huggingface", slow("dcp")])
def test_a_disk_that_is_full_leaves_nothing(kind: str, folder: Path) -> None:
    done = export(folder, "runs/bert", "full", "--format", kind, max_bytes=5_000)
    assert done.returncode == 2
    assert "full: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("*full*"))
    (folder / "there").mkdir(exist_ok=True)
    done = export(folder, "runs/bert", "there", "--format", kind)
    assert done.returncode == 2
    assert "there cannot be written; expected the name of a new folder" in done.stderr

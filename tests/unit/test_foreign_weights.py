"""Weights that Lightning, Transformers, timm and PyTorch's DCP wrote, read by us."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mpitrain.checkpoint import resume
from mpitrain.errors import DataError, UsageError
from mpitrain.models.build import build_and_load
from mpitrain.models.weight_files import read_state
from mpitrain.models.weights import load_state

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def load(model: nn.Module, path: Path) -> str:
    return load_state(model, read_state(path)[0], str(path))


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_lightnings_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, where: Path, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = network(1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    data = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    net = Net(tmp_path, 8)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(net, DataLoader(data, 8))
    (file,) = tmp_path.rglob("epoch=0-*.ckpt")
    model = network(2)
    assert load(model, file) == "9 tensors; those whose names begin with net."
    inputs = torch.randn(5, 4)
    assert torch.equal(model.eval()(inputs), net.net.eval()(inputs))


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(6) + index
        return {"input_ids": ids, "labels": torch.tensor(index % 2)}


def language_model(kind: str, seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"vocab_size": 100, "hidden_size": 16, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(
        **sizes, num_hidden_layers=2, intermediate_size=32
    )
    return getattr(transformers, kind)(config)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(2, 6)).logits  # type: ignore[no-any-return]


def test_the_checkpoint_of_transformers_trainer(tmp_path: Path) -> None:
    source = language_model("BertForSequenceClassification", 1)
    import transformers

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    transformers.Trainer(source, args, train_dataset=Sentences()).train()
    (folder,) = tmp_path.glob("checkpoint-2")
    model = language_model("BertForSequenceClassification", 2)
    load(model, folder)
    assert torch.equal(logits(model), logits(source))


def test_weights_of_8_bits_are_read_in_the_model_s_dtype(tmp_path: Path) -> None:
    source = language_model("BertForSequenceClassification", 1)
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): it  # an older name
        for name, it in source.state_dict().items()
    }
    name = "bert.pooler.dense.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    torch.save(state, tmp_path / "a.pt")
    model = language_model("BertForSequenceClassification", 2)
    load(model, tmp_path / "a.pt")
    assert torch.equal(model.state_dict()[name], state[name].float())
    torch.save({"qweight": torch.zeros(2, dtype=torch.int32)}, tmp_path / "b.pt")
    with pytest.raises(DataError, match="missing") as raised:
        load(model, tmp_path / "b.pt")
    assert "could not fit" not in str(raised.value)


@pytest.mark.parametrize("words", ["folder", "index"])
def test_several_shards_of_transformers_with_tied_weights(
    words: str, tmp_path: Path
) -> None:
    source = language_model("BertForMaskedLM", 1)
    source.save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values())
    assert len(names) > 2
    model = language_model("BertForMaskedLM", 2)
    line = load(model, index if words == "index" else tmp_path)
    assert "new" not in line
    assert torch.equal(logits(model), logits(source))
    (tmp_path / min(names)).unlink()
    with pytest.raises(DataError, match=rf"{min(names)} is missing, which the index"):
        load(model, tmp_path)


def test_shards_of_pytorch_files(tmp_path: Path) -> None:
    source = network(1)
    names = list(source.state_dict())
    for number, part in enumerate((names[:4], names[4:])):
        state = {name: source.state_dict()[name] for name in part}
        torch.save(state, tmp_path / f"pytorch_model-{number}.bin")
    model = network(2)
    assert load(model, tmp_path) == "9 tensors"
    assert torch.equal(model.eval()(torch.ones(2, 4)), source.eval()(torch.ones(2, 4)))
    torch.save({names[0]: torch.zeros(8, 4)}, tmp_path / "pytorch_model-2.bin")
    with pytest.raises(DataError, match=rf"{names[0]} in two files, one of them"):
        load(model, tmp_path)


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_folder_of_timm(is_safe: bool, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(1)
    source = timm.create_model("test_vit", num_classes=7, img_size=32)
    timm.models.save_for_hf(source, str(tmp_path), safe_serialization=is_safe)
    model, line = build_and_load(
        "timm:test_vit",
        num_classes=7,
        in_channels=3,
        image_size=32,
        seed=2,
        weights=str(tmp_path),
    )
    num = len(source.state_dict())
    assert line == f"weights from {tmp_path}: {num} tensors"
    inputs = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(inputs), source.eval()(inputs))


DCP_ON_TWO_RANKS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.randn(6, 4)).square().mean().backward()
optimizer.step()
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
forms = {"flat": states["model"], "nested": states, "tutorial": {"app": states}}
for name, state in forms.items():
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/{name}")
whole = {k: getattr(v, "full_tensor", lambda: v)() for k, v in states["model"].items()}
if dist.get_rank() == 0:
    torch.save(whole, f"{sys.argv[1]}/whole.pt")
dist.destroy_process_group()
"""


def test_folders_that_two_ranks_wrote_by_dcp(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(DCP_ON_TWO_RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [sys.executable, *words, str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    source = network(3)
    source.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    for form in ("flat", "nested", "tutorial"):
        model, inputs = network(2), torch.ones(2, 4)
        assert len(list((tmp_path / form).glob("*.distcp"))) == 2
        assert load(model, tmp_path / form) == "9 tensors"
        assert torch.equal(model.eval()(inputs), source.eval()(inputs))


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


def test_code_in_a_folder_of_dcp_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Beside the weights: what it pickled is not read.
    dcp.save({**network(1).state_dict(), "epoch": Hostile()}, checkpoint_id="a")
    load(network(2), tmp_path / "a")
    (tmp_path / "a/.metadata").write_bytes(pickle.dumps(Metadata({}, Hostile())))
    with pytest.raises(DataError, match=r"not opened: \.metadata wants posix\.system"):
        read_state(tmp_path / "a")
    (tmp_path / "a/.metadata").write_bytes(b"\x80nothing")
    with pytest.raises(DataError, match=r"\.metadata cannot be read"):
        read_state(tmp_path / "a")
    assert not (tmp_path / "PWNED").exists()


def test_bytes_in_place_of_a_weight_are_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = network(1).state_dict()
    dcp.save({**state, "0.bias": Hostile()}, checkpoint_id="a", no_dist=True)
    file = tmp_path / "a/.metadata"
    metadata = pickle.loads(file.read_bytes())
    # Its description says that it is bytes, and has what that of a weight has.
    of = metadata.state_dict_metadata["0.bias"]
    vars(of).update(vars(metadata.state_dict_metadata["1.bias"]))
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=r"missing \(0\.bias\)"):
        load(network(2), tmp_path / "a")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("how", ["cut", "hostile", "gone"])
def test_a_weight_that_cannot_be_read_from_a_folder_of_dcp(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save(network(1).state_dict(), checkpoint_id="a", no_dist=True)
    (file,) = (tmp_path / "a").glob("*.distcp")
    size = file.stat().st_size
    if how == "gone":
        file.unlink()
    else:
        code = pickle.dumps(Hostile()) if how == "hostile" else b""
        file.write_bytes(code.ljust(size if code else 9, b"."))
    with pytest.raises(DataError, match=r"--weights a: 0\.weight cannot be read"):
        load(network(2), Path("a"))
    assert not (tmp_path / "PWNED").exists()


LOADS = """
import re, sys
from pathlib import Path
import torch, torch.distributed.checkpoint
from torch import nn
from mpitrain.models.weight_files import read_state
from mpitrain.models.weights import load_state

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", status)[1]) / 1000

model = nn.Sequential(*(nn.Linear(1000, 3125, bias=False) for _ in range(32)))
small = {"0.weight": torch.ones(3125, 1000)}
load_state(nn.Sequential(nn.Linear(1000, 3125, bias=False)), small, "warm")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before, anonymous = memory("VmRSS"), memory("RssAnon")
state = read_state(Path(sys.argv[1]))[0]
load_state(model, state, "file")
print(memory("VmHWM") - before, memory("RssAnon") - anonymous)
assert all(float(it.weight.mean()) == i for i, it in enumerate(model))
"""


@pytest.mark.parametrize("kind", ["safetensors", "dcp", "pt"])
def test_weights_go_into_the_model_one_by_one(kind: str, tmp_path: Path) -> None:
    """400 MB into a model of 400 MB, with less than half of that on top."""
    folder = tmp_path / "a"
    folder.mkdir()
    try:
        state = {f"{i}.weight": torch.full((3125, 1000), float(i)) for i in range(32)}
        if kind == "pt":
            torch.save(state, folder / "pytorch_model.bin")
        elif kind == "dcp":
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        else:
            for number in range(4):
                names = list(state)[number::4]
                part = {name: state[name] for name in names}
                save_file(part, folder / f"model-{number}.safetensors")
        del state
        done = subprocess.run(
            [sys.executable, "-c", LOADS, str(folder)],
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder)
    peak, anonymous = map(float, done.stdout.split())
    # What torch has mapped of a file counts as resident until the system wants it back.
    # Mostly it is two to eight tensors of 12.5 MB; as the memory is given back, more.
    assert (anonymous if kind == "pt" else peak) < 200


def test_another_program_s_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "epoch": 3}, file)
    with pytest.raises(UsageError, match=rf"--weights {file} loads the weights$"):
        resume._named(file, tmp_path / "runs/mine")
    with pytest.raises(UsageError, match=r"step-00000120$"):
        resume._named(tmp_path / "nothing", tmp_path / "runs/mine")

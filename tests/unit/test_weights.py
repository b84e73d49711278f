"""Files of weights: into which models they go, and which are refused."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.build import build_and_load, build_model
from mpitrain.models.weight_files import read_state
from mpitrain.models.weights import load_state

SIZES: dict[str, Any] = {"num_classes": 7, "in_channels": 3, "image_size": 32}
LARGE = pytest.param("vit_b_32", marks=pytest.mark.slow)


def build(name: str, file: Path, **sizes: int) -> tuple[nn.Module, str]:
    model, loaded = build_and_load(name, **SIZES | sizes, seed=1, weights=str(file))
    assert loaded is not None
    return model, loaded


def state_of(name: str, **sizes: int) -> dict[str, Tensor]:
    return build_model(name, **SIZES | sizes, seed=8).state_dict()


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    mine = model.state_dict()
    return mine.keys() == state.keys() and all(
        torch.equal(mine[k], state[k]) for k in mine
    )


@pytest.mark.parametrize(
    "name",
    [
        *("convnet", "resnet18", "mnasnet0_5", "densenet121"),
        *("timm:test_vit", "timm:test_resnet", LARGE),
    ],
)
def test_weights_come_back_as_they_were_saved(name: str, tmp_path: Path) -> None:
    state = state_of(name)
    torch.save(dict(state), tmp_path / "model.pt")  # as a run's end does
    model, loaded = build(name, tmp_path / "model.pt")
    assert same(model, state)
    assert loaded == f"weights from {tmp_path}/model.pt: {len(state)} tensors"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "key",
    [
        *(None, "model", "state_dict", "model_state_dict", "model_ema", "module"),
        *("model_state", "MODEL_STATE"),  # NERSC's and PyTorch's own examples
    ],
)
def test_wrappers_and_checkpoints_around_weights_are_taken_off(
    prefix: str, key: str | None, tmp_path: Path
) -> None:
    state = state_of("convnet")
    wrapped: Any = {prefix + name: value for name, value in state.items()}
    torch.save({key: wrapped, "epoch": 3} if key else wrapped, tmp_path / "a.pth")
    model, _ = build("convnet", tmp_path / "a.pth")
    assert same(model, state)


def test_safetensors_are_read(tmp_path: Path) -> None:
    state = state_of("convnet")
    save_file(state, tmp_path / "model.safetensors")
    model, _ = build("convnet", tmp_path / "model.safetensors")
    assert same(model, state)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("resnet18", "fc"), ("timm:test_vit", "head")),
        pytest.param("vit_b_32", "heads.head", marks=pytest.mark.slow),
    ],
)
def test_another_number_of_classes_leaves_the_head_out(
    name: str, head: str, tmp_path: Path
) -> None:
    state = state_of(name, num_classes=9)
    torch.save(state, tmp_path / "a.pt")
    model, loaded = build(name, tmp_path / "a.pt")
    assert loaded.endswith(f" tensors; {head} new (7 classes instead of 9)")
    mine = model.state_dict()
    assert all(
        torch.equal(mine[k], state[k]) for k in mine if not k.startswith(head + ".")
    )
    fresh = build_model(name, **SIZES, seed=1).state_dict()
    for part in (f"{head}.weight", f"{head}.bias"):
        assert torch.equal(mine[part], fresh[part])


@pytest.mark.parametrize(("before", "now"), [(3, 1), (1, 3), (3, 5), (4, 2)])
def test_other_channels_adapt_the_first_filters(
    before: int, now: int, tmp_path: Path
) -> None:
    state = state_of("resnet18", in_channels=before)
    torch.save(state, tmp_path / "a.pt")
    model, loaded = build("resnet18", tmp_path / "a.pt", in_channels=now)
    assert loaded.endswith(f"; conv1.weight from {before} channels to {now}")
    conv: Any = model.conv1
    old = state["conv1.weight"]
    if now == 1:
        expected = old.sum(1, keepdim=True)
    else:
        expected = old.repeat(1, 5, 1, 1)[:, :now] * (before / now)
    torch.testing.assert_close(conv.weight.detach(), expected)


@pytest.mark.parametrize("name", [LARGE, "timm:test_vit"])
def test_position_embeddings_follow_the_image_size(name: str, tmp_path: Path) -> None:
    torch.save(state_of(name, image_size=64), tmp_path / "a.pt")
    model, _ = build(name, tmp_path / "a.pt", image_size=96)
    assert model(torch.rand(1, 3, 96, 96)).shape == (1, 7)


def test_old_names_of_densenet_are_understood(tmp_path: Path) -> None:
    state = state_of("densenet121")
    old = {
        k.replace("norm1", "norm.1").replace("conv2", "conv.2"): v
        for k, v in state.items()
    }
    assert old.keys() != state.keys()
    torch.save(old, tmp_path / "a.pt")
    model, _ = build("densenet121", tmp_path / "a.pt")
    assert same(model, state)


def test_parts_that_the_model_does_not_have_are_told(tmp_path: Path) -> None:
    state = state_of("resnet18")
    extra = {"decoder.0.weight": torch.zeros(1), "aux.bias": torch.zeros(1)}
    torch.save({**state, **extra}, tmp_path / "a.pt")
    _, loaded = build("resnet18", tmp_path / "a.pt")
    assert loaded.endswith("; 2 not used (decoder.0.weight, aux.bias)")


@pytest.mark.parametrize(
    ("theirs", "mine", "words"),
    [
        (
            "resnet34",
            "resnet18",
            r"\d+ that have no place in it \(layer1.2.conv1.weight",
        ),
        ("resnet18", "resnet34", r"80 missing \(layer1.2.conv1.weight"),
        ("resnet50", "resnet18", r"weight \(64, 64, 1, 1\), expected \(64, 64, 3, 3\)"),
        ("convnet", "resnet18", "missing"),
        ("timm:test_resnet", "timm:test_vit", "missing"),
    ],
)
def test_weights_of_another_architecture_are_refused(
    theirs: str, mine: str, words: str, tmp_path: Path
) -> None:
    torch.save(state_of(theirs), tmp_path / "a.pt")
    with pytest.raises(DataError, match=words) as caught:
        build(mine, tmp_path / "a.pt")
    assert f"weights from {tmp_path}/a.pt are not those of this" in str(caught.value)


def test_weights_that_are_refused_change_nothing(tmp_path: Path) -> None:
    model = build_model("resnet18", **SIZES, seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(DataError):
        load_state(model, state_of("resnet34"), "resnet34")
    assert same(model, before)


def test_the_image_size_of_convnet_is_part_of_its_weights(tmp_path: Path) -> None:
    torch.save(state_of("convnet", image_size=8), tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"hidden.weight \(40, 512\), expected"):
        build("convnet", tmp_path / "a.pt")


class Noted(nn.Module):
    """Has state besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.note = {"version": 1}

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state


def test_state_that_is_no_tensor_is_loaded_too(tmp_path: Path) -> None:
    saved = Noted()
    saved.note = {"version": 2}
    torch.save(saved.state_dict(), tmp_path / "a.pt")
    model = Noted()
    load_state(model, read_state(tmp_path / "a.pt")[0], "a.pt")
    assert model.note == {"version": 2}


def beside_weights() -> dict[str, Any]:
    """What scripts of timm, torchvision, DeiT, Lightning and others save, too."""
    return {
        "args": argparse.Namespace(lr=0.1, data=Path("/data"), betas=(0.9, 0.95)),
        "metric": np.float64(81.5),
        "best": np.float32(0.5),
        "epoch": np.int64(3),
        "history": defaultdict(list, top1=[np.float64(1.0)]),
        "hyper_parameters": {"data_dir": Path("data"), "mean": np.zeros(3)},
        "rng": np.random.RandomState(1).get_state(),
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_training_scripts_save_beside_the_weights_is_left_out(
    is_zip: bool, tmp_path: Path
) -> None:
    state = state_of("convnet")
    content = {"state_dict": state, **beside_weights()}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    assert same(build("convnet", tmp_path / "a.pt")[0], state)
    for name, value in content.items():
        if name != "state_dict":
            torch.save({"model": state, name: value}, tmp_path / "b.pt")
            assert same(build("convnet", tmp_path / "b.pt")[0], state)


def test_a_harmless_class_of_a_file_is_not_called(tmp_path: Path) -> None:
    """Its arguments may be made to break it: numpy trusts the state of a dtype."""

    class Argument:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, ("no such type", "at all", 1, 2)

    state = state_of("convnet")
    torch.save({"model": state, "metric": Argument()}, tmp_path / "a.pt")
    assert same(build("convnet", tmp_path / "a.pt")[0], state)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_averages_are_taken_before_the_raw_weights_and_said(
    key: str, tmp_path: Path
) -> None:
    state = state_of("convnet")
    raw = {name: value + 1 for name, value in state.items()}
    other = {"state_dict_ema": "state_dict", "model_ema": "model"}[key]
    torch.save({other: raw, key: state, "epoch": 1}, tmp_path / "a.pt")
    model, loaded = build("convnet", tmp_path / "a.pt")
    assert same(model, state)
    assert loaded == f"weights from {tmp_path}/a.pt, averages ({key}): 8 tensors"


@pytest.mark.parametrize("key", ["state_dict_ema", "params", "teacher"])
def test_weights_under_other_programs_keys_are_found(key: str, tmp_path: Path) -> None:
    state = state_of("convnet")
    torch.save({key: state}, tmp_path / "a.pt")
    assert same(build("convnet", tmp_path / "a.pt")[0], state)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("convnet", "net."),
        ("resnet18", "module.encoder_q."),
        ("resnet18", "model.student.backbone."),
        ("timm:test_vit", "visual."),
    ],
)
def test_a_prefix_before_all_weights_of_the_model_is_taken_off_and_said(
    name: str, prefix: str, tmp_path: Path
) -> None:
    state = state_of(name)
    wrapped = {prefix + key: value for key, value in state.items()}
    others = {f"module.encoder_k.{key}": value + 1 for key, value in state.items()}
    torch.save({"state_dict": {**wrapped, **others}}, tmp_path / "a.pt")
    model, loaded = build(name, tmp_path / "a.pt")
    assert same(model, state)
    assert f"; those whose names begin with {prefix}; " in loaded
    assert "not used (module.encoder_k." in loaded


def test_a_torchscript_program_is_answered_with_state_dict(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"is a TorchScript program; expected a state"):
        read_state(tmp_path / "a.pt")


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


@pytest.mark.parametrize(
    "write", [torch.save, lambda o, p: p.write_bytes(pickle.dumps(o, 2))]
)
def test_a_file_with_code_in_it_is_not_opened(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write({"model": Hostile()}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"not opened: it wants posix\.system") as it:
        read_state(tmp_path / "a.pt")
    assert "torch.save(model.state_dict()" in str(it.value)
    assert not (tmp_path / "PWNED").exists()


def test_a_whole_pickled_model_is_answered_with_state_dict(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"torch\.nn\S+\.Linear of Python"):
        read_state(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_told_with_its_size(
    suffix: str, share: float, tmp_path: Path
) -> None:
    file = tmp_path / f"a{suffix}"
    write: Any = save_file if suffix == ".safetensors" else torch.save
    write(state_of("convnet"), file)
    whole = file.read_bytes()
    part = whole[: int(len(whole) * share)]
    file.write_bytes(part)
    with pytest.raises(DataError) as caught:
        read_state(file)
    assert f"{len(part):,} bytes" in str(caught.value)


def test_a_text_file_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("hello, this is not a checkpoint at all")
    with pytest.raises(DataError, match="has 38 bytes, and is not a file of weights"):
        read_state(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"epoch": 3, "best": 0.5},
            "found a dict with epoch, best; expected a state_dict",
        ),
        (
            {"epoch": 3, "my_net": {"fc.weight": torch.zeros(3)}},
            "found a dict with epoch, my_net; .* one of the keys .*model_state",
        ),
        ([1, 2], "found a list"),
        (torch.zeros(3), "found a Tensor"),
        ({}, "found a dict with nothing"),
    ],
)
def test_a_file_without_weights_is_told_what_it_holds(
    content: object, words: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DataError, match=words):
        read_state(tmp_path / "a.pt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/model.pt' is not there, seen from"):
        read_state(tmp_path / "no/model.pt")
    with pytest.raises(UsageError, match="is a folder without weights; expected"):
        read_state(tmp_path)

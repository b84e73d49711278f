"""Models by name, built for the data: classes, channels and image size."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models import torchvision
from mpitrain.models.build import build_and_load, build_model, fetch_weights, is_cached
from mpitrain.models.layers import head_of
from mpitrain.models.summary import summary_line, summary_table

NAMES = torchvision.names()
SEVEN = {"num_classes": 7, "in_channels": 1, "image_size": 224, "seed": 0}


@pytest.fixture
def torch_home(tmp_path: Path) -> Iterator[Path]:
    """Give torch a cache of its own."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    yield tmp_path
    torch.hub.set_dir(before)


@contextmanager
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build on torch's device `meta`; regnet alone needs numbers to know its shape."""
    regnet = importlib.import_module("torchvision.models.regnet")
    real = regnet.BlockParams.from_init_params

    def on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return real(*args, **kwargs)

    monkeypatch.setattr(regnet.BlockParams, "from_init_params", on_the_cpu)
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnext50_32x4d"])
def test_first_gradients_of_residual_networks_are_of_moderate_norm(name: str) -> None:
    model = build_model(name, num_classes=10, in_channels=3, image_size=32, seed=1)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(20, 3, 32, 32, generator=generator)
    nn.functional.cross_entropy(model(images), torch.arange(20) % 10).backward()
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 20


@pytest.mark.parametrize("name", NAMES)
def test_every_model_of_torchvision_fits_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with without_numbers(monkeypatch):
        model = build_model(name, **SEVEN)
        scores = model.train()(torch.zeros(2, 1, 224, 224))
    assert scores.shape == (2, 7)
    name_of_head, head = head_of(model)
    assert head.weight.shape[0] == 7, name_of_head


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("resnet18", 1, 8),
        ("resnet18", 3, 64),
        ("mobilenet_v3_small", 5, 32),
        ("vit_b_32", 2, 32),
        ("googlenet", 3, 33),
        ("timm:test_vit", 1, 32),
        ("timm:test_resnet", 4, 28),
        ("timm:vit_tiny_patch16_224", 1, 32),
        ("timm:deit_tiny_distilled_patch16_224", 1, 32),
    ],
)
def test_a_built_model_trains(name: str, channels: int, size: int) -> None:
    model = build_model(
        name, num_classes=7, in_channels=channels, image_size=size, seed=1
    )
    model(torch.rand(2, channels, size, size)).sum().backward()
    assert all(p.grad is not None for p in head_of(model)[1].parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["convnet", "resnet18", "timm:test_vit"])
def test_the_seed_alone_gives_the_weights(name: str) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.rand(seed + len(states))  # whatever was drawn before
        model = build_model(
            name, num_classes=3, in_channels=1, image_size=16, seed=seed
        )
        states.append(model.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert not all(torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_new_filters_deviate_so_that_the_output_is_as_before() -> None:
    three = build_model("resnet18", **SEVEN | {"in_channels": 3})
    twelve = build_model("resnet18", **SEVEN | {"in_channels": 12})
    ratio = (three.conv1.weight.std() / twelve.conv1.weight.std()).item()
    assert ratio == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("vgg11", 8, "of 8x8 pixels .*too small.*--image-size 32"),
        ("inception_v3", 28, "--image-size 96"),
        ("vit_b_16", 8, "--image-size 32"),
        ("vit_h_14", 32, "--image-size 224"),
        ("maxvit_t", 256, "--image-size 224"),
        ("timm:vit_tiny_patch16_224", 8, "made for 224x224: --image-size 224"),
        ("timm:inception_v3", 28, "made for 299x299: --image-size 299"),
    ],
)
def test_an_image_too_small_is_named_with_the_size_that_would_do(
    name: str, size: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build_model(name, **SEVEN | {"image_size": size})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet19", "'resnet19' is not known. Did you mean 'resnet18'?"),
        ("zzzzzz", "is not known. Expected convnet, a classification model"),
        ("timm:resnet19", "timm has no model 'resnet19'. Did you mean 'resnet18'?"),
        ("timm:test_vit.nope", "'nope': no such file.* one of default, r160_in1k"),
        ("examples/custom_model.py:A", "Did you mean 'examples.custom_model:A'?"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("hub:nowhere", "expected hub:OWNER/NAME:ENTRY"),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_model(name, **SEVEN)


def test_timm_that_is_not_there_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[timm\]'"):
        build_model("timm:resnet18", **SEVEN)


def no_classes(in_channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 1))


def test_data_without_classes_wants_a_model_of_ones_own() -> None:
    sizes: dict[str, Any] = {"in_channels": 1, "image_size": 4, "seed": 0}
    model = build_model(f"{__name__}:no_classes", num_classes=None, **sizes)
    assert model(torch.zeros(2, 1, 4, 4)).shape == (2, 1)
    for name in ("convnet", "resnet18", "timm:test_vit"):
        with pytest.raises(UsageError, match="needs classes, and the data has none"):
            build_model(name, num_classes=None, **sizes)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mpitrain.config", {"torch"}),
        ("mpitrain.models.build", {"torchvision", "timm"}),
    ],
)
def test_nothing_is_imported_before_a_model_wants_it(
    module: str, forbidden: set[str]
) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert not forbidden & set(done.stdout.split())


@pytest.mark.parametrize("weights", ["default", "IMAGENET1K_V1"])
def test_weights_of_torchvision_come_from_its_cache(
    weights: str, torch_home: Path
) -> None:
    assert not is_cached("resnet18", weights)
    theirs = build_model("resnet18", **SEVEN | {"num_classes": 1000, "in_channels": 3})
    torch.save(theirs.state_dict(), torch_home / "checkpoints/resnet18-f37072fd.pth")
    assert is_cached("resnet18", weights)
    fetch_weights("resnet18", weights)
    model, loaded = build_and_load("resnet18", **SEVEN | {"seed": 9}, weights=weights)
    assert loaded is not None
    assert loaded == (
        f"weights from resnet18 {weights}: 120 tensors; "
        "conv1.weight from 3 channels to 1; fc new (7 classes instead of 1000)"
    )
    assert torch.equal(model.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    summed = theirs.conv1.weight.sum(1, keepdim=True)
    assert torch.equal(model.conv1.weight, summed)


def test_weights_that_cannot_be_downloaded_say_how_to_fetch_them(
    torch_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_internet(*_args: object, **_kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_internet)
    command = "python -m mpitrain fetch resnet18 --weights default"
    for ask in (fetch_weights, lambda n, w: build_and_load(n, **SEVEN, weights=w)):
        with pytest.raises(DataError, match=command) as caught:
            ask("resnet18", "default")
        assert "Name or service not known" in str(caught.value)
        assert "TORCH_HOME" in str(caught.value)
        assert not list(torch_home.rglob("*.pth"))


@pytest.mark.parametrize(
    ("name", "weights", "words"),
    [
        ("resnet18", "nope", "resnet18 one of default, IMAGENET1K_V1"),
        ("mnasnet0_5", "IMAGENET1K_V7", "mnasnet0_5 has no weights of that name"),
        ("convnet", "default", "expected a file, such as runs/NAME/model.pt"),
        ("a.b:c", "default", "--model a.b:c has no weights of that name"),
        ("timm:test_vit", "nope", "one of default, r160_in1k"),
        ("timm:test_vit4", "missing.pt", "'missing.pt' is not there, seen from"),
        ("convnet", "/tmp", "'/tmp' is a folder"),
    ],
)
def test_weights_that_there_are_not_are_refused(
    name: str, weights: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        build_and_load(name, **SEVEN, weights=weights)


def test_weights_of_timm_come_from_the_cache_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--timm--test_vit.r160_in1k"
    snapshot = repository / "snapshots" / "abc"
    name = "timm:test_vit"
    assert not is_cached(name, "default")
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    theirs = build_model(
        name, num_classes=1000, in_channels=3, image_size=160, seed=3
    ).state_dict()
    save_file(theirs, snapshot / "model.safetensors")
    assert is_cached(name, "default")
    assert is_cached(name, "r160_in1k")
    assert is_cached(f"{name}.r160_in1k", "default")
    fetch_weights(name, "default")
    model, loaded = build_and_load(
        name, **SEVEN | {"image_size": 32}, weights="default"
    )
    assert loaded is not None
    assert loaded == (
        "weights from timm:test_vit default: head new (7 classes, not 1000); "
        "from 3 channels to 1"
    )
    mine = model.state_dict()
    assert torch.equal(
        mine["blocks.0.mlp.fc1.weight"], theirs["blocks.0.mlp.fc1.weight"]
    )
    assert mine["pos_embed"].shape[1] < theirs["pos_embed"].shape[1]
    assert model(torch.zeros(1, 1, 32, 32)).shape == (1, 7)


def test_what_timm_cannot_download_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_internet(*_args: object, **_kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert not is_cached("timm:test_vit", "default")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_internet)
    with pytest.raises(DataError, match="fetch timm:test_vit --weights default") as it:
        fetch_weights("timm:test_vit", "default")
    assert "(ConnectionError: no route)" in str(it.value)


def test_what_needs_no_download_is_always_there() -> None:
    for name, weights in (
        ("convnet", None),
        ("resnet18", None),
        ("resnet18", "a/file.pt"),
        ("timm:test_vit", None),
        ("my.models:one", None),
    ):
        assert is_cached(name, weights)
        fetch_weights(name, weights)


def test_a_summary_counts_what_there_is_and_what_learns() -> None:
    model = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=0)
    assert summary_line(model) == "ConvNet: 25,730 weights (all train), 0.1 MB"
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert summary_line(model) == "ConvNet: 25,730 weights (410 train), 0.1 MB"
    assert summary_table(model).splitlines() == [
        "module  type     weights  train",
        "conv1   Conv2d       160      0",
        "conv2   Conv2d     4,640      0",
        "hidden  Linear    20,520      0",
        "head    Linear       410    410",
        "all     ConvNet   25,730    410",
    ]

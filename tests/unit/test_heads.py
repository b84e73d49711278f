"""Where a model's head is, and repositories whose models get one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models import hub
from mpitrain.models.build import build_and_load, build_model, fetch_weights, is_cached
from mpitrain.models.layers import WithHead, features_before_head, head_of

SMALL: dict[str, Any] = {"num_classes": 7, "seed": 2}


@pytest.mark.parametrize(
    ("name", "head_name", "width", "size"),
    [
        ("convnet", "head", 40, 8),
        ("resnet18", "fc", 512, 32),
        ("vit_b_16", "heads.head", 768, 32),
        ("mobilenet_v3_small", "classifier.3", 1024, 32),
        ("vgg11", "classifier.6", 4096, 32),
        ("timm:vit_tiny_patch16_224", "head", 192, 32),
        ("timm:test_convnext", "head.fc", 64, 32),
        ("timm:test_resnet", "fc", 96, 32),
    ],
)
def test_the_head_of_the_features_is_the_model(
    name: str, head_name: str, width: int, size: int
) -> None:
    model = build_model(name, in_channels=1, image_size=size, **SMALL)
    images = torch.rand(2, 1, size, size)
    assert head_of(model)[0] == head_name
    features, head = features_before_head(model, images[:1]), head_of(model)[1]
    assert features is not None
    assert model.training
    model.eval()
    received = features(images)
    assert received.shape == (2, width)
    assert torch.equal(head(received), model(images))


@pytest.mark.parametrize(
    "name", ["squeezenet1_1", "timm:deit_tiny_distilled_patch16_224"]
)
def test_a_model_that_goes_on_after_its_head_is_not_split(name: str) -> None:
    model = build_model(name, in_channels=1, image_size=32, **SMALL)
    assert features_before_head(model, torch.rand(1, 1, 32, 32)) is None


class Own(nn.Module):
    """Two linear layers, of which the last is not the head."""

    def __init__(self, head_name: str | None = None) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 7)
        self.aside = nn.Linear(4, 4)
        if head_name:
            self.head_name = head_name

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scores(self.aside(inputs))  # type: ignore[no-any-return]


def test_a_model_of_ones_own_may_name_its_head() -> None:
    assert head_of(Own())[0] == "aside"
    assert features_before_head(Own(), torch.rand(2, 4)) is None
    assert head_of(Own("scores"))[0] == "scores"
    assert features_before_head(Own("scores"), torch.rand(2, 4)) is not None
    with pytest.raises(
        DataError, match="says head_name = 'nowhere', but has no module"
    ):
        head_of(Own("nowhere"))


def test_a_model_without_a_linear_layer_has_no_head() -> None:
    with pytest.raises(DataError, match="has no head: expected a linear layer"):
        head_of(nn.Sequential(nn.Conv2d(1, 2, 3)))


def test_a_head_called_twice_gives_no_features() -> None:
    class Twice(Own):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.aside(self.aside(inputs))  # type: ignore[no-any-return]

    assert features_before_head(Twice(), torch.rand(1, 4)) is None


HUBCONF = """
dependencies = ["torch"]
import torch
from torch import nn
from their_layers import Backbone

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Backbone()
        self.out = nn.Linear(6, 1000)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.body(x))

def classifier(pretrained=True, **kwargs):
    model = Classifier()
    if pretrained:
        with torch.no_grad():
            model.body.conv.weight.fill_(0.5)
    return model

def backbone(*, pretrained: bool = True):
    return Backbone()

def patches():
    return nn.Sequential(nn.Conv2d(3, 6, 2))

def offline(pretrained=False):
    if pretrained:
        raise OSError("no route to host")
    return Backbone()

def broken():
    raise KeyError("oops")

def needy():
    import xyz_not_there

def number():
    return 3
"""
THEIR_LAYERS = """
from torch import nn

class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Identity()

    def forward(self, x):
        return self.head(self.norm(self.conv(x).mean((2, 3))))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "hubconf.py").write_text(HUBCONF)
    (folder / "their_layers.py").write_text(THEIR_LAYERS)
    return folder


def build_hub(
    clone: Path | str, entry: str, weights: str | None = None, classes: int = 7
) -> tuple[nn.Module, str]:
    model, loaded = build_and_load(
        f"hub:{clone}:{entry}",
        num_classes=classes,
        in_channels=1,
        image_size=8,
        seed=4,
        weights=weights,
    )
    return model, loaded or ""


def test_a_classifier_of_a_clone_gets_another_last_layer(clone: Path) -> None:
    model, _ = build_hub(clone, "classifier")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    assert head_of(model)[0] == "out"
    again, _ = build_hub(clone, "classifier")
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    whole, _ = build_hub(clone, "classifier", classes=1000)
    assert whole(torch.rand(2, 1, 8, 8)).shape == (2, 1000)


def test_weights_of_a_clones_own_are_kept_and_fitted(clone: Path) -> None:
    model, line = build_hub(clone, "classifier", weights="default")
    body: Any = model.body
    assert torch.equal(body.conv.weight, torch.full((6, 1, 4, 4), 1.5))
    assert line == (
        f"weights from hub:{clone}:classifier default: body.conv from 3 channels to 1; "
        "out new (7 classes instead of 1000)"
    )


@pytest.mark.parametrize("classes", [7, 6])
def test_a_bare_backbone_gets_a_head_on_top(clone: Path, classes: int) -> None:
    model, _ = build_hub(clone, "backbone", classes=classes)
    assert isinstance(model, WithHead)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, classes)
    assert head_of(model) == ("head", model.head)
    assert features_before_head(model, torch.rand(1, 1, 8, 8)) is not None


def test_a_file_of_the_bare_backbone_loads_beneath_the_head(
    clone: Path, tmp_path: Path
) -> None:
    theirs, _ = build_hub(clone, "backbone")
    assert isinstance(theirs, WithHead)
    file = tmp_path / "backbone.pth"
    torch.save(theirs.backbone.state_dict(), file)
    model, line = build_hub(clone, "backbone", weights=str(file))
    assert line == f"weights from {file}: 4 tensors; new head.weight, head.bias"
    torch.save(theirs.state_dict(), file)
    model, line = build_hub(clone, "backbone", weights=str(file))
    assert line == f"weights from {file}: 6 tensors"
    assert isinstance(model, WithHead)


@pytest.mark.parametrize(
    ("entry", "weights", "kind", "words"),
    [
        ("clasifier", None, DataError, "Cannot find callable clasifier in hubconf"),
        ("patches", "default", UsageError, "does not take pretrained"),
        ("classifier", "V2", UsageError, "'V2': no such file.* one of default"),
        (
            "patches",
            None,
            DataError,
            r"of shape \(1, 6, 7, 7\) for one image; expected",
        ),
        ("needy", None, DataError, "xyz_not_there.*; pip install xyz_not_there"),
        ("broken", None, DataError, "could not load it .*KeyError: 'oops'"),
        ("number", None, DataError, "returned 'int'; expected a torch.nn.Module"),
        ("offline", "default", DataError, "fetch hub:.*:offline --weights default"),
    ],
)
def test_what_is_wrong_with_a_repository_is_told(
    entry: str, weights: str | None, kind: type[Exception], words: str, clone: Path
) -> None:
    with pytest.raises(kind, match=words):
        build_hub(clone, entry, weights)


def test_an_image_too_small_for_a_repositorys_model_is_told(clone: Path) -> None:
    with pytest.raises(DataError, match=r"3 channels and 2x2 pixels.*--image-size"):
        build_model(
            f"hub:{clone}:backbone", num_classes=7, in_channels=3, image_size=2, seed=0
        )


def test_a_folder_that_is_none_and_a_clone_without_hubconf(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder '/no/such/clone'"):
        build_hub("/no/such/clone", "f")
    with pytest.raises(DataError, match=r"hubconf\.py"):
        build_hub(tmp_path, "f")


def test_packages_that_a_repository_says_it_needs_are_named(clone: Path) -> None:
    text = (
        (clone / "hubconf.py").read_text().replace('["torch"]', '["abc_no", "xyz_no"]')
    )
    (clone / "hubconf.py").write_text(text)
    with pytest.raises(DataError, match="Missing dependencies: abc_no, xyz_no"):
        build_hub(clone, "backbone")


def test_a_repository_downloaded_before_is_used_without_asking(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.hub.get_dir()
    torch.hub.set_dir(tmp_path)

    def no_internet(*_args: object, **_kwargs: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.urlopen", no_internet)
    try:
        name = "hub:someone/theirs:backbone"
        assert not is_cached(name, None)
        with pytest.raises(DataError, match=f"python -m mpitrain fetch {name}"):
            fetch_weights(name, None)
        clone.rename(tmp_path / "someone_theirs_master")
        assert is_cached(name, None)
        assert not is_cached(name, "default")
        fetch_weights(name, "default")
        model, _ = build_hub("someone/theirs", "backbone")
        assert isinstance(model, WithHead)
        assert hub._clone_of("someone/theirs:v2/x") is None
    finally:
        torch.hub.set_dir(before)

"""Which weights of a file are meant, by their names and keys; what is none of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.models.build import fetch_weights, is_cached
from mpitrain.models.weights import load_weights


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3))


STATE = {name: it.clone() for name, it in network(1).state_dict().items()}


def load(content: Any, tmp_path: Path) -> str:
    """Load a file with this content, whose weights are `STATE`; return the line."""
    torch.save(content, tmp_path / "a.pt")
    model = network(2)
    line = load_weights(model, tmp_path / "a.pt")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, STATE[name]), name
    return line


def renamed(old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new, 1): it for name, it in STATE.items()}


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"depth": 18}, "weights": STATE},
        {"model": {}, "state": {"epoch": 3}, "params": STATE},
        {"model_ema": {}, "model": {"state_dict": STATE}},
        {"state": {"step": 1}, **STATE},
        renamed("0.0.", "0.0._checkpoint_wrapped_module."),
        renamed("", "_fsdp_wrapped_module."),
        renamed("0.0.", "_fsdp_wrapped_module.0._orig_mod.0."),
    ],
)
def test_weights_are_found(content: Any, tmp_path: Path) -> None:
    load(content, tmp_path)


@pytest.mark.parametrize("is_last", [True, False])
def test_of_two_weights_of_one_name_that_with_the_prefix_is_taken(
    is_last: bool, tmp_path: Path
) -> None:
    own = {f"model.{name}": it for name, it in STATE.items()}
    other = {"1.weight": torch.zeros(3, 8)}
    line = load(own | other if is_last else other | own, tmp_path)
    assert line == "4 tensors; 1 not used ((without model.) 1.weight)"


def test_arrays_are_no_tensors(tmp_path: Path) -> None:
    arrays = {name: it.numpy() for name, it in STATE.items()}
    for content in (arrays, {"state_dict": arrays}):
        with pytest.raises(DataError, match=r"NumPy arrays .* torch\.from_numpy"):
            load(content, tmp_path)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    words = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
    (tmp_path / name).write_text(words)
    with pytest.raises(DataError, match=r"pointer of Git LFS.*: git lfs pull"):
        load_weights(network(2), tmp_path / name)


def test_a_nan_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = {name: it.clone() for name, it in STATE.items()}
    broken["0.0.bias"][:2] = torch.tensor([torch.inf, -torch.inf])  # as of a mask
    torch.save(broken, tmp_path / "a.pt")
    with caplog.at_level(logging.WARNING, "mpitrain"):
        load_weights(network(2), tmp_path / "a.pt")
        assert not caplog.messages
        broken["0.0.weight"][1, 2] = torch.nan
        broken["1.weight"][1, 2] = torch.nan
        torch.save(broken, tmp_path / "a.pt")
        load_weights(network(2), tmp_path / "a.pt")
    (words,) = caplog.messages
    assert (
        words == f"weights from {tmp_path}/a.pt: 0.0.weight has NaN; expected numbers"
    )


def test_a_folder_may_have_the_name_of_known_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "default").mkdir()
    assert not is_cached("resnet18", "default")
    torch.save(STATE, tmp_path / "mine")
    for name in ("resnet18", f"hub:{tmp_path}:net"):  # know no weights "mine"
        fetch_weights(name, "mine")
    (tmp_path / "mine").unlink()
    with pytest.raises(UsageError, match="'mine': no such file"):
        fetch_weights("resnet18", "mine")

"""A file for `torch.load` that is written weight by weight."""

from __future__ import annotations

import resource
import zipfile
from pathlib import Path

import pytest
import torch

from mpitrain.models.state_dict_file import write_state_dict

WEIGHTS = {
    "transposed": torch.randn(30, 20).t(),
    "integers": torch.arange(5),
    "half": torch.randn(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "complex": torch.randn(2, 2, dtype=torch.complex64),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("extra", [{}, {"extra": {"a": torch.ones(2)}}])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("mmap", [False, True])
def test_it_is_read_as_what_torch_saves(
    extra: dict[str, object], device: str, tmp_path: Path, *, mmap: bool
) -> None:
    state = WEIGHTS | extra
    outline = {name: it.to(device) for name, it in WEIGHTS.items()} | extra
    path = tmp_path / "model.pt"
    write_state_dict(path, outline, reversed(state.items()))
    found = torch.load(path, mmap=mmap)
    assert sorted(found) == sorted(state)
    for name, weight in WEIGHTS.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight)
    if extra:
        assert torch.equal(found["extra"]["a"], torch.ones(2))
    assert zipfile.ZipFile(path).testzip() is None  # all checksums are right


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_names_of_one_tensor_have_one_record(device: str, tmp_path: Path) -> None:
    with torch.device(device):
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(8, 100), "b": torch.nn.ReLU()}
        )
    model["b"].weight = model["a"].weight
    outline = model.state_dict()
    weights = {"a.weight": torch.randn(100, 8), "a.bias": torch.ones(100)}
    weights["b.weight"] = weights["a.weight"]
    path = tmp_path / "model.pt"
    write_state_dict(path, outline, weights.items())
    found = torch.load(path)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], it) for name, it in weights.items())
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()


def test_strides_and_order_do_not_change_the_bytes(tmp_path: Path) -> None:
    images = torch.randn(4, 3, 5, 5)
    other = images.to(memory_format=torch.channels_last)
    for name, weight in ("plain", images), ("last", other):
        (tmp_path / name).mkdir()
        state = {"weight": weight, "bias": torch.ones(2)}
        values = state.items() if name == "plain" else reversed(state.items())
        write_state_dict(tmp_path / name / "model.pt", state, values)
    files = [tmp_path / name / "model.pt" for name in ("plain", "last")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_memory_that_is_not_touched_is_not_filled_either(tmp_path: Path) -> None:
    """With deterministic algorithms torch fills what it allocates."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        before = resident()
        outline = {"large": torch.empty(10**8, device="meta")}
        with pytest.raises(ValueError, match="no numbers came of large"):
            write_state_dict(tmp_path / "model.pt", outline, [])
        assert resident() - before < 100
    finally:
        torch.use_deterministic_algorithms(mode=False)


def resident() -> float:
    """The memory of this process at its peak, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def test_a_weight_of_another_shape_is_an_error(tmp_path: Path) -> None:
    outline = {"a": torch.empty(2, 3), "b": torch.empty(2)}
    values = [("a", torch.ones(3, 3)), ("b", torch.ones(2))]
    with pytest.raises(ValueError, match=r"a is torch.float32 \(3, 3\); expected"):
        write_state_dict(tmp_path / "model.pt", outline, values)


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_sparse_tensors_are_written_too(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "sparse": torch.eye(3).to_sparse()}
    write_state_dict(tmp_path / "model.pt", state, state.items())
    found = torch.load(tmp_path / "model.pt")["sparse"]
    assert torch.equal(found.to_dense(), torch.eye(3))

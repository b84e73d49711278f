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

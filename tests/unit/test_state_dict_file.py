"""A file for `torch.load` that is written weight by weight."""

from __future__ import annotations

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

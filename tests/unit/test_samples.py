"""Batches of any kind: what is in them, compared and moved to a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from mpitrain.data.samples import digest, to_device
from mpitrain.train.verification import checksum


class Graph:
    """Moves itself, as PyG's."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: str) -> Graph:
        return Graph(self.x.to(device))


@dataclass(frozen=True)
class Batch:
    graph: Graph
    rows: list[Tensor]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: torch.nested.as_nested_tensor([*x], layout=torch.jagged),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to(torch.bfloat16),
    ],
)
def test_tensors_of_any_layout_are_compared(made: Any) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert digest(made(x)) == digest([made(x)])
    assert digest(made(x)) != digest(made(3 * x))
    assert checksum(made(x)) == checksum(made(x))
    for other in (3 * x, x.flip(1)):  # other numbers; the same ones at other indices
        assert checksum(made(x)) != checksum(made(other))


def test_what_moves_itself_is_moved_in_a_dataclass_too() -> None:
    batch = Batch(Graph(torch.ones(2)), [torch.ones(3)])
    found = to_device({"batch": batch, "name": "a"}, "meta")
    assert found["batch"].graph.x.is_meta
    assert found["batch"].rows[0].is_meta
    assert found["name"] == "a"
    assert not batch.graph.x.is_meta


def test_a_packed_sequence_moves_as_torch_moves_it() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = to_device([packed], "meta")[0]
    assert found.data.is_meta
    assert not found.batch_sizes.is_meta

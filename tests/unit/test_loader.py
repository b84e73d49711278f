"""Batches of a data set in memory: the same bits on any number of ranks, if asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from single_process import LONE
from torch import Tensor

from mpitrain.data.in_memory import InMemory
from mpitrain.data.loader import BatchLoader
from mpitrain.data.sharding import MicroBatchAssignment, RankShard

INPUTS = torch.randn(96, 13, generator=torch.Generator().manual_seed(0))


def batches(world_size: int, *, joins_batches: bool) -> dict[tuple[int, ...], Tensor]:
    """The inputs of the micro-batches of an epoch, over all ranks."""
    found = {}
    for rank in range(world_size):
        loader = BatchLoader(
            InMemory(INPUTS, INPUTS.sum(1)),
            replace(LONE, rank=rank),
            lambda inputs, *_: torch.sigmoid(inputs),
            dtype=None,
            joins_batches=joins_batches,
        )
        shard = RankShard(
            rank=rank,
            world_size=world_size,
            global_batch_size=40,
            micro_batch_size=5,
            assignment=MicroBatchAssignment(world_size=world_size),
            order=np.arange(96),
        )
        for step in loader.steps(shard, 1):
            for batch in step.micro_batches:
                found[tuple(batch.indices.tolist())] = batch.inputs
    return found


@pytest.mark.parametrize("joins_batches", [False, True])
def test_inputs_do_not_depend_on_the_number_of_ranks(joins_batches: bool) -> None:
    """Joined ones differ in the last bits, by their places in the larger tensor."""
    one, two = (batches(size, joins_batches=joins_batches) for size in (1, 2))
    assert one.keys() == two.keys()
    for indices, inputs in one.items():
        if joins_batches:
            torch.testing.assert_close(inputs, two[indices], rtol=1e-6, atol=0)
        else:
            assert torch.equal(inputs, two[indices])
            # Products of few rows round by the address: each has memory of its own.
            assert inputs.data_ptr() % 64 == two[indices].data_ptr() % 64 == 0

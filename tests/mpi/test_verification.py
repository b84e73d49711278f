"""`verify_every`: a rank that computes wrongly is named, and no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import wrong_bits

from mpitrain import TrainConfig, Trainer, UsageError, World
from mpitrain.train.verification import ComputeError

pytestmark = pytest.mark.mpi


def named(world: World, folder: Path, *words: str) -> ComputeError:
    """Train; return the error that all ranks raise."""
    with pytest.raises(ComputeError) as caught:
        wrong_bits.train(str(folder), *words, every=4, world=world)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("activation", 14, r"in micro-batch \d, "),
        ("gradient", 14, r"in micro-batch \d, the gradient of 4.weight"),
        ("batch", 14, r"in micro-batch \d, the inputs"),
        ("weight", 16, r"its copy of 4.weight is not that of the \d others"),
        ("state", 16, r"its copy of exp_avg of 0.weight is not that of the \d others"),
    ],
)
@pytest.mark.parametrize("rank", [1, 0])
def test_a_flipped_bit_is_named_within_so_many_steps(
    rank: int, kind: str, step: int, expected: str, world: World, run_dir: Path
) -> None:
    if world.world_size < 3:  # no majority
        return
    error = named(world, run_dir, kind, str(rank), str(step))
    assert error.reporting_rank == rank
    assert error.verified_step == 11
    # Of 12, 16, 20 the first after 14.
    assert pytest.RaisesExc(ComputeError, match=f"step 16: .*{expected}").matches(error)


def test_two_ranks_cannot_be_told_apart_by_their_copies(
    world: World, run_dir: Path, parts: Any
) -> None:
    def look(part: World) -> None:
        error = named(part, run_dir, "weight", "1", "14")
        assert "no majority of the ranks has one copy: that of 4.weight" in str(error)

    if world.world_size > 1:
        parts(2, look)


@pytest.mark.parametrize("flags", [("once",), ()])
def test_of_two_ranks_one_that_was_wrong_once_is_named(
    world: World, run_dir: Path, parts: Any, flags: tuple[str, ...]
) -> None:
    def look(part: World) -> None:
        error = named(part, run_dir, "gradient", "1", "16", "two", *flags)
        host = world.hostname
        if flags:
            assert error.reporting_rank == 1
            assert f"step 16: it has other bits than rank 0 on {host} in" in str(error)
            assert "a second computation agrees with rank 0" in str(error)
        else:
            both = f"rank 0 on {host} and rank 1 on {host} differ in"
            assert f"step 16: {both}" in str(error)

    if world.world_size > 1:
        parts(2, look)


def test_without_bitwise_the_copies_are_compared(world: World, run_dir: Path) -> None:
    if world.world_size < 3:
        return
    error = named(world, run_dir, "weight", "2", "14", "plain")
    assert error.reporting_rank == 2
    assert "step 16: its copy of 4.weight" in str(error)


def test_sharded_weights_have_no_copies(world: World) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.arange(8) % 2)
    config = TrainConfig(verify_every=3, strategy="fsdp", global_batch_size=8)
    trainer = Trainer(torch.nn.Linear(2, 2), data, data, config, world=world)
    words = "--verify-every compares the copies of all ranks, found --strategy fsdp"
    with pytest.raises(UsageError, match=words):
        trainer.fit()


@pytest.mark.parametrize("flags", [("ema", "noise"), ("plain", "ema")])
def test_there_is_no_false_alarm_and_no_other_bit(
    world: World, run_dir: Path, flags: tuple[str, ...]
) -> None:
    one, other = (
        wrong_bits.train(
            f"{run_dir}-{every}", "none", "0", "0", *flags, every=every, world=world
        )
        for every in (1, 1000)
    )
    if "plain" not in flags and world.is_rank_zero:  # else rounded by the ranks' order
        for name, weight in one.items():
            assert torch.equal(weight, other[name]), name

"""What the function of --task may return, on all ranks or on one."""

from __future__ import annotations

import pytest

from mpitrain import TrainConfig, World
from mpitrain.tools.train.own_task import call_task

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("function", "words", "is_of_all"),
    [
        ("with_other_config", "another TrainConfig, which ignores the flags", True),
        ("with_recorder", "has a Recorder, and so has the command", True),
        ("nothing", "returned int; expected a Trainer", True),
        ("on_one_rank", "a Trainer on rank 0, a Task on rank", True),
        ("nothing_on_one_rank", "returned NoneType; expected a Trainer", False),
        ("fails_on_one", "a fault of mine", False),
    ],
)
def test_what_is_no_training_is_an_error_of_all_ranks(
    world: World, function: str, words: str, is_of_all: bool
) -> None:
    if world.world_size == 1 and "one" in function:
        return
    config = TrainConfig(task=f"own_tasks:{function}")
    with pytest.raises(Exception, match=words) as caught:
        call_task(config, world)
    assert caught.value.is_collective is is_of_all  # type: ignore[attr-defined]
    assert caught.value.reporting_rank == (0 if is_of_all else 1)  # type: ignore[attr-defined]

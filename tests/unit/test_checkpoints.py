"""A checkpoint is whole or not there, and nothing in it is ever run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import stat
import subprocess
import warnings
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mpitrain.checkpoints import layout
from mpitrain.checkpoints.layout import BrokenCheckpoint, Checkpoint
from mpitrain.checkpoints.loading import Loader, check, newest_whole
from mpitrain.checkpoints.storage import LoadPlanner, Reader, SavePlanner, Writer
from mpitrain.errors import DataError
from mpitrain.launch.shared import Alone
from mpitrain.train.steps import SoFar
from mpitrain.world import World

NAMES = ("SHA256SUMS", "facts.json", "rank-0.bin", "tensors.json")


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "whole": torch.randn(5, 7),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "bits": torch.rand(9) > 0.5,
        "bf16": torch.randn(3, 3).bfloat16(),
        "complex": torch.randn(4, dtype=torch.complex64),
        "count": torch.tensor(2**62),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.randn(6, 8)[::2, 1::3],
        "weird/na me.ünïcode": torch.arange(3, dtype=torch.uint8),
    }


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Torch tells every step to a logger, and a failure would show all of it."""
    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)


def facts_of(step: int) -> dict[str, Any]:
    """What the smallest training writes down."""
    so_far = asdict(SoFar(num_steps=step, epoch=3, epoch_steps=2, values={"loss": 0.5}))
    return {
        "run": "a", "stage": "train", "strategy": "ddp", "world_size": 2,
        "config": {
            "model": "convnet", "data": "digits", "precision": "fp32", "seed": 1,
            "epochs": 4, "probe_epochs": 0, "global_batch_size": 64,
        },
        "data": {"num_classes": 10, "in_channels": 1, "image_size": 8},
        "num_samples": {"train": 96, "val": 40}, "so_far": so_far, "scale": [1.0, 0],
        "extra_state": {}, "goodness": 0.5,
        "record": {"metrics_bytes": 0, "values": {}},
    }  # fmt: skip


def write(run_dir: Path, step: int = 120, **facts: Any) -> Checkpoint:
    path = run_dir / layout.FOLDER / layout.name_of(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(
            tensors(),
            storage_writer=Writer(path, facts=facts_of(step) | facts),
            planner=SavePlanner(),
            no_dist=True,
        )
    return layout.checkpoint_at(path)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, note=[1, "x"])
    check(checkpoint)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            read,
            storage_reader=Reader(checkpoint.path),
            planner=LoadPlanner(),
            no_dist=True,
        )
    for name, tensor in tensors().items():
        assert torch.equal(read[name], tensor), name
        assert read[name].stride() == torch.zeros_like(tensor).stride()
    assert checkpoint.facts()["note"] == [1, "x"]
    assert sorted(path.name for path in checkpoint.path.iterdir()) == list(NAMES)
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=checkpoint.path,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone", "folder", "longer"])
def test_damage_to_any_file_is_noticed(name: str, how: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    file = checkpoint.path / name
    data = bytearray(file.read_bytes())
    if how in ("gone", "folder"):
        file.unlink()
        if how == "folder":
            file.mkdir()
    elif how == "flip":
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    else:
        kept = {"cut": data[:-1], "empty": b"", "longer": bytes(data) + b"x"}
        file.write_bytes(kept[how])
    with pytest.raises(BrokenCheckpoint, match=name):
        check(checkpoint)


def test_every_flipped_bit_of_a_small_file_is_noticed(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    for name in ("SHA256SUMS", "facts.json"):
        file = checkpoint.path / name
        data = file.read_bytes()
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << (place % 8)
            file.write_bytes(changed)
            with pytest.raises(BrokenCheckpoint):
                check(checkpoint)
        file.write_bytes(data)
    check(checkpoint)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(HIT),)


HIT = "/tmp/mpitrain-test-a-pickle-was-run"


@pytest.mark.parametrize("name", [*NAMES, ".metadata", "__0_0.distcp"])
def test_a_pickle_in_any_file_is_not_run(name: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    file = checkpoint.path / name
    size = file.stat().st_size if file.exists() else 0
    data = pickle.dumps(Hostile(), protocol=2)
    file.write_bytes(data + bytes(max(0, size - len(data))))
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    with contextlib.suppress(BrokenCheckpoint):
        check(checkpoint)
    with contextlib.suppress(BrokenCheckpoint):
        Loader(checkpoint).load(read)
    assert not Path(HIT).exists()
    with file.open("rb") as hostile:  # it is one
        pickle.load(hostile)
    assert Path(HIT).exists()
    Path(HIT).unlink()


@pytest.mark.parametrize(
    "changed",
    [
        {"tensors": {"a": {"dtype": "Tensor", "shape": [1], "chunks": []}}},
        {"tensors": {"a": {"dtype": "float32", "shape": [-1], "chunks": []}}},
        {
            "tensors": {
                "a": {
                    "dtype": "float32",
                    "shape": [1],
                    "chunks": [[[0], [1], "../../../etc/passwd", 0]],
                }
            }
        },
        {"tensors": []},
        {},
    ],
)
def test_an_index_that_makes_no_sense_is_refused(changed: Any, tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    layout.write_json(checkpoint.path, "tensors.json", changed)
    with pytest.raises(BrokenCheckpoint, match=r"tensors\.json"):
        Loader(checkpoint)


def changed(checkpoint: Checkpoint, file: str, at: str, value: Any) -> None:
    """Change one value in a file, and let the sums fit."""
    found = json.loads((checkpoint.path / file).read_text())
    *before, last = at.split(".")
    it = found
    for key in before:
        it = it[int(key) if isinstance(it, list) else key]
    it[int(last) if isinstance(it, list) else last] = value
    sums = layout.read_sums(checkpoint.path)
    sums[file] = layout.write_json(checkpoint.path, file, found)
    layout.write_sums(checkpoint.path, sums)


IMPOSSIBLE = [
    ("facts.json", "so_far.num_steps", -1),
    ("facts.json", "so_far.num_steps", 121),  # its name says 120
    ("facts.json", "so_far.epoch", 10**18),
    ("facts.json", "so_far.epoch", 6),  # of 4: it would be finished
    ("facts.json", "so_far.epoch", 2.5),
    ("facts.json", "so_far.epoch", True),
    ("facts.json", "so_far.steps_seconds", float("nan")),
    ("facts.json", "so_far.taken", [1, -1]),
    ("facts.json", "so_far.values", {"loss": "low"}),
    ("facts.json", "so_far", None),
    ("facts.json", "so_far.more", 1),
    ("facts.json", "goodness", float("inf")),
    ("facts.json", "goodness", "good"),
    ("facts.json", "world_size", 0),
    ("facts.json", "scale", []),
    ("facts.json", "record.metrics_bytes", -5),
    ("tensors.json", "tensors.whole.shape", [5 * 10**9, 7]),
    ("tensors.json", "tensors.whole.chunks.0.1", [5 * 10**9, 9]),
    ("tensors.json", "tensors.whole.chunks.0.1", [10**30, 9]),
    ("tensors.json", "tensors.whole.chunks.0.3", 10**12),
    ("tensors.json", "tensors.whole.chunks.0.3", -1),
    ("tensors.json", "tensors.whole.chunks", []),
]


@pytest.mark.parametrize(("file", "at", "value"), IMPOSSIBLE)
def test_what_cannot_be_is_broken_though_the_sums_fit(
    file: str, at: str, value: Any, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path)
    changed(checkpoint, file, at, value)
    with pytest.raises(BrokenCheckpoint, match=file.replace(".", r"\.")):
        check(checkpoint)
    assert layout.best_of([checkpoint]) is None or file == "tensors.json"


def test_every_field_is_looked_at(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    for name in layout.SCHEMA:
        changed(checkpoint, "facts.json", name, {"no": ["such"]})
        with contextlib.suppress(BrokenCheckpoint):
            checkpoint.facts()
            assert dict in layout.SCHEMA[name][0]
        layout.write_json(checkpoint.path, "facts.json", facts_of(checkpoint.step))
    assert {f"so_far.{it.name}" for it in fields(SoFar)} <= set(layout.SCHEMA)


def test_json_that_is_too_deep_is_broken(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    deep = '{"format": 1, "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (checkpoint.path / "facts.json").write_text(deep)
    with pytest.raises(BrokenCheckpoint, match=r"facts\.json"):
        checkpoint.facts()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fifo", "zero", "socket"])
def test_what_is_no_regular_file_is_never_read(
    name: str, kind: str, tmp_path: Path
) -> None:
    checkpoint = write(tmp_path)
    file = checkpoint.path / name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "zero":
        file.symlink_to("/dev/zero")
    else:
        os.mknod(file, 0o600 | stat.S_IFSOCK)
    with pytest.raises(BrokenCheckpoint, match=f"{name} is no regular file"):
        check(checkpoint)


def test_impossible_ones_are_set_aside_and_the_one_before_is_taken(
    tmp_path: Path,
) -> None:
    before = write(tmp_path, 100)
    changed(write(tmp_path, 110), "tensors.json", "tensors.whole.chunks", [])
    changed(write(tmp_path, 120), "facts.json", "so_far.epoch", 10**18)
    world = World(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=()
    )
    found = newest_whole(tmp_path, "a", world, Alone(), lambda: None)  # type: ignore[arg-type]
    assert found == before
    names = {path.name for path in (tmp_path / layout.FOLDER).glob("*.broken")}
    assert names == {"step-00000110.broken", "step-00000120.broken"}


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    loader = Loader(write(tmp_path))
    with pytest.raises(BrokenCheckpoint, match="stranger"):
        loader.load({"stranger": torch.zeros(1)})
    with pytest.raises(BrokenCheckpoint, match="whole"):
        loader.load({"whole": torch.zeros(7, 5)})


def test_the_newest_come_first_and_others_are_not_found(tmp_path: Path) -> None:
    folder = tmp_path / layout.FOLDER
    names = (
        *("step-00000009", "step-00000010", "step-00000010-epoch-2"),
        *("step-123456789", ".step-00000099.x", "step-00000098.broken", "other"),
    )
    for name in names:
        (folder / name).mkdir(parents=True)
    assert [checkpoint.path.name for checkpoint in layout.find(tmp_path)] == [
        *("step-123456789", "step-00000010-epoch-2", "step-00000010", "step-00000009")
    ]
    assert layout.find(tmp_path / "nowhere") == []
    with pytest.raises(DataError, match="is no checkpoint"):
        layout.checkpoint_at(folder / "other")


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    for step, goodness in ((1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, 0.1)):
        write(tmp_path, step, goodness=goodness)
    best = layout.best_of(layout.find(tmp_path))
    assert best is not None
    assert best.step == 4
    layout.remove_superfluous(tmp_path, 1)
    assert [it.step for it in layout.find(tmp_path)] == [5, 4]
    layout.remove_superfluous(tmp_path, None)
    assert len(layout.find(tmp_path)) == 2
    assert sorted(it.name for it in (tmp_path / layout.FOLDER).iterdir()) == [
        *("step-00000004", "step-00000005")
    ]


def test_what_is_set_aside_is_kept_and_not_found(tmp_path: Path) -> None:
    for expected in ("step-00000120.broken", "step-00000120.broken-2"):
        assert layout.set_aside(write(tmp_path), "broken").name == expected
    assert layout.find(tmp_path) == []
    layout.remove_superfluous(tmp_path, 1)
    assert len(list((tmp_path / layout.FOLDER).iterdir())) == 2


def test_unfinished_ones_are_removed_and_told(tmp_path: Path) -> None:
    whole = write(tmp_path)
    (tmp_path / layout.FOLDER / ".step-00000130.ab-0").mkdir()
    told: list[str] = []
    layout.remove_unfinished(tmp_path, told.append)
    assert len(told) == 1
    assert layout.find(tmp_path) == [whole]
    check(whole)

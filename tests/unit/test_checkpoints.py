"""A checkpoint is whole or not there, and nothing in it is ever run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import stat
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from single_process import LONE, lone_communicator
from torch import Tensor

from mpitrain.checkpoint import format, layout
from mpitrain.checkpoint.format import BrokenCheckpoint
from mpitrain.checkpoint.layout import Checkpoint
from mpitrain.checkpoint.manager import CheckpointManager
from mpitrain.checkpoint.preemption import FILE, STOP_FILE, PreemptionHandler
from mpitrain.checkpoint.resume import check, find_checkpoint, newest_complete
from mpitrain.checkpoint.storage import (
    CheckpointReader,
    StoredTensor,
    TensorWriter,
    local_chunks,
)
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.world import World
from mpitrain.train.metrics import TrainState

NAMES = ("SHA256SUMS", "metadata.json", "rank-0.bin", "tensors.json")


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


def metadata_of(step: int) -> dict[str, Any]:
    """What the smallest training writes."""
    state = asdict(TrainState(step=step, epoch=3, epoch_step=2, metrics={"loss": 0.5}))
    return {
        "run": "a", "step": step, "world_size": 2, "extra_state": {}, "metric": 0.5,
        "user_state": None,
        "trainer": {
            "stage": "train", "strategy": "ddp", "state": state,
            "config": {
                "model": "convnet", "data": "digits", "precision": "fp32", "seed": 1,
                "epochs": 4, "probe_epochs": 0, "global_batch_size": 64,
            },
            "data": {"num_classes": 10, "in_channels": 1, "image_size": 8},
            "num_samples": {"train": 96, "val": 40}, "loss_scale": [1.0, 0],
            "callbacks": {"Recorder": {"metrics_bytes": 0, "values": {}}},
        },
    }  # fmt: skip


def write_json(path: Path, values: dict[str, Any]) -> str:
    return format.write_durably(path, format.encode_json(values))


def write(run_dir: Path, step: int = 120, **metadata: Any) -> Checkpoint:
    path = run_dir / layout.FOLDER / layout.name_of(step)
    index = {
        n: StoredTensor(tensor.dtype, tensor.shape) for n, tensor in tensors().items()
    }
    encoded = format.encode_json(metadata_of(step) | metadata)
    writer = TensorWriter(path, metadata=encoded)
    run_dir.joinpath(layout.FOLDER).mkdir(exist_ok=True)
    writer.copy_to_host(local_chunks(tensors()))
    writer.commit(index, [writer.write()])
    return layout.checkpoint_at(path)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, note=[1, "x"])
    check(checkpoint)
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    CheckpointReader(checkpoint).load(read)
    for name, tensor in tensors().items():
        assert torch.equal(read[name], tensor), name
        assert read[name].stride() == torch.zeros_like(tensor).stride()
    assert checkpoint.metadata()["note"] == [1, "x"]
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
    for name in ("SHA256SUMS", "metadata.json"):
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
        CheckpointReader(checkpoint).load(read)
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
    write_json(checkpoint.path / "tensors.json", changed)
    with pytest.raises(BrokenCheckpoint, match=r"tensors\.json"):
        CheckpointReader(checkpoint)


def changed(checkpoint: Checkpoint, file: str, at: str, value: Any) -> None:
    """Change one value in a file, and let the sums fit."""
    found = json.loads((checkpoint.path / file).read_text())
    *before, last = at.split(".")
    it = found
    for key in before:
        it = it[int(key) if isinstance(it, list) else key]
    it[int(last) if isinstance(it, list) else last] = value
    sums = format.read_sums(checkpoint.path)
    sums[file] = write_json(checkpoint.path / file, found)
    format.write_sums(checkpoint.path, sums)


IMPOSSIBLE = [
    ("metadata.json", "run", None),
    ("metadata.json", "step", 121),  # its name says 120
    ("metadata.json", "trainer.state.step", 121),
    ("metadata.json", "trainer.state", None),
    ("metadata.json", "metric", float("inf")),
    ("metadata.json", "metric", "good"),
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


def test_a_file_of_tensors_that_the_sums_do_not_name_is_broken(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    sums = format.read_sums(checkpoint.path)
    of_tensors = next(name for name in sums if name.endswith(".bin"))
    del sums[of_tensors]
    format.write_sums(checkpoint.path, sums)
    with pytest.raises(BrokenCheckpoint, match=f"lacks {of_tensors}"):
        check(checkpoint)


def test_a_job_stops_while_there_is_time_for_a_checkpoint(tmp_path: Path) -> None:
    handler = PreemptionHandler(tmp_path, 100.0, used_seconds=0.0)
    try:
        handler.margin = lambda: 15.0
        left = handler.seconds_left()
        assert left is not None
        assert 75 < left <= 85
        handler.margin = lambda: 1000.0  # at most a part of the job is kept for it
        assert not handler.requested()
        assert 70 < (handler.seconds_left() or 0.0) <= 80
    finally:
        handler.close()


@pytest.mark.parametrize("has_stopped", [False, True])
@pytest.mark.parametrize("first", [None, signal.SIGTERM, signal.SIGUSR2])
def test_usr2_after_the_signal_that_stopped_the_training_ends_nothing(
    first: int | None, tmp_path: Path, *, has_stopped: bool
) -> None:
    """A cancelled job is sent TERM by the scheduler, and USR2 by its script.

    The training may also have stopped for a signal that another rank got.
    """
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        handler = PreemptionHandler(tmp_path, None, used_seconds=0.0)
        if first is not None:
            handler._note(first, None)
        handler.close(has_stopped=has_stopped)
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == ([] if first or has_stopped else [signal.SIGUSR2])


@pytest.mark.parametrize(("limit", "nearest"), [(1000.0, 60), (30.0, 30)])
def test_of_two_limits_the_nearer_one_counts(
    limit: float, nearest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 1 1:00\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    handler = PreemptionHandler(tmp_path, limit, used_seconds=0.0)
    try:
        handler.margin = lambda: 0.0
        (tmp_path / STOP_FILE).touch()  # looked for after the scheduler's answer
        end = time.monotonic() + 20
        while not handler.requested() and time.monotonic() < end:
            time.sleep(0.05)
        assert handler.requested() == FILE
        assert nearest - 25 < (handler.seconds_left() or 0.0) <= nearest
    finally:
        handler.close()


def test_an_error_without_words_is_an_error(tmp_path: Path) -> None:
    """Such as that of a `Future` whose time is over, in a callback's `flush`."""

    def fails() -> None:
        raise TimeoutError

    manager = CheckpointManager(
        tmp_path, LONE, lone_communicator(), keep=None, before_rename=fails
    )
    manager.save(tensors(), metadata_of(120), 120, 0)
    result = manager.finish("testing")
    assert result is not None
    assert "TimeoutError" in result.error
    assert not layout.list_checkpoints(tmp_path)


def test_the_stored_checkpoints_have_every_field_of_metadata() -> None:
    for strategy in ("ddp", "fsdp"):
        golden = Path(__file__).parents[1] / "golden/checkpoints" / strategy
        (checkpoint,) = layout.list_checkpoints(golden)
        check(checkpoint)
        found = checkpoint.metadata()
        assert set(found) - {"format"} == set(metadata_of(0))
        assert set(found["trainer"]) == set(metadata_of(0)["trainer"])
        assert found["trainer"]["state"]["step"] == checkpoint.step


@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, number: int) -> None:
    checkpoint = write(tmp_path)
    changed(checkpoint, "metadata.json", "format", number)
    with pytest.raises(DataError, match=f"of format {number}, expected 2"):
        checkpoint.metadata()


def test_json_that_is_too_deep_is_broken(tmp_path: Path) -> None:
    checkpoint = write(tmp_path)
    deep = '{"format": 2, "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (checkpoint.path / "metadata.json").write_text(deep)
    with pytest.raises(BrokenCheckpoint, match=r"metadata\.json"):
        checkpoint.metadata()


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
    changed(write(tmp_path, 120), "metadata.json", "trainer.state.step", 10**18)
    world = World(
        rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=()
    )
    found = newest_complete(tmp_path, "a", world, lone_communicator())
    assert found == before
    names = {path.name for path in (tmp_path / layout.FOLDER).glob("*.broken")}
    assert names == {"step-00000110.broken", "step-00000120.broken"}


def test_what_resume_names_by_another_path_of_the_run_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only newer ones are set aside. A home folder is often a link."""
    (tmp_path / "disk/run").mkdir(parents=True)
    (tmp_path / "home").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "home/run", Path("disk/run")):
        chosen = write(path, 100)
        write(path, 110)
        asked = str(tmp_path / chosen.path)
        reader = find_checkpoint(path, "a", asked, LONE, lone_communicator(), [])
        assert reader is not None
        assert reader.checkpoint.path.is_dir()
        assert [it.step for it in layout.list_checkpoints(path)] == [100]
        layout.remove_whole(chosen.path)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    loader = CheckpointReader(write(tmp_path))
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
    assert [
        checkpoint.path.name for checkpoint in layout.list_checkpoints(tmp_path)
    ] == [
        *("step-123456789", "step-00000010-epoch-2", "step-00000010", "step-00000009")
    ]
    assert layout.list_checkpoints(tmp_path / "nowhere") == []
    with pytest.raises(DataError, match="is no checkpoint"):
        layout.checkpoint_at(folder / "other")
    for path in ("other", "nowhere"):
        asked = str(folder / path)
        with pytest.raises(UsageError, match=r"--resume: .* is no checkpoint"):
            find_checkpoint(tmp_path, "a", asked, LONE, lone_communicator(), [])


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    for step, metric in ((1, 0.5), (2, 0.9), (3, None), (4, 0.9), (5, 0.1)):
        write(tmp_path, step, metric=metric)
    best = layout.best_of(layout.list_checkpoints(tmp_path))
    assert best is not None
    assert best.step == 4
    layout.remove_old(tmp_path, 1)
    assert [it.step for it in layout.list_checkpoints(tmp_path)] == [5, 4]
    layout.remove_old(tmp_path, None)
    assert len(layout.list_checkpoints(tmp_path)) == 2
    assert sorted(it.name for it in (tmp_path / layout.FOLDER).iterdir()) == [
        *("step-00000004", "step-00000005")
    ]


def test_the_best_is_that_of_the_newest_metric(tmp_path: Path) -> None:
    """Such as accuracy, if a resumed script has it, and had the loss alone before."""
    write(tmp_path, 1, metric=-0.5, best_by="min:loss")
    write(tmp_path, 2, metric=-0.6, best_by="min:loss")
    best = layout.best_of(layout.list_checkpoints(tmp_path))
    assert best is not None
    assert best.step == 1
    write(tmp_path, 3, metric=-0.9, best_by="max:r2")
    write(tmp_path, 4, metric=None, best_by="max:r2")
    best = layout.best_of(layout.list_checkpoints(tmp_path))
    assert best is not None
    assert best.step == 3


def test_what_is_set_aside_is_kept_and_not_found(tmp_path: Path) -> None:
    for expected in ("step-00000120.broken", "step-00000120.broken-2"):
        assert layout.set_aside(write(tmp_path), "broken").name == expected
    assert layout.list_checkpoints(tmp_path) == []
    layout.remove_old(tmp_path, 1)
    assert len(list((tmp_path / layout.FOLDER).iterdir())) == 2


def test_unfinished_ones_are_removed_and_told(tmp_path: Path) -> None:
    whole = write(tmp_path)
    (tmp_path / layout.FOLDER / ".step-00000130.ab-0").mkdir()
    told: list[str] = []
    layout.remove_unfinished(tmp_path, told.append)
    assert len(told) == 1
    assert layout.list_checkpoints(tmp_path) == [whole]
    check(whole)

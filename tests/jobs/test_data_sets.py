"""Every kind of data: whole trainings, the same at any number of ranks and workers.

Also where samples cannot be read, and are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import write_folder, write_hdf5, write_mnist, write_shards, write_spoilt
from launcher import Mpi, mpirun, rows, slow

pytestmark = [
    pytest.mark.xdist_group("data_sets"),  # a fixture that trains, once
    pytest.mark.usefixtures("warm_starts"),
]

MANY_TRAININGS = Path(__file__).parent / "many_trainings.py"

COMMON = ("--precision", "fp64", "--epochs", "2", "--image-size", "16", "--lr", "0.05")
COMMON += ("--global-batch-size", "8")
AUGMENTED = ("--random-flip", "--random-crop", "2")
CUTS = (*AUGMENTED, "--random-resized-crop")
WORKERS = ("--num-workers", "2")
NO_WORKERS = ("--num-workers", "0")

SIZES = {  # samples to train and to validate
    "mnist": (27, 11),
    "synthetic": (26, 6),
    "folder": (20, 7),
    "hdf5": (20, 7),
    "shards": (20, 7),
    "photos": (26, 9),
    "readings": (26, 9),
    "parts": (26, 9),
    "two-files": (3, 3),
    "two-readings": (2, 1),
    "two-parts": (2, 1),
}

IN_MEMORY = ("mnist", "synthetic")
READ = ("folder", "hdf5", "shards", "photos", "readings")

SLOW = ("hdf5", "photos")
"""In CI the trainings that skip samples read these, as on one rank so on three."""

SKIP = ("--on-bad-sample", "skip", "--precision", "fp64", "--epochs", "2", "--lr")
SKIP += ("0.05", "--image-size", "16", "--num-workers")
SPOILT = {
    "folder": ("spoilt/photos", "0", "--global-batch-size", "8"),
    "folder-workers": ("spoilt/photos", "2", "--global-batch-size", "8"),
    "hdf5": ("spoilt/set.h5", "1", "--global-batch-size", "7"),
    "shards": ("spoilt/shards", "1", "--global-batch-size", "8"),
    # Steps of one sample: with a bad one there is nothing to do in a step.
    "folder-singly": ("spoilt/photos", "1", "--global-batch-size", "1"),
}
SPOILT["folder-workers"] += ("--random-flip",)
SPOILT["shards"] += ("--random-resized-crop",)


def flags_of() -> dict[str, tuple[str, ...]]:
    """The flags of each training, by its name."""
    own = {name: ("--data", f"custom_data:{name}") for name in ("photos", "readings")}
    plain = {
        "folder": ("--data", "folder", "--data-dir", "folder"),
        "hdf5": ("--data", "hdf5", "--data-dir", "set.h5"),
        "shards": ("--data", "shards", "--data-dir", "shards"),
        **own,
    }
    flags: dict[str, tuple[str, ...]] = {
        "mnist": ("--data", "mnist", "--data-dir", ".", *AUGMENTED),
        "synthetic": ("--data", "synthetic", "--synthetic-samples", "26"),
    }
    for name, words in plain.items():
        cuts = CUTS if name in ("folder", "hdf5", "shards") else AUGMENTED
        flags[name] = (*words, *NO_WORKERS)
        flags[f"{name}-workers"] = (*words, *WORKERS)
        flags[f"{name}-augmented"] = (*words, *NO_WORKERS, *cuts)
        flags[f"{name}-augmented-workers"] = (*words, *WORKERS, *cuts)
    parts = ("--data", "custom_data:parts")
    flags["parts"] = (*parts, *NO_WORKERS)
    flags["parts-workers"] = (*parts, *WORKERS)
    files = ("--data", "folder", "--data-dir", "few", "--num-workers", "1")
    flags["two-files"] = files
    flags["two-readings"] = ("--data", "custom_data:two_readings", *WORKERS)
    flags["two-parts"] = ("--data", "custom_data:two_parts", *WORKERS)
    probe = ("--probe-epochs", "1", "--epochs", "0")
    flags = {name: (*words, *COMMON) for name, words in flags.items()}
    flags["probe"] = (*flags["folder"], *probe)  # the last of two flags counts
    for name, (where, *more) in SPOILT.items():
        words = ("--data", name.split("-")[0], "--data-dir", where, *SKIP)
        flags[f"skip-{name}"] = (*words, *more)
    words = ("--data", "custom_data:faulty", *SKIP)
    for name, workers in (("faulty", "0"), ("faulty-workers", "2")):
        flags[f"skip-{name}"] = (*words, workers, "--global-batch-size", "8")
    return flags


def is_run(name: str, size: int) -> bool:
    """Whether a training is tried on so many ranks: not all, for the time it takes.

    What workers read for three ranks, with augmentation, is compared with what one
    process reads.
    """
    kind, _, how = name.partition("-")
    if kind == "skip":
        return True
    if size == 1:
        return kind == "parts" or "workers" not in how
    if name == "folder-workers":  # whose test part is compared, too
        return True
    return "augmented-workers" in how if kind in READ else how != "zipped"


def not_asked_for(items: list[pytest.Item]) -> tuple[str, ...]:
    """Of `SLOW` the names that no test is about which runs; others skip samples."""
    tests = (
        test_a_training_is_the_same_at_any_size,
        test_augmentation_changes_what_is_trained_on_alone,
    )
    names = {
        item.callspec.params["name"]
        for item in items
        if isinstance(item, pytest.Function)
        and item.originalname in {it.__name__ for it in tests}
    }
    return tuple(name for name in SLOW if name not in names)


@pytest.fixture(scope="module")
def runs(
    openmpi: Mpi,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[int, Path]:
    """The run folders of the trainings that are looked at, by the number of ranks."""
    left_out = not_asked_for(request.session.items)
    place = tmp_path_factory.mktemp("sets")
    write_mnist(place / "MNIST/raw")
    write_folder(place / "folder", train=20, val=7, test=5)
    write_folder(place / "few", train=3, val=3)
    write_hdf5(place / "set.h5")
    write_shards(place / "shards")
    write_spoilt(place / "spoilt")
    found = {}
    for size in (1, 3):
        chosen = {
            name: [*words, "--runs-dir", f"on-{size}"]
            for name, words in flags_of().items()
            if is_run(name, size) and not name.startswith(left_out)
        }
        (place / "trainings.json").write_text(json.dumps(chosen))
        words = ("-m", "mpitrain", "run", "--device", "cpu", "--hang-timeout", "60")
        words += (str(MANY_TRAININGS), "trainings.json")
        done = mpirun(openmpi, size, *words, cwd=place, timeout_seconds=400)
        assert done.status == 0, done.out + done.err
        assert "Traceback" not in done.err
        found[size] = place / f"on-{size}"
    return found


def runs_of(folder: Path, name: str) -> list[Path]:
    """The run folders of one kind of data: with workers, augmented and so on."""
    found = sorted(folder.iterdir())
    return [run for run in found if f"{run.name}-".startswith(f"{name}-")]


def maybe_slow(names: tuple[str, ...]) -> list[Any]:
    return [slow(name) if name in SLOW else name for name in names]


def losses(run: Path) -> list[float]:
    """Of all steps, and of the validation after each epoch."""
    steps = [row["train_loss"] for row in rows(run, "step")]
    return steps + [row["val_loss"] for row in rows(run, "epoch")]


def assert_each_seen(run: Path, name: str) -> None:
    found = [(row["train_samples"], row["val_samples"]) for row in rows(run, "epoch")]
    assert found == [SIZES[name]] * 2


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "name", [*IN_MEMORY, *maybe_slow(READ), "two-files", "two-readings"]
)
def test_a_training_is_the_same_at_any_size(
    runs: dict[int, Path], name: str, size: int
) -> None:
    found = runs_of(runs[size], name)
    assert found
    num_steps = -(-SIZES[name][0] // 8)  # the last is a short one
    for run in found:
        assert_each_seen(run, name)
        alone = runs[1] / run.name.replace("-workers", "")
        assert losses(run) == pytest.approx(losses(alone), rel=1e-9)
        assert [row["step"] for row in rows(run, "epoch")] == [num_steps, 2 * num_steps]
        result = json.loads((run / "result.json").read_text())
        assert (result["status"], result["skipped_samples"]) == ("finished", 0)
        assert result["world_size"] == size


@pytest.mark.parametrize("name", maybe_slow(READ))
def test_augmentation_changes_what_is_trained_on_alone(
    runs: dict[int, Path], name: str
) -> None:
    plain, changed = runs[1] / name, runs[1] / f"{name}-augmented"
    assert len(losses(plain)) == len(losses(changed))
    for one, other in zip(losses(plain), losses(changed), strict=True):
        assert one != pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["parts", "two-parts"])
def test_a_stream_that_is_cut_is_seen_whole(
    runs: dict[int, Path], name: str, size: int
) -> None:
    found = runs_of(runs[size], name)
    assert found
    for run in found:
        assert_each_seen(run, name)


def test_a_stream_that_one_process_reads_whole_is_as_if_it_could_not_be_cut(
    runs: dict[int, Path],
) -> None:
    assert losses(runs[1] / "parts") == losses(runs[1] / "readings")


def test_the_test_part_judges_the_finished_weights(runs: dict[int, Path]) -> None:
    (alone,) = rows(runs[1] / "folder", "test")
    (found,) = rows(runs[3] / "folder-workers", "test")
    assert found["test_samples"] == 5
    assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-9)
    result = json.loads((runs[3] / "folder-workers/result.json").read_text())
    assert result["test_loss"] == found["test_loss"]


def test_a_probe_on_features_is_judged_by_the_test_part_too(
    runs: dict[int, Path],
) -> None:
    """By the whole model, of which a probe trains the head alone."""
    (alone,) = rows(runs[1] / "probe", "test")
    (found,) = rows(runs[3] / "probe", "test")
    assert (runs[3] / "probe/model.pt").exists()
    assert found["test_samples"] == 5
    assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-9)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", [*SPOILT, "faulty", "faulty-workers"])
def test_what_cannot_be_read_is_left_out_and_counted(
    runs: dict[int, Path], name: str, size: int
) -> None:
    good, bad = ((25, 9), 1) if "faulty" in name else ((18, 6), 3)
    run = runs[size] / f"skip-{name}"
    found = rows(run, "epoch")
    assert [(row["train_samples"], row["val_samples"]) for row in found] == [good] * 2
    assert [row["skipped_samples"] for row in found] == [bad] * 2
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["skipped_samples"]) == ("finished", 2 * bad)
    alone = rows(runs[1] / f"skip-{name}", "epoch")
    for loss in ("train_loss", "val_loss"):
        expected = [row[loss] for row in alone]
        assert [row[loss] for row in found] == pytest.approx(expected, rel=1e-9)

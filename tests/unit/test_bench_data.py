"""`python -m mpitrain bench data`: every format is read, and the figures agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from data_files import write_mnist

from mpitrain.cli import main
from mpitrain.data.workers import choose_temporary_folder
from mpitrain.tools.bench import images

FORMATS = ("folder", "hdf5", "hdf5-pixels", "shards")

SMALL = ("--image-size", "16", "--samples", "12", "--batch-size", "4")


def bench(*words: str) -> int:
    return main(["bench", "data", "--seconds", "0.05", *words])


def rows_of(out: str) -> list[dict[str, str]]:
    """The table, by the names of its columns."""
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1  # it stands in columns
    head, rule, *rows = ([cell.strip() for cell in it.split("|")[1:-1]] for it in lines)
    assert all(set(cell) <= {":", "-"} for cell in rule)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_every_format_is_timed_by_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    choose_temporary_folder()  # of this process, and it stays as long
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    file = tmp_path / "figures.json"
    assert bench(*SMALL, "--num-workers", "0", "2", "--output", str(file)) == 0
    out = capsys.readouterr().out
    assert out.startswith("12 JPEG images of 36 x 27 pixels, ")
    assert "seen as 16 x 16; batches of 4, " in out
    rows = rows_of(out)
    expected = [(data, n) for data in FORMATS for n in ("0", "2")] + [("memory", "0")]
    assert [(row["data"], row["workers"]) for row in rows] == expected
    assert rows[0]["to first"] == "1.00"
    assert all(float(row["samples/s"]) > 0 for row in rows)
    # The same figures, and where they come from.
    report = json.loads(file.read_text())
    assert report["command"].startswith("python -m mpitrain bench data --seconds 0.05")
    assert {"date", "cores", "torch", "rounds"} <= report.keys()
    for told, row in zip(rows, report["rows"], strict=True):
        assert (told["data"], told["workers"]) == (row["data"], str(row["num_workers"]))
        assert told["samples/s"] == f"{row['samples_per_second']:.0f}"
        assert row["min"] <= row["samples_per_second"] <= row["max"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_files_that_are_there_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images.write("shards", tmp_path / "set", images.jpegs(9, 8), 8)
    where = ("--data-dir", str(tmp_path / "set"))
    assert bench("--data", "shards", *where, "--image-size", "8") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"shards in {tmp_path / 'set'}: 9 images, seen as 8 x 8; ")
    assert [row["workers"] for row in rows_of(out)] == ["0", "1", "2"]
    assert (tmp_path / "set").is_dir()


def test_a_set_in_memory_needs_no_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path)
    assert bench("--data", "mnist", "--data-dir", str(tmp_path)) == 0
    (row,) = rows_of(capsys.readouterr().out)
    assert (row["data"], row["workers"]) == ("mnist", "0")


def test_all_formats_hold_the_same_images() -> None:
    files = images.jpegs(6, 16)
    assert files == images.jpegs(6, 16)
    assert len(set(files)) == 6
    inputs, labels = images.decoded(files, 16)
    assert (inputs.shape, labels.tolist()) == ((6, 3, 16, 16), [0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["--data", "tape"], 2, "--data 'tape' cannot be timed without --data-dir"),
        (["--data", "mnist"], 2, "expected folder, hdf5, hdf5-pixels, shards, memory"),
        (["--data-dir", "x"], 2, "which format is it?"),
        (["--data-dir", "x", "--data", "memory"], 2, "cannot be timed with --data-dir"),
        (["--data-dir", "x", "--data", "folder", "hdf5"], 2, "found 2"),
        (["--num-workers", "-1"], 2, "--num-workers must be at least 0"),
        (["--seconds", "0"], 2, "--seconds must be above 0"),
        (["--samples", "0"], 2, "--samples must be at least 1"),
        (
            ["--data-dir", "/nowhere", "--data", "folder"],
            1,
            "/nowhere/train: cannot be listed",
        ),
    ],
)
def test_what_cannot_be_timed_is_told(
    words: list[str], status: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "data", *words]) == status
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [[], ["scales"]])
def test_what_to_time_must_be_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert "bench what? Expected: bench data" in capsys.readouterr().err


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "bench data" in capsys.readouterr().out

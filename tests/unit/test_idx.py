"""MNIST and Fashion-MNIST: read as they are, and refused in words when broken."""

from __future__ import annotations

import gzip
import resource
from collections.abc import Callable
from pathlib import Path

import fashion_mnist
import numpy as np
import pytest
from data_files import PREFIXES, idx_bytes

from mpitrain.data import idx
from mpitrain.errors import DataError

PLACES = (".", "MNIST/raw", "FashionMNIST/raw")


def made(num_train: int = 30, num_val: int = 7) -> dict[str, np.ndarray]:
    """The arrays of a small set: images of 5 rows and 4 columns."""
    random = np.random.default_rng(1)
    arrays = {}
    for prefix, count in (("train", num_train), ("t10k", num_val)):
        images = random.integers(0, 256, (count, 5, 4))
        arrays[f"{prefix}-images-idx3-ubyte"] = images
        arrays[f"{prefix}-labels-idx1-ubyte"] = np.arange(count) % 10
    return arrays


def write(folder: Path, arrays: dict[str, np.ndarray], *, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        raw = idx_bytes(array)
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / name).write_bytes(raw)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("mnist", "."),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_a_set_is_read_from_each_place(
    tmp_path: Path, name: str, place: str, zipped: bool
) -> None:
    arrays = made()
    write(tmp_path / place, arrays, zipped=zipped)
    table = idx.read(name, tmp_path)
    for part, prefix in PREFIXES.items():
        inputs, labels = table.arrays[f"{part}_inputs"], table.arrays[f"{part}_labels"]
        assert inputs.dtype == np.uint8
        assert labels.dtype == np.int64
        assert inputs.flags.writeable
        images = arrays[f"{prefix}-images-idx3-ubyte"]
        assert inputs.shape == (len(images), 1, 5, 4)
        assert (inputs[:, 0] == images).all()
        assert (labels == arrays[f"{prefix}-labels-idx1-ubyte"]).all()
    assert len(table.classes) == 10
    assert table.classes[0] == ("0" if name == "mnist" else "T-shirt/top")
    assert idx.find(name, tmp_path) == tmp_path / place
    assert idx.lacking(name, tmp_path) == []


def test_torchvision_reads_the_same(tmp_path: Path) -> None:
    from torchvision.datasets import FashionMNIST

    write(tmp_path / "FashionMNIST" / "raw", made())
    table = idx.read("fashion-mnist", tmp_path)
    assert list(table.classes) == FashionMNIST.classes
    for part, train in (("train", True), ("val", False)):
        theirs = FashionMNIST(tmp_path, train=train)
        assert (theirs.data.numpy() == table.arrays[f"{part}_inputs"][:, 0]).all()
        assert (theirs.targets.numpy() == table.arrays[f"{part}_labels"]).all()


def test_the_place_that_names_the_set_wins_over_loose_files(tmp_path: Path) -> None:
    write(tmp_path, made(num_train=10))
    write(tmp_path / "FashionMNIST" / "raw", made(num_train=20))
    assert len(idx.read("fashion-mnist", tmp_path).arrays["train_labels"]) == 20
    assert len(idx.read("mnist", tmp_path).arrays["train_labels"]) == 10


def test_a_place_that_is_whole_wins_over_one_that_is_not(tmp_path: Path) -> None:
    write(tmp_path, made(), zipped=True)
    write(tmp_path / "MNIST" / "raw", made())
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    assert idx.find("mnist", tmp_path) == tmp_path


def test_the_real_fashion_mnist_is_read() -> None:
    table = idx.read("fashion-mnist", fashion_mnist.folder())
    assert table.arrays["train_inputs"].shape == (60000, 1, 28, 28)
    assert table.arrays["val_inputs"].shape == (10000, 1, 28, 28)
    assert (np.bincount(table.arrays["train_labels"]) == 6000).all()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_a_set_that_is_not_there_is_told_with_the_command(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    with pytest.raises(DataError) as caught:
        idx.read(name, folder)
    text = str(caught.value)
    assert f"python -m mpitrain fetch {name} --data-dir '{folder}'" in text
    assert f"{folder / idx.FOLDERS[name] / 'raw'}" in text
    assert "train-images-idx3-ubyte" in text
    assert len(idx.lacking(name, folder)) == 4
    with pytest.raises(DataError, match="there is no folder"):
        idx.read(name, tmp_path / "none")


def test_the_one_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path, made())
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no t10k-labels-idx1-ubyte in") as caught:
        idx.read("mnist", tmp_path)
    assert "t10k-images" not in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_no_file(tmp_path: Path) -> None:
    write(tmp_path, made())
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-labels-idx1-ubyte").mkdir()
    with pytest.raises(DataError, match="no t10k-labels-idx1-ubyte in"):
        idx.read("mnist", tmp_path)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (IMAGES, lambda raw: raw[:-3], r"found 613 bytes, expected 616 .*: it is cut"),
        (
            IMAGES,
            lambda raw: raw + b"ab",
            r"found more than 616 bytes, .*: it is too long",
        ),
        (IMAGES, lambda raw: raw[:9], "found 9 bytes, in the middle of its header"),
        (IMAGES, lambda raw: b"", "expected 00 00 08 03 .*, found an empty file"),
        (
            IMAGES,
            lambda raw: b"<!DOCTYPE html>",
            "begins with b'<!DOCTYPE html>' .*web",
        ),
        (
            IMAGES,
            lambda raw: b"\0\0\x0d\x03" + raw[4:],
            "expected 00 00 08 03 .*, found",
        ),
        (
            LABELS,
            lambda raw: b"\0\0\x08\x03" + raw[4:],
            "expected 00 00 08 01 .*, found",
        ),
        (
            IMAGES,
            lambda raw: gzip.compress(raw)[:-60],
            "ends in the middle of its gzip",
        ),
        (IMAGES, lambda raw: flipped(gzip.compress(raw)), "gzip stream is corrupt"),
        (IMAGES, lambda raw: gzip.compress(raw) + b"abc", "gzip stream is corrupt"),
        (IMAGES, lambda raw: gzip.compress(raw[:-3]), "found 613 bytes unpacked, exp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_broken_file_is_named(
    tmp_path: Path,
    file: str,
    change: Callable[[bytes], bytes],
    words: str,
    ending: str,
) -> None:
    write(tmp_path, made())
    raw = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    (tmp_path / (file + ending)).write_bytes(change(raw))
    with pytest.raises(DataError, match=words) as caught:
        idx.read("mnist", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / (file + ending)}: ")
    assert "To fetch it" in str(caught.value)


def test_what_unpacks_to_more_than_its_header_says_is_not_unpacked(
    tmp_path: Path,
) -> None:
    write(tmp_path, made(), zipped=True)
    file = tmp_path / f"{IMAGES}.gz"
    raw = gzip.decompress(file.read_bytes())
    bomb = b"".join(gzip.compress(bytes(2**20)) for _ in range(500))
    file.write_bytes(gzip.compress(raw) + bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"{IMAGES}.gz: found more than 616 bytes"):
        idx.read("mnist", tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    file.write_bytes(gzip.compress(raw[:4] + b"\xff" * 12) + bomb)
    with pytest.raises(DataError, match=rf"{IMAGES}.gz: its header says 79\d+ bytes"):
        idx.read("mnist", tmp_path)


def flipped(raw: bytes) -> bytes:
    """The same with one byte wrong, in the middle."""
    at = len(raw) // 2
    return raw[:at] + bytes([raw[at] ^ 255]) + raw[at + 1 :]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {LABELS: np.arange(29) % 10},
            f"{LABELS}: found 29 labels, expected 30: .*image",
        ),
        (
            {LABELS: np.arange(30) % 11},
            f"{LABELS}: label 10 at sample 10; exp.* 0 to 9",
        ),
        (
            {LABELS: np.arange(30) % 8},
            f"{LABELS}: there is no .*class 8 .'8'., 9 ",
        ),
        ({IMAGES: np.zeros((0, 5, 4))}, f"{IMAGES}: has no samples"),
        ({IMAGES: np.zeros((30, 0, 4))}, f"{IMAGES}: .*images of 0x4 pixels"),
        (
            {"t10k-images-idx3-ubyte": np.zeros((7, 6, 4))},
            r"t10k-images.*: images of shape \(1, 6, 4\), expected \(1, 5, 4\)",
        ),
        (
            {"t10k-labels-idx1-ubyte": np.full(7, 200)},
            "t10k-labels.*label 200 at sampl",
        ),
    ],
)
def test_a_set_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], words: str
) -> None:
    write(tmp_path, made() | changes)
    with pytest.raises(DataError, match=words):
        idx.read("mnist", tmp_path)

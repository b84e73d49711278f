"""HDF5 files: every layout of images, and what is no set of them refused by name."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import picture

from mpitrain.data.samples import BadSample
from mpitrain.errors import DataError, UsageError
from mpitrain.tasks.image_classification.datasets import hdf5
from mpitrain.tasks.image_classification.datasets.index import build_readers

h5py = pytest.importorskip("h5py")

LABELS = {"train": [0, 1, 2, 1, 0, 2], "val": [2, 0], "test": [1]}


def greys(*shape: int) -> np.ndarray:
    """Images each as gray as its number, the last channel brighter."""
    images = np.empty(shape, np.uint8)
    images[:] = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return images


def write(path: Path, shape: tuple[int, ...] = (6, 8, 8), **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for part, labels in LABELS.items():
            images = greys(len(labels), *shape[1:])
            file.create_dataset(f"{part}/images", data=images, **options)
            file[f"{part}/labels"] = np.array(labels, np.uint8)
    return path


def seen(reader: hdf5.HDF5Reader, indices: range | None = None) -> list:
    """(grey, label) of samples."""
    read = [reader.read(i, None) for i in indices or range(len(reader))]
    return [(int(image.unique()), label) for image, label in read]


ALL = list(enumerate(LABELS["train"]))


@pytest.mark.parametrize(
    ("shape", "channels", "size"),
    [
        ((6, 8, 8), 1, 8),
        ((6, 8, 8, 1), 1, 8),
        ((6, 8, 8, 3), 3, 8),
        ((6, 8, 8, 4), 4, 8),
        ((6, 1, 8, 8), 1, 8),
        ((6, 3, 8, 8), 3, 8),
        ((6, 7, 16, 16), 7, 16),
        ((6, 12, 10, 3), 3, None),
        ((6, 3, 12, 10), 3, None),
        ((6, 3, 32, 32), 3, 32),
    ],
)
@pytest.mark.parametrize("options", [{}, {"chunks": True, "compression": "gzip"}])
def test_every_layout_is_read(
    tmp_path: Path,
    shape: tuple[int, ...],
    channels: int,
    size: int | None,
    options: dict[str, Any],
) -> None:
    path = write(tmp_path / "set.h5", shape, **options)
    table = hdf5.scan(path)
    assert (table.facts["channels"], table.facts["size"]) == (channels, size)
    assert table.classes == ("0", "1", "2")
    assert {name: a.dtype.str for name, a in table.arrays.items()} == {
        f"{part}_labels": "<i8" for part in LABELS
    }
    readers = build_readers(hdf5.HDF5Reader, path, table, size or 9)
    assert {part: len(reader) for part, reader in readers.items()} == {
        "train": 6,
        "val": 2,
        "test": 1,
    }
    assert seen(readers["train"]) == ALL
    for uniform in (None, np.full(4, 0.5)):
        image, label = readers["train"].read(np.int64(3), uniform)
        assert (image.shape, label) == ((channels, size or 9, size or 9), 1)
        assert image.dtype == torch.uint8
    assert json.loads(json.dumps(table.facts)) == table.facts


def test_pixels_stay_where_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (6, 5, 5, 3), dtype=np.uint8)
    path = write(tmp_path / "set.h5", (6, 5, 5, 3))
    with h5py.File(path, "r+") as file:
        file["train/images"][...] = pixels
    reader = build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 5)["train"]
    found = torch.stack([reader.read(i, None)[0] for i in range(6)])
    np.testing.assert_array_equal(found.numpy(), pixels.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("kind", ["variable", "opaque"])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP"])
def test_encoded_images_are_decoded(tmp_path: Path, kind: str, form: str) -> None:
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        for part, labels in LABELS.items():
            files = [picture(grey, form) for grey in range(len(labels))]
            put_encoded(file, f"{part}/images", files, kind)
            file[f"{part}/labels"] = labels
    table = hdf5.scan(path)
    assert (table.facts["channels"], table.facts["size"]) == (3, None)
    assert seen(build_readers(hdf5.HDF5Reader, path, table, 8)["train"]) == ALL


def put_encoded(file: Any, name: str, files: list[bytes], kind: str) -> None:
    if kind == "opaque":
        file[name] = np.array(files, f"V{max(map(len, files))}")
    else:
        bytes_of_any_length = h5py.vlen_dtype(np.uint8)
        images = file.create_dataset(name, len(files), bytes_of_any_length)
        for i, data in enumerate(files):
            images[i] = np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("kind", ["variable", "opaque"])
def test_a_corrupt_jpeg_in_the_middle_is_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "set.h5")
    files = [picture(grey, "JPEG") for grey in range(6)]
    files[3] = files[3][:-60]
    with h5py.File(path, "r+") as file:
        for part in LABELS:
            del file[f"{part}/images"]
            put_encoded(file, f"{part}/images", files[: len(LABELS[part])], kind)
        del file["train/images"]
        put_encoded(file, "train/images", files, kind)
        del file["val"], file["test"]
        for part in ("val", "test"):
            put_encoded(file, f"{part}/images", files[:1], kind)
            file[f"{part}/labels"] = [0]
    reader = build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)["train"]
    with pytest.raises(BadSample, match=r"(?i)set\.h5, train/images\[3\]: .*truncated"):
        reader.read(3, None)
    assert seen(reader, range(4, 6)) == ALL[4:]


def test_the_file_may_be_named_or_its_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "set.hdf5")
    (tmp_path / "README").write_text("a set")
    table = hdf5.scan(tmp_path)
    assert table.digest() == hdf5.scan(path).digest()
    reader = build_readers(hdf5.HDF5Reader, tmp_path, table, 8)["train"]
    assert reader.path == path


@pytest.mark.parametrize("holder", ["/", "train/labels"])
@pytest.mark.parametrize("dtype", [None, "S4"])
def test_classes_are_named_by_an_attribute(
    tmp_path: Path, holder: str, dtype: str | None
) -> None:
    path = write(tmp_path / "set.h5")
    with h5py.File(path, "r+") as file:
        names = ["cat", "dög", "cow"]
        encoded = [name.encode() for name in names]
        file[holder].attrs["classes"] = np.array(encoded, "S4") if dtype else names
    assert hdf5.scan(path).classes == ("cat", "dög", "cow")


def test_only_the_listed_parts_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "set.h5")
    with h5py.File(path, "r+") as file:
        del file["test"]
    assert list(build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)) == [
        "train",
        "val",
    ]


def test_a_file_that_another_has_locked_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "set.h5")
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert (
            seen(build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)["train"])
            == ALL
        )


def test_a_reader_travels_without_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "set.h5")
    reader = build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)["train"]
    assert seen(reader, range(2)) == ALL[:2]
    assert seen(pickle.loads(pickle.dumps(reader))) == ALL


def opened(reader: hdf5.HDF5Reader) -> int:
    """The descriptor that this process reads from."""
    images = hdf5._open_images(reader.path, reader.part)
    return images.file.id.get_vfd_handle()


@pytest.mark.parametrize("options", [{}, {"chunks": (1, 8, 8), "compression": "gzip"}])
def test_processes_read_through_one_reader(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = write(tmp_path / "set.h5", **options)
    reader = build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)["train"]
    assert seen(reader, range(1)) == ALL[:1]
    handle = opened(reader)
    os.lseek(handle, 5, os.SEEK_SET)
    fork = multiprocessing.get_context("fork")

    def work(indices: range, answers: multiprocessing.SimpleQueue) -> None:
        os.lseek(handle, 5, os.SEEK_SET)
        found = [seen(reader, indices) for _ in range(30)]
        os.lseek(opened(reader), 77, os.SEEK_SET)
        answers.put(found)

    halves = (range(3), range(3, 6))
    queues = [fork.SimpleQueue() for _ in halves]
    pairs = list(zip(halves, queues, strict=True))
    workers = [fork.Process(target=work, args=pair) for pair in pairs]
    for worker in workers:
        worker.start()
    for _ in range(30):
        assert seen(reader) == ALL
    for half, answers in pairs:
        assert answers.get() == [ALL[half.start : half.stop]] * 30
    for worker in workers:
        worker.join()
    assert os.lseek(handle, 0, os.SEEK_CUR) != 77  # theirs are other open files


def test_a_file_that_is_cut_short_later_is_a_bad_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "set.h5", (6, 64, 64), chunks=(1, 64, 64))
    reader = build_readers(hdf5.HDF5Reader, path, hdf5.scan(path), 8)["train"]
    os.truncate(path, 9000)
    with pytest.raises(BadSample, match=r"set\.h5, train/images\[5\]: "):
        reader.read(5, None)
    path.unlink()
    hdf5._open_images.cache_clear()
    with pytest.raises(BadSample, match=r"train/images\[0\]: .*No such file"):
        reader.read(0, None)


def changed(name: str, value: Any) -> Callable[[Path], None]:
    """Replace something in the file, or remove it where `value` is None."""

    def harm(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value

    return harm


def classes(names: Any) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file.attrs["classes"] = names

    return harm


def left_open(path: Path) -> None:
    code = (
        "import h5py, os, sys\n"
        "file = h5py.File(sys.argv[1], 'w', libver='latest')\n"
        "file.flush(); os._exit(0)"
    )
    path.unlink()
    subprocess.run([sys.executable, "-c", code, path], check=True)


def flat(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["images"], file["labels"] = greys(6, 8, 8), LABELS["train"]


def no_samples(path: Path) -> None:
    changed("val/labels", np.empty(0, int))(path)
    changed("val/images", np.empty((0, 8, 8), np.uint8))(path)


def external(kind: str) -> Callable[[Path], None]:
    """Let the images of one part be read from elsewhere."""

    def harm(path: Path) -> None:
        other = write(path.with_name("other"))
        with h5py.File(path, "a") as file:
            del file["train/images"]
            if kind == "link":
                file["train/images"] = h5py.ExternalLink(other.name, "/train/images")
            elif kind == "soft":
                file["train/images"] = h5py.SoftLink("/val/images")
            elif kind == "raw":
                file["train"].create_dataset(
                    "images", (6, 8, 8), "u1", external=[("/etc/passwd", 0, 6 * 64)]
                )
            else:
                layout = h5py.VirtualLayout((6, 8, 8), "u1")
                layout[:] = h5py.VirtualSource(other, "train/images", (6, 8, 8))
                file["train"].create_virtual_dataset("images", layout)

    return harm


VARIABLE = h5py.string_dtype()


def bits(count: int, dtype: Any = int) -> np.ndarray:
    return np.array((LABELS["train"] * 2)[:count], dtype)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "set.h5: expected one file.*--data-dir"),
        (lambda p: p.write_bytes(b""), "set.h5: cannot be read as HDF5"),
        (lambda p: p.write_bytes(b"PK\3\4" * 99), "set.h5: cannot be read as HDF5"),
        (lambda p: os.truncate(p, 3000), "set.h5: cannot be read as HDF5.*truncated"),
        (flat, "no group 'train'.*found 'images', 'labels'"),
        (changed("train", None), "no group 'train'.*'test', 'val'"),
        (changed("val", None), "no group 'val'.*'test', 'train'"),
        (changed("val", greys(2, 8, 8)), "no group 'val'"),
        (changed("val/images", None), "val: no dataset 'images'.*found 'labels'"),
        (changed("val/labels", None), "val: no dataset 'labels'.*found 'images'"),
        (changed("train/labels", bits(5)), "train/labels: found 5 labels, expected 6"),
        (changed("train/labels", bits(6, float)), "train/labels: float64.*integers"),
        (changed("train/labels", bits(6, bool)), "train/labels: bool.*integers"),
        (changed("train/labels", bits(6)[:, None]), r"labels: .*\(6, 1\).*\(N,\)"),
        (
            changed("train/labels", bits(6) - 1),
            "train/labels: found 3 classes .* from -1 to 1",
        ),
        (
            changed("train/labels", bits(6) * 2),
            "train/labels: found 3 classes .* from 0 to 4",
        ),
        (changed("train/labels", bits(6) + 10**12), "train/labels: found 3 classes"),
        (
            changed("val/labels", bits(2) + 2),
            "val/labels: label 3 at sample 1; expected 0 to 2",
        ),
        (classes(["a", "b"]), "train/labels: found 3 .* 0 to 1 "),
        (classes(["a", "b", "c", "d"]), "train/labels: found 3 .* 0 to 3 "),
        (classes("a b c"), "classes: .*'a b c'.*list"),
        (classes([1, 2, 3]), "classes: .*list"),
        (classes(["a", "b", "a"]), "train/labels: found the class 'a' twice"),
        (classes(np.array([b"a", b"b", b"\xe9"])), "classes: .*expected .* UTF-8"),
        (
            classes(np.array([b"a", b"b", b"\xe9"], VARIABLE)),
            "classes: .*expected .* UTF-8",
        ),
        (left_open, "h5: cannot be read as HDF5.* no program .*: h5clear -s .*set.h5"),
        (external("link"), "/train: no dataset 'images' in this file itself"),
        (external("soft"), "/train: no dataset 'images' in this file itself"),
        (external("raw"), "/train: no dataset 'images' in this file itself"),
        (external("virtual"), "/train: no dataset 'images' in this file itself"),
        (no_samples, r"val/labels: int64 of shape \(0,\)"),
        (changed("train/images", greys(6, 8, 8) / 255), "train/images: float64.*uint8"),
        (changed("train/images", greys(6, 8, 8) * 1.0), "images: float64.*astype"),
        (changed("train/images", bits(6)), "train/images: int64.*uint8"),
        (changed("train/images", greys(6, 64)), r"train/images: .*\(6, 64\).*\(N, H"),
        (changed("train/images", greys(6, 9, 9, 7)), r"\(6, 9, 9, 7\).*\(N, H"),
        (changed("train/images", h5py.Empty("u1")), r"shape None.*\(N, H, W\)"),
        (changed("train/images", greys(6, 0, 8)), r"\(6, 0, 8\).*\(N, H"),
        (changed("train/images", ["a.jpg"] * 6), "train/images: .*uint8"),
        (
            changed("val/images", greys(2, 8, 8, 3)),
            "val/images: 3 channels, expected 1",
        ),
    ],
)
def test_what_is_no_set_is_refused(
    tmp_path: Path, harm: Callable[[Path], Any], message: str
) -> None:
    path = write(tmp_path / "set.h5")
    harm(path)
    with pytest.raises(DataError, match=f"(?s){message}"):
        hdf5.scan(path)


def test_a_process_that_refuses_a_virtual_data_set_ends_with_status_1(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "set.h5")
    external("virtual")(path)
    code = (
        "import sys; from pathlib import Path\n"
        "from mpitrain.tasks.image_classification.datasets import hdf5\n"
        "try: hdf5.scan(Path(sys.argv[1]))\n"
        "except Exception as error: kept = error; import os, builtins\n"
        "builtins.kept = kept; import ctypes; ctypes.CDLL(None).exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], check=False)
    assert done.returncode == 1


def test_the_filters_of_hdf5plugin_are_there_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hdf5plugin.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hdf5plugin", raising=False)
    hdf5.scan(write(tmp_path / "set.h5"))
    assert "hdf5plugin" in sys.modules


def test_a_folder_holds_one_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        hdf5.scan(tmp_path)
    write(tmp_path / "a.h5")
    write(tmp_path / "b.hdf5")
    with pytest.raises(DataError, match=r"found 'a\.h5', 'b\.hdf5'"):
        hdf5.scan(tmp_path)


def test_without_h5py_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "set.h5")
    table = hdf5.scan(path)
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    for ask in (
        lambda: hdf5.scan(path),
        lambda: build_readers(hdf5.HDF5Reader, path, table, 8),
    ):
        with pytest.raises(UsageError, match=r"pip install 'mpitrain\[hdf5\]'"):
            ask()

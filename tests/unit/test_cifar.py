"""CIFAR: Python 2's pickles read without running what is in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import opcodes, python2_pickle

from mpitrain.data import cifar
from mpitrain.errors import DataError

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
TRAIN = {"cifar10": [f"data_batch_{i}" for i in range(1, 6)], "cifar100": ["train"]}
VAL = {"cifar10": "test_batch", "cifar100": "test"}
META = {"cifar10": "batches.meta", "cifar100": "meta"}
LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


def made(name: str, per_file: int = 40) -> dict[str, Any]:
    """What the files of a small set hold, by file name."""
    num_classes = 10 if name == "cifar10" else 100
    per_file = max(per_file, num_classes)
    random = np.random.default_rng(1)
    files: dict[str, Any] = {}
    for file in [*TRAIN[name], VAL[name]]:
        labels = [int(i) for i in random.permutation(per_file) % num_classes]
        data = random.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        files[file] = {"data": data, LABELS[name]: labels, "batch_label": file}
    key = "label_names" if name == "cifar10" else "fine_label_names"
    files[META[name]] = {key: [f"class{i}" for i in range(num_classes)]}
    return files


def write(
    folder: Path, files: dict[str, Any], dumps: Callable[[Any], bytes] = python2_pickle
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, value in files.items():
        (folder / file).write_bytes(dumps(value))


def archive(name: str, data_dir: Path) -> Path:
    """Put the folder into torchvision's archive, and take it away."""
    folder = data_dir / FOLDERS[name]
    path = data_dir / f"{FOLDERS[name].removesuffix('-batches-py')}"
    path = path.with_name(path.name.removesuffix("-python") + "-python.tar.gz")
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    subprocess.run(["rm", "-r", folder], check=True)
    return path


def python3(value: Any) -> bytes:
    """Pickle a value as today's Python and numpy do, with protocol 2."""
    return pickle.dumps(value, protocol=2)


@pytest.mark.parametrize("dumps", [python2_pickle, python3])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("place", ["below", "itself", "archive"])
def test_a_set_is_read_from_each_place(
    tmp_path: Path, name: str, place: str, dumps: Callable[[Any], bytes]
) -> None:
    files = made(name)
    folder = tmp_path / FOLDERS[name]
    write(folder, files, dumps)
    if place == "archive":
        folder = archive(name, tmp_path)
    data_dir = folder if place == "itself" else tmp_path
    table = cifar.read(name, data_dir)
    for part, names in (("train", TRAIN[name]), ("val", [VAL[name]])):
        inputs, labels = table.arrays[f"{part}_inputs"], table.arrays[f"{part}_labels"]
        assert inputs.dtype == np.uint8
        assert labels.dtype == np.int64
        data = np.concatenate([files[n]["data"] for n in names])
        assert (inputs == data.reshape(-1, 3, 32, 32)).all()
        assert labels.tolist() == [i for n in names for i in files[n][LABELS[name]]]
    assert table.classes[:2] == ("class0", "class1")
    assert cifar.find(name, data_dir) == folder
    assert cifar.lacking(name, data_dir) == []


def test_files_of_different_length_and_order_are_read(tmp_path: Path) -> None:
    files = made("cifar10")
    some = files["data_batch_3"]
    some["data"] = np.asfortranarray(some["data"][:7])
    some["labels"] = some["labels"][:7]
    write(tmp_path, files)
    inputs = cifar.read("cifar10", tmp_path).arrays["train_inputs"]
    assert len(inputs) == 167
    assert (inputs[80:87].reshape(7, -1) == some["data"]).all()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_torchvision_reads_the_same(tmp_path: Path, name: str) -> None:
    from torchvision import datasets

    write(tmp_path / FOLDERS[name], made(name))

    def listed(file: str) -> list[str]:
        raw = (tmp_path / FOLDERS[name] / file).read_bytes()
        return [file, hashlib.md5(raw).hexdigest()]

    base = getattr(datasets, name.upper())

    class Ours(base):
        train_list = [listed(file) for file in TRAIN[name]]  # noqa: RUF012
        test_list = [listed(VAL[name])]  # noqa: RUF012
        meta = base.meta | {"md5": listed(META[name])[1]}

    theirs = Ours(tmp_path)
    table = cifar.read(name, tmp_path)
    assert (theirs.data.transpose(0, 3, 1, 2) == table.arrays["train_inputs"]).all()
    assert theirs.targets == table.arrays["train_labels"].tolist()
    assert theirs.classes == list(table.classes)


def test_a_set_that_is_not_there_is_told_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        cifar.read("cifar100", tmp_path)
    text = str(caught.value)
    assert f"python -m mpitrain fetch cifar100 --data-dir {tmp_path}" in text
    assert "cifar-100-python.tar.gz" in text
    assert len(cifar.lacking("cifar100", tmp_path)) == 3


def test_the_one_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    write(tmp_path / FOLDERS["cifar10"], made("cifar10"))
    (tmp_path / FOLDERS["cifar10"] / "data_batch_4").unlink()
    with pytest.raises(DataError, match="no data_batch_4 in"):
        cifar.read("cifar10", tmp_path)
    archive("cifar10", tmp_path)
    with pytest.raises(DataError, match=r"-python.tar.gz: has no .*py/data_batch_4"):
        cifar.read("cifar10", tmp_path)


class Hostile:
    """A pickle that runs a command when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "call",
    [
        lambda mark: (os.system, f"touch {mark}"),
        lambda mark: (os.mkdir, str(mark)),
        lambda mark: (eval, f"open({str(mark)!r}, 'w').close()"),
        lambda mark: (np.save, str(mark), 1),
        lambda mark: (np.memmap, str(mark), "uint8", "w+", 0, (1,)),
    ],
)
def test_a_hostile_pickle_is_refused_and_not_run(
    tmp_path: Path, call: Callable[[Path], tuple[Any, ...]], protocol: int
) -> None:
    mark = tmp_path / "touched"
    files = made("cifar10")
    write(tmp_path, files)
    hostile = {"data": Hostile(*call(mark)), "labels": []}
    raw = pickle.dumps(hostile, protocol=protocol)
    (tmp_path / "data_batch_2").write_bytes(raw)
    with pytest.raises(DataError, match=r"data_batch_2: .* asks for .*; .* not run"):
        cifar.read("cifar10", tmp_path)
    assert not list(tmp_path.glob("touched*"))
    pickle.loads(raw)  # a hostile one indeed
    assert list(tmp_path.glob("touched*"))


def test_only_latin1_is_encoded(tmp_path: Path) -> None:
    write(tmp_path, made("cifar10"))
    raw = b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0hex\x86R."
    (tmp_path / "data_batch_2").write_bytes(raw)
    with pytest.raises(DataError, match=r"data_batch_2: .*'hex'"):
        cifar.read("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-100], "ends in the middle of its pickle|no pickle"),
        (lambda raw: raw[:40], "ends in the middle of its pickle|no pickle"),
        (lambda raw: raw + b"abc", "3 bytes too many after its pickle"),
        (lambda raw: b"", "found an empty file"),
        (lambda raw: b"<html>not found", "begins with b'<html>not found' .*web page"),
        (lambda raw: b"\x80\x02\xff\xff\xff", "no pickle"),
        (lambda raw: python2_pickle([1, 2]), "expected a dictionary, found list"),
        (lambda raw: python2_pickle({"data": 1}), "has no 'labels'; it has data"),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    write(tmp_path, made("cifar10"))
    file = tmp_path / "data_batch_2"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=words) as caught:
        cifar.read("cifar10", tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    assert "To fetch it" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": [0] * 39}, "found 39 labels, expected 40: .*image"),
        ({"labels": [*[0] * 39, 10]}, "label 10 at sample 39; expected 0 to 9"),
        ({"labels": [-1] * 40}, "label -1 at sample 0; expected 0 to 9"),
        ({"labels": ["3"] * 40}, "labels are not a list of whole numbers"),
        ({"labels": 7}, "labels are not a list of whole numbers"),
        (
            {"data": np.zeros((40, 3071), np.uint8)},
            r"expected .* \(N, 3072\), found .* \(40, 3071\)",
        ),
        ({"data": np.zeros((40, 3072), np.int16)}, "found an array of i2 and shape"),
        ({"data": [1, 2]}, "expected a uint8 array .*, found list"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    files = made("cifar10")
    files["data_batch_5"] |= change
    write(tmp_path, files)
    with pytest.raises(DataError, match=words) as caught:
        cifar.read("cifar10", tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'data_batch_5'}: ")


def test_an_array_shorter_than_its_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, made("cifar10"))
    file = tmp_path / "test_batch"
    forty, fifty = (b"(" + opcodes(n) + opcodes(3072) + b"t" for n in (40, 50))
    assert file.read_bytes().count(forty) == 1
    file.write_bytes(file.read_bytes().replace(forty, fifty))
    with pytest.raises(
        DataError, match=r"test_batch: found 122880 bytes, exp.* 153600 "
    ):
        cifar.read("cifar10", tmp_path)


def test_missing_classes_and_samples_are_told(tmp_path: Path) -> None:
    files = made("cifar10")
    for file in TRAIN["cifar10"]:
        files[file]["labels"] = [i % 9 for i in range(40)]
    write(tmp_path, files)
    with pytest.raises(DataError, match=r"no sample .* class 9 \('class9'\)"):
        cifar.read("cifar10", tmp_path)
    files["test_batch"] |= {"data": np.zeros((0, 3072), np.uint8), "labels": []}
    write(tmp_path, files)
    with pytest.raises(DataError, match="test_batch: has no samples"):
        cifar.read("cifar10", tmp_path)


def test_names_of_classes_that_are_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path, made("cifar10") | {"batches.meta": {"label_names": [1]}})
    with pytest.raises(DataError, match=r"batches.meta: .*list of names"):
        cifar.read("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[: len(raw) // 2], "ends in the middle|cut short"),
        (lambda raw: raw[:-6], "ends in the middle|cut short"),
        (lambda raw: raw[:-8] + b"abcd" + raw[-4:], "corrupt"),
        (lambda raw: b"<html>", "begins with b'<html>' .*web page"),
        (lambda raw: gzip.compress(b"no archive" * 100), "no tar archive"),
        (lambda raw: gzip.compress(gzip.decompress(raw)[:9999]), "cut short"),
    ],
)
def test_a_broken_archive_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    write(tmp_path / FOLDERS["cifar10"], made("cifar10"))
    path = archive("cifar10", tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=words) as caught:
        cifar.read("cifar10", tmp_path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_link_in_the_archive_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in ("train", "test", "meta"):
            link = tarfile.TarInfo(f"cifar-100-python/{file}")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link, io.BytesIO())
    with pytest.raises(DataError, match="has no cifar-100-python/train"):
        cifar.read("cifar100", tmp_path)


def test_an_archive_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "MOST_BYTES", 1 << 20)
    write(tmp_path / FOLDERS["cifar10"], made("cifar10"))
    (tmp_path / FOLDERS["cifar10"] / "a_bomb").write_bytes(bytes(4 << 20))
    path = archive("cifar10", tmp_path)
    with pytest.raises(DataError, match=f"{path.name}: unpacks to more than 1048576"):
        cifar.read("cifar10", tmp_path)

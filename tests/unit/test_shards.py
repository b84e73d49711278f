"""WebDataset shards: samples are found by their place, and what is broken is named."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import picture, write_tar

from mpitrain.data.samples import BadSample
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets import shards
from mpitrain.tasks.image_classification.datasets.index import build_readers

Members = list[tuple[str, bytes]]


def sample(key: str, label: int, grey: int = 0) -> Members:
    return [(f"{key}.png", picture(grey)), (f"{key}.cls", str(label).encode())]


def numbered(count: int, first: int = 0) -> Members:
    """Samples of three classes, each as gray as its number."""
    return [m for i in range(first, first + count) for m in sample(f"k{i}", i % 3, i)]


@pytest.fixture
def greys(tmp_path: Path) -> Path:
    """Shards of 7, 0 and 5 samples to train, one of 3 to validate."""
    data_dir = tmp_path / "greys"
    write_tar(data_dir / "train" / "000.tar", numbered(7))
    write_tar(data_dir / "train" / "001.tar", [])
    write_tar(data_dir / "train" / "002.tar", numbered(5, 7))
    write_tar(data_dir / "val" / "000.tar", numbered(3))
    return data_dir


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def seen(reader: shards.ShardReader, indices: range | None = None) -> list:
    """(grey, label) of samples."""
    read = [reader.read(i, None) for i in indices or range(len(reader))]
    return [(int(image.unique()), label) for image, label in read]


def test_every_sample_is_read_in_any_order(greys: Path) -> None:
    table = shards.scan(greys)
    readers = build_readers(shards.ShardReader, greys, table, 8)
    assert [(p, len(readers[p])) for p in readers] == [("train", 12), ("val", 3)]
    assert table.classes == ("0", "1", "2")
    assert table.facts["train_shards"] == [f"train/00{i}.tar" for i in range(3)]
    assert table.facts["channels"] == 3
    assert json.loads(json.dumps(table.facts)) == table.facts
    assert table.arrays["train_shards"].tolist() == [0] * 7 + [2] * 5
    kinds = {name: array.dtype.str for name, array in table.arrays.items()}
    assert {name: kind for name, kind in kinds.items() if "train" in name} == {
        "train_shards": "<i4",
        "train_offsets": "<i8",
        "train_sizes": "<i8",
        "train_labels": "<i8",
    }
    assert seen(readers["train"]) == [(i, i % 3) for i in range(12)]
    backwards = range(11, -1, -1)
    assert seen(readers["train"], backwards) == [(i, i % 3) for i in backwards]
    image, _ = readers["train"].read(np.int64(3), np.full(4, 0.5))
    assert (image.dtype, image.shape) == (torch.uint8, (3, 8, 8))


@pytest.mark.parametrize(
    "form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
@pytest.mark.parametrize("folder", ["", "./", "a.b/c/", f"{'d' * 80}/{'e' * 90}/"])
def test_every_dialect_of_tar_is_read(tmp_path: Path, form: int, folder: str) -> None:
    members = [(folder + name, data) for name, data in numbered(3)]
    for part in ("train", "val", "test"):
        write_tar(tmp_path / f"some-{part}-0.tar", members, form)
    readers = build_readers(shards.ShardReader, tmp_path, shards.scan(tmp_path), 8)
    assert list(readers) == ["train", "val", "test"]
    assert seen(readers["test"]) == [(i, i) for i in range(3)]


def test_what_is_not_of_a_sample_is_passed_over(tmp_path: Path) -> None:
    for part in ("train", "validation"):
        members = [
            ("a/", b""),
            ("LICENSE", b"free"),
            ("a/._0.png", b"of macOS"),
            ("a/0.seg.png", b"a mask"),
            ("a/0.JSON", b'{"label": 7}'),
            ("a/0.JPG", picture(9, "JPEG")),
            ("a/0.cls", b" 0\n"),
            ("a/1.txt", b"words"),
            ("a/1.json", b'{"cls": 1, "label": 1, "caption": "\xc3\xa9"}'),
            ("a/1.webp", picture(20, "WEBP")),
        ]
        write_tar(tmp_path / f"x-{part}-0.tar", members)
    (tmp_path / "classes.txt").write_text("dös\ncat\n\n")
    table = shards.scan(tmp_path)
    assert table.classes == ("dös", "cat")
    assert seen(build_readers(shards.ShardReader, tmp_path, table, 8)["val"]) == [
        (9, 0),
        (20, 1),
    ]


def test_at_most_sixteen_shards_are_open_at_once(tmp_path: Path) -> None:
    for i in range(40):
        write_tar(tmp_path / "train" / f"{i:02}.tar", numbered(1, i))
    write_tar(tmp_path / "val" / "0.tar", numbered(1))
    reader = build_readers(shards.ShardReader, tmp_path, shards.scan(tmp_path), 8)[
        "train"
    ]
    shards._open.cache_clear()
    before = num_open()
    for _ in range(2):
        assert seen(reader) == [(i, i % 3) for i in range(40)]
    assert num_open() - before == 16
    copy = pickle.loads(pickle.dumps(reader))
    assert seen(copy, range(3)) == [(i, i) for i in range(3)]
    assert num_open() - before == 16


def opened(reader: shards.ShardReader) -> int:
    return shards._open(reader.paths[0])


def test_processes_read_through_one_reader(greys: Path) -> None:
    reader = build_readers(shards.ShardReader, greys, shards.scan(greys), 8)["train"]
    assert seen(reader, range(1)) == [(0, 0)]
    handle = opened(reader)
    os.lseek(handle, 5, os.SEEK_SET)
    fork = multiprocessing.get_context("fork")

    def work(indices: range, answers: multiprocessing.SimpleQueue) -> None:
        found = [seen(reader, indices) for _ in range(30)]
        answers.put((found, os.lseek(opened(reader), 0, os.SEEK_CUR)))

    halves = (range(6), range(6, 12))
    queues = [fork.SimpleQueue() for _ in halves]
    pairs = list(zip(halves, queues, strict=True))
    workers = [fork.Process(target=work, args=pair) for pair in pairs]
    for worker in workers:
        worker.start()
    assert seen(reader) == [(i, i % 3) for i in range(12)]
    for half, answers in pairs:
        found, position = answers.get()
        assert found == [[(i, i % 3) for i in half]] * 30
        assert position == 0  # opened anew, not the file of the parent
    for worker in workers:
        worker.join()
    assert os.lseek(handle, 0, os.SEEK_CUR) == 5


def test_a_shard_cut_short_after_the_scan_is_a_bad_sample(greys: Path) -> None:
    table = shards.scan(greys)
    reader = build_readers(shards.ShardReader, greys, table, 8)["train"]
    path = greys / "train" / "002.tar"
    offset = int(table.arrays["train_offsets"][9])
    os.truncate(path, offset + 10)
    assert seen(reader, range(9)) == [(i, i % 3) for i in range(9)]
    place = rf"002\.tar, sample 2, .* from {offset}: "
    with pytest.raises(BadSample, match=place + "found 10 bytes"):
        reader.read(9, None)
    path.unlink()
    shards._open.cache_clear()
    with pytest.raises(BadSample, match=r"002\.tar, sample 0, .*: No such file"):
        reader.read(7, None)


def test_a_corrupt_image_in_the_middle_is_named(greys: Path) -> None:
    members = numbered(7)
    members[4] = ("k2.jpg", picture(2, "JPEG")[:-40])
    write_tar(greys / "train" / "000.tar", members)
    reader = build_readers(shards.ShardReader, greys, shards.scan(greys), 8)["train"]
    place = r"train/000\.tar, sample 2, \d+ bytes from \d+: "
    with pytest.raises(BadSample, match=place):
        reader.read(2, None)
    assert seen(reader, range(3, 4)) == [(3, 0)]


def replaced(*members: tuple[str, bytes]) -> Callable[[Path], object]:
    """Put members after those of the last shard."""
    return lambda d: write_tar(d / "train" / "002.tar", [*numbered(5, 7), *members])


def truncated(end: Callable[[tarfile.TarFile], int]) -> Callable[[Path], None]:
    def harm(data_dir: Path) -> None:
        path = data_dir / "train" / "000.tar"
        with tarfile.open(path) as tar:
            position = end(tar)
        os.truncate(path, position)

    return harm


def overwritten(find: Callable[[tarfile.TarFile], int]) -> Callable[[Path], None]:
    def harm(data_dir: Path) -> None:
        path = data_dir / "train" / "000.tar"
        with tarfile.open(path) as tar:
            position = find(tar)
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"garbage" * 20)

    return harm


def content(data: bytes, name: str = "002.tar") -> Callable[[Path], object]:
    return lambda d: (d / "train" / name).write_bytes(data)


def negative(data_dir: Path) -> None:
    """Overwrite a header with one that says: go back."""
    member = tarfile.TarInfo("k5.jpg")
    member.size = -4000
    path = data_dir / "train" / "000.tar"
    with tarfile.open(path) as tar:
        position = tar.getmember("k5.png").offset
    with path.open("r+b") as file:
        file.seek(position)
        file.write(member.tobuf(tarfile.GNU_FORMAT))


def link(data_dir: Path) -> None:
    with tarfile.open(data_dir / "train" / "002.tar", "a") as tar:
        member = tarfile.TarInfo("x.jpg")
        member.type, member.linkname = tarfile.LNKTYPE, "k7.png"
        tar.addfile(member)
        member = tarfile.TarInfo("x.cls")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"1"))


def huge(data_dir: Path) -> None:
    """A member of ten gigabytes, of which no byte is on the disk."""
    member = tarfile.TarInfo("k5.jpg")
    member.size = 10 << 30
    with (data_dir / "train" / "000.tar").open("wb") as file:
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.truncate(11 << 30)


def fifo(data_dir: Path) -> None:
    (data_dir / "train" / "000.tar").unlink()
    os.mkfifo(data_dir / "train" / "000.tar")


def compressed(data_dir: Path) -> None:
    path = data_dir / "train" / "000.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))


def no_shards(data_dir: Path) -> None:
    for path in (data_dir / "train").iterdir():
        path.rename(path.with_suffix(".tar.gz"))


def no_samples(data_dir: Path) -> None:
    (data_dir / "train" / "000.tar").unlink()
    (data_dir / "train" / "002.tar").unlink()


def unnamed_part(data_dir: Path) -> None:
    for part in ("train", "val"):
        (data_dir / part).rename(data_dir / f"{part}-old")
        write_tar(data_dir / f"{part}.tar", numbered(3))
    write_tar(data_dir / "extra.tar", numbered(3))


PICTURE = ("x.jpg", picture(1, "JPEG"))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "train").rename(d / "t"), r"greys: no shards of 'train'"),
        (lambda d: (d / "val").rename(d / "v"), r"greys: no shards of 'val'"),
        (lambda d: d.rename(d.parent / "x"), "greys: no shards of 'train'.*--data-dir"),
        (no_shards, "no shards of 'train'"),
        (no_samples, r"greys: no samples in the 1 shards of 'train'"),
        (unnamed_part, "extra.tar: expected one of the words train, val and"),
        (compressed, "000.tar: not a tar file.*gunzip"),
        (content(b"BZh91AY"), "002.tar: not a tar file, .* or compressed"),
        (content(b""), "002.tar: not a tar file"),
        (content(b"<html>" * 500), r"002.tar: not a tar file"),
        (content(b"short"), r"002.tar: not a tar file"),
        (
            truncated(lambda t: t.getmembers()[4].offset_data + 9),
            "not a tar file, trunc",
        ),
        (
            truncated(lambda t: t.getmembers()[-1].offset_data + 1),
            "not a tar file, trunc",
        ),
        (truncated(lambda t: t.getmembers()[4].offset + 100), "not a tar file, trunc"),
        (
            truncated(lambda t: t.getmembers()[4].offset),
            r"not a tar file.*no end mark at byte \d+",
        ),
        (truncated(lambda t: t.getmembers()[5].offset_data), "not a tar file, trunc"),
        (
            overwritten(lambda t: t.getmembers()[5].offset),
            r"not a tar file.*no end mark at byte \d+",
        ),
        (negative, "000.tar: not a tar file.*bytes"),
        (huge, r"000.tar: 'k5.jpg' at byte 0 has 10737418240 bytes and type"),
        (fifo, "000.tar: not a regular file"),
        (replaced(PICTURE, ("x.json", b"[" * 100_000)), "sample 'x' has label"),
        (replaced(PICTURE), "sample 'x' has 'jpg'; expected one image"),
        (replaced(("x.cls", b"1")), "sample 'x' has .*; expected one image"),
        (replaced(("x.txt", b"1")), "sample 'x' has .*; expected one image"),
        (
            replaced(PICTURE, ("x.png", b""), ("x.cls", b"1")),
            "'x' has .*; expected one image",
        ),
        (replaced(PICTURE, PICTURE, ("x.cls", b"1")), "'x' has a member twice"),
        (replaced(PICTURE, ("x.cls", b"cat")), r"'x' .* label b'cat'; expected"),
        (replaced(PICTURE, ("x.cls", b"")), r"'x' .* label b''; expected"),
        (replaced(PICTURE, ("x.cls", b"-1")), "'x' has label -1;"),
        (replaced(PICTURE, ("x.cls", b"9" * 30)), "'x' has label 9+;"),
        (replaced(PICTURE, ("x.json", b"{")), "'x' has label b'{'"),
        (replaced(PICTURE, ("x.json", b"[1]")), "'x' has label .*'label' or 'cls'"),
        (
            replaced(PICTURE, ("x.json", b'{"l": 1}')),
            "'x' has label .*'label' or 'cls'",
        ),
        (replaced(PICTURE, ("x.json", b'{"cls": true}')), r"'x' .* label True"),
        (replaced(PICTURE, ("x.json", b'{"label": "1"}')), r"'x' .* label '1'"),
        (replaced(PICTURE, ("x.cls", b"4")), r"train: found 4 classes .* from 0 to 4"),
        (replaced(*sample("k7", 1)), "002.tar: sample 'k7' has a member twice"),
        (link, r"002.tar: 'x.jpg' at byte \d+ has .*plain file"),
    ],
)
def test_what_is_no_set_of_shards_is_refused(
    greys: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(greys)
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        shards.scan(greys)
    assert ("not a tar file" in str(caught.value)) == ("not a tar file" in message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\n", "train: found 3 .* 0 to 1 "),
        ("a\nb\nc\nd", "train: found 3 .* 0 to 3 "),
        ("a\nb\na", "train: found the class 'a' twice"),
        ("a\nb\n\udce9", r"classes\.txt: byte 4 is not UTF-8.* iconv"),
    ],
)
def test_names_of_classes_must_fit_the_labels(
    greys: Path, text: str, message: str
) -> None:
    (greys / "classes.txt").write_bytes(os.fsencode(text))
    with pytest.raises(DataError, match=message):
        shards.scan(greys)


def test_names_of_classes_may_be_written_on_windows(greys: Path) -> None:
    (greys / "classes.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\nd\xc3\xb6s\r\n")
    assert shards.scan(greys).classes == ("a", "b", "dös")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "long" * 60])
def test_every_place_where_a_shard_is_cut_is_noticed(
    greys: Path, form: int, prefix: str
) -> None:
    path = greys / "train" / "002.tar"
    write_tar(path, [(prefix + name, data) for name, data in numbered(5)], form)
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        end = max(m.offset_data + 512 for m in tar.getmembers())
    for length in range(1, end + 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(
            DataError, match=r"002\.tar: not a tar file, truncated or broken"
        ):
            shards.scan(greys)


def test_an_epoch_goes_through_windows_of_eight_shards() -> None:
    of = np.repeat(np.arange(40, dtype=np.int32), 25)
    order = shards.order(of, seed=3, epoch=4)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(1000))
    windows = [of[order[i : i + 200]] for i in range(0, 1000, 200)]
    assert [len(set(window)) for window in windows] == [8] * 5
    assert len({frozenset(window.tolist()) for window in windows}) == 5
    assert all(len(set(window[:40])) > 5 for window in windows)  # mixed inside
    np.testing.assert_array_equal(order, shards.order(of, seed=3, epoch=4))
    assert order.tolist() != shards.order(of, seed=3, epoch=5).tolist()
    assert order.tolist() != shards.order(of, seed=4, epoch=4).tolist()
    assert order[:5].tolist() == FIRST  # on every machine, for ever
    assert len(shards.order(np.empty(0, np.int32), seed=1, epoch=1)) == 0


FIRST = [243, 614, 728, 189, 602]

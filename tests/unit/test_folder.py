"""Folders of images: what torchvision's ImageFolder finds, and what is refused."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from mpitrain.data.samples import BadSample
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets import folder
from mpitrain.tasks.image_classification.datasets.index import build_readers


def write(path: Path | bytes, grey: int = 0) -> None:
    path = Path(os.fsdecode(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    form = {".jpg": "JPEG", ".jpeg": "JPEG", ".ppm": "PPM"}.get(path.suffix.lower())
    with path.open("wb") as file:
        Image.new("RGB", (12, 10), (grey, grey, grey)).save(file, form or "PNG")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes, subfolders, endings in either case, things that are no images."""
    data_dir = tmp_path / "pets"
    names = ("b.jpg", "a.JPEG", "z/c.png", "z-y/d.png", "z/y/e.PnG", "z.ppm", "10.png")
    for number, name in enumerate(names):
        write(data_dir / "train" / "dog" / name, 10 * number)
        write(data_dir / "train" / "cat" / name, 10 * number + 160)
    for part in ("val", "test"):
        write(data_dir / part / "cat" / "v.png", 1)
        write(data_dir / part / "dog" / "w.png", 2)
    (data_dir / "train" / "dog" / "notes.txt").write_text("good dogs")
    (data_dir / "train" / "README").write_text("pets")
    return data_dir


def test_classes_and_samples_are_those_of_image_folder(pets: Path) -> None:
    table = folder.scan(pets)
    readers = build_readers(folder.FolderReader, pets, table, 8)
    assert list(readers) == ["train", "val", "test"]
    for part, reader in readers.items():
        expected = ImageFolder(pets / part)
        assert list(table.classes) == expected.classes
        found = [
            (str(reader.path(i)), reader.read(i, None)[1]) for i in range(len(reader))
        ]
        assert found == expected.samples
    assert len(readers["train"]) == 14


def test_the_table_is_numbers_only(pets: Path) -> None:
    table = folder.scan(pets)
    assert {
        name: a.dtype.str for name, a in table.arrays.items() if "train" in name
    } == {"train_names": "|u1", "train_ends": "<i8", "train_labels": "<i8"}
    names = table.arrays["train_names"].tobytes()
    assert names.startswith(b"cat/10.pngcat/a.JPEGcat/b.jpg")
    assert table.arrays["train_ends"][-1] == len(names)
    assert table.facts["channels"] == 3
    assert table.digest() == folder.scan(pets).digest()


def test_a_sample_is_an_image_and_a_label(pets: Path) -> None:
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    image, label = pickle.loads(pickle.dumps(reader)).read(np.int64(0), np.full(4, 0.5))
    assert (image.dtype, image.shape, label) == (torch.uint8, (3, 8, 8), 0)
    assert image.unique().tolist() == [220]


def test_only_the_listed_parts_are_read(pets: Path) -> None:
    shutil.rmtree(pets / "test")
    assert list(build_readers(folder.FolderReader, pets, folder.scan(pets), 8)) == [
        "train",
        "val",
    ]


def test_a_test_set_may_have_some_of_the_classes(pets: Path) -> None:
    shutil.rmtree(pets / "test" / "cat")
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["test"]
    assert [reader.read(i, None)[1] for i in range(len(reader))] == [1]
    assert reader.path(0) == pets / "test" / "dog" / "w.png"


def test_hidden_files_are_ignored(pets: Path) -> None:
    before = folder.scan(pets).digest()
    write(pets / "train" / "dog" / "._b.jpg")
    write(pets / "train" / ".checkpoints" / "b.jpg")
    write(pets / "train" / "dog" / ".thumbs" / "b.jpg")
    assert folder.scan(pets).digest() == before


def test_links_to_folders_are_followed_but_not_round_in_a_circle(
    pets: Path, tmp_path: Path
) -> None:
    write(tmp_path / "elsewhere" / "far.png")
    (pets / "train" / "dog" / "linked").symlink_to(tmp_path / "elsewhere")
    (pets / "train" / "dog" / "up").symlink_to(pets / "train")
    (pets / "train" / "dog" / "z" / "self").symlink_to(pets / "train" / "dog" / "z")
    (tmp_path / "elsewhere" / "back").symlink_to(pets / "train" / "dog")
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    found = [str(reader.path(i)) for i in range(len(reader))]
    assert str(pets / "train" / "dog" / "linked" / "far.png") in found
    assert "dog/up/dog" not in "".join(found)
    assert "back" not in "".join(found)
    assert "self/self" not in "".join(found)


def test_a_linked_class_is_a_class(pets: Path, tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        write(tmp_path / "cows" / "moo.png")
        (pets / part / "cow").symlink_to(tmp_path / "cows")
    assert folder.scan(pets).classes == ("cat", "cow", "dog")


def test_a_name_that_is_no_utf8_is_read(pets: Path) -> None:
    write(os.fsencode(pets / "train" / "cat") + b"/\xff\xfe.png", 77)
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    found = [str(reader.path(i)) for i in range(len(reader))]
    index = next(i for i, name in enumerate(found) if "\udcff\udcfe.png" in name)
    assert reader.read(index, None)[0].unique().tolist() == [77]
    reader.path(index).write_bytes(b"")
    with pytest.raises(BadSample, match=r"\\xff\\xfe.png: empty"):
        reader.read(index, None)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty, 0 bytes"),
        (b"not an image", "not an image to Pillow"),
        (None, "No such file"),
    ],
)
def test_a_broken_sample_is_named(pets: Path, content: bytes | None, why: str) -> None:
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    path = Path(reader.path(2))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSample, match=why) as caught:
        reader.read(2, None)
    assert caught.value.where == str(path)
    assert reader.read(3, None)[1] == 0


def test_a_jpeg_cut_off_in_the_middle_is_named(pets: Path) -> None:
    path = pets / "train" / "cat" / "b.jpg"
    path.write_bytes(path.read_bytes()[:-30])
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    with pytest.raises(BadSample, match=r"(?i)cat/b\.jpg: .*truncated"):
        reader.read(2, None)


def test_a_broken_link_is_a_broken_sample_not_a_missing_one(pets: Path) -> None:
    (pets / "train" / "cat" / "0.png").symlink_to(pets / "nowhere.png")
    reader = build_readers(folder.FolderReader, pets, folder.scan(pets), 8)["train"]
    with pytest.raises(BadSample, match=r"cat/0\.png: No such file"):
        reader.read(0, None)


def class_of_train_alone(data_dir: Path) -> None:
    write(data_dir / "train" / "ant" / "a.png")


def no_images(data_dir: Path) -> None:
    for path in (data_dir / "train").rglob("*.*"):
        path.rename(path.with_suffix(".npy"))


def no_classes(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "val")
    write(data_dir / "val" / "0001.JPEG")


def unlabelled(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "test")
    write(data_dir / "test" / "1.jpg")


def empty_test(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "test")
    (data_dir / "test").mkdir()


def link_to_itself(data_dir: Path) -> None:
    (data_dir / "train" / "loop").symlink_to("loop")


def unknown_class(data_dir: Path) -> None:
    write(data_dir / "val" / "cow" / "v.png")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "pets/train: cannot be listed, No such file.*--data-dir"),
        (lambda d: shutil.rmtree(d / "train"), "pets/train: cannot be listed"),
        (lambda d: (d / "val").rename(d / "valid"), "pets/val: cannot be listed"),
        (no_classes, "val: no folders of classes, found '0001.JPEG'"),
        (no_images, "train/cat: no images.*.npy"),
        (class_of_train_alone, "val: no class 'ant'"),
        (lambda d: shutil.rmtree(d / "val" / "cat"), "val: no class 'cat'"),
        (lambda d: write(d / "test" / "cow" / "a.png"), "test: unknown class 'cow'"),
        (unlabelled, "test: no folders of classes, found '1.jpg'.*optional: rename it"),
        (empty_test, "test: no folders of classes, found nothing.*optional: rename"),
        (link_to_itself, "train/loop: cannot be listed, Too many levels"),
        (unknown_class, "val: unknown class 'cow'"),
        (lambda d: (d / "val" / "cat" / "v.png").unlink(), "val/cat: no images.*empty"),
    ],
)
def test_what_is_no_set_of_images_is_refused(pets: Path, harm, message: str) -> None:
    harm(pets)
    with pytest.raises(DataError, match=f"(?s){message}"):
        folder.scan(pets)

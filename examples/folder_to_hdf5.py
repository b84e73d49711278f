"""Pack folders of images into one HDF5 file, for `--data hdf5`.

Each image is stored as its file is, and decoded when it is read, as from the folder;
with --size it is stored as pixels, which takes more room and is read faster.

python examples/folder_to_hdf5.py FOLDER FILE.h5 --size 256
"""

import argparse
from pathlib import Path

import h5py
import numpy as np
from PIL import Image, ImageOps

from mpitrain.tasks.image_classification.datasets.folder import images_below


def pack(folder: Path, group: h5py.Group, classes: list[str], size: int | None) -> int:
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = [Path(path) for path in images_below(folder / name)]
        paths += found
        labels += [label] * len(found)
    group["labels"] = np.array(labels, np.int64)
    if size is None:
        encoded = h5py.vlen_dtype(np.uint8)
        images = group.create_dataset("images", len(paths), encoded)
    else:
        shape = (len(paths), size, size, 3)
        images = group.create_dataset("images", shape, np.uint8, chunks=(1, *shape[1:]))
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            pixels = image.convert("RGB")  # fails here if the image is broken
        if size is None:
            images[number] = np.frombuffer(path.read_bytes(), np.uint8)
        else:
            images[number] = np.asarray(ImageOps.fit(pixels, (size, size)))
    return len(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="has train/CLASS and val/CLASS")
    parser.add_argument("file", type=Path, help="to be written")
    parser.add_argument("--size", type=int, help="height and width in pixels")
    asked = parser.parse_args()
    folders = [p for p in (asked.folder / "train").iterdir() if p.is_dir()]
    classes = sorted(p.name for p in folders if not p.name.startswith("."))
    unfinished = asked.file.with_suffix(".unfinished")
    with h5py.File(unfinished, "w") as file:
        file.attrs["classes"] = classes
        for part in ("train", "val", "test"):
            if (asked.folder / part).is_dir():
                group = file.create_group(part)
                num = pack(asked.folder / part, group, classes, asked.size)
                print(f"{part}: {num} images of {len(classes)} classes")
    unfinished.rename(asked.file)


if __name__ == "__main__":
    main()

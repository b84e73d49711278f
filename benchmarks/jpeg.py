"""A folder of JPEGs beside torchvision's ImageFolder and DataLoader, on CPU ranks.

    .venv/bin/python benchmarks/jpeg.py
    .venv/bin/python benchmarks/jpeg.py --load 2     # with 2 other busy processes
    .venv/bin/python benchmarks/jpeg.py --data hdf5  # or shards: ours alone reads them

Both make shuffled batches of normalized float32 of random crops, flipped at random,
with as many workers: ours as in a training, theirs by RandomResizedCrop,
RandomHorizontalFlip, ToTensor and Normalize. They take turns; each ratio is of one
round. The images are photographs in size and detail: noise at several scales.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import psutil
from in_memory import WORLD
from mpi4py import MPI
from PIL import Image
from record import about, spread, write
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from mpitrain.config import TrainConfig
from mpitrain.data.sampling import Sampling
from mpitrain.data.sharding import RankShard
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.tasks.image_classification.datasets.named import load_data
from mpitrain.tasks.image_classification.task import ImageClassification
from mpitrain.tasks.image_classification.transforms import IMAGENET_MEAN, IMAGENET_STD
from mpitrain.train.data import TrainData

Load = Callable[[int], int]
"""Loads an epoch; returns its samples."""


def main() -> None:
    """Measure, and print a line for each round and one for all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", choices=("folder", "hdf5", "shards"), default="folder"
    )
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    words = " ".join(sys.argv[1:])
    report = about(f"benchmarks/jpeg.py {words}".strip(), "torchvision", "pillow")
    busy = [
        multiprocessing.Process(target=spin, daemon=True) for _ in range(asked.load)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), asked.images)
        loads = {
            "ours": ours(Path(folder), asked),
            "theirs": theirs(Path(folder), asked),
        }
        for process in busy:
            process.start()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
        for number in range(asked.rounds + 1):
            for name, load in loads.items():
                one = timed(load, number)
                if number:  # the first starts the workers
                    found[name].append(one)
        for process in busy:
            process.kill()
    for name, rounds in found.items():
        rate, cpu = (statistics.median(of) for of in zip(*rounds, strict=True))
        print(f"{name}: {rate:,.0f} images/s, {1000 * cpu:.2f} ms of CPU per image")
    pairs = zip(found["ours"], found["theirs"], strict=True)
    ratio = spread([mine / other for (mine, _), (other, _) in pairs])
    low, high = ratio["range"]
    print(f"ours over theirs: {ratio['median']:.2f} ({low:.2f} to {high:.2f})")
    write({**report, "rounds": found, "ratio": ratio}, asked.json)


def timed(load: Load, epoch: int) -> tuple[float, float]:
    """Return images per second, and CPU seconds per image of all processes."""
    before, started = cpu_seconds(), time.perf_counter()
    count = load(epoch)
    seconds = time.perf_counter() - started
    return count / seconds, (cpu_seconds() - before) / count


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers until now."""
    me = psutil.Process()
    all_times = [it.cpu_times() for it in (me, *me.children()) if it.nice() == NICE]
    return sum(times.user + times.system for times in all_times)


NICE = os.getpriority(os.PRIO_PROCESS, 0)


def spin() -> None:
    """Be busy; as other people's jobs, which are told apart by their priority."""
    os.nice(1)
    while True:
        sum(range(10_000))


def write_images(folder: Path, num: int) -> None:
    """Write JPEGs of 500 x 375 pixels, of ten classes, in each of the forms."""
    random = np.random.default_rng(1)
    for part, count in (("train", num), ("val", 10)):
        files = []
        for i in range(count):
            noise = sum(
                np.kron(
                    random.normal(
                        0, 8 * scale**0.5, (-(-375 // scale), -(-500 // scale), 3)
                    ),
                    np.ones((scale, scale, 1)),
                )[:375, :500]
                for scale in (1, 4, 16, 64)
            )
            pixels = np.clip(128 + noise, 0, 255).astype(np.uint8)
            data = io.BytesIO()
            Image.fromarray(pixels).save(data, "JPEG", quality=90)
            files.append((i % 10, data.getvalue()))
            path = folder / "folder" / part / f"class{i % 10}" / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data.getvalue())
        (folder / "shards" / part).mkdir(parents=True)
        with tarfile.open(folder / "shards" / part / "0.tar", "w") as tar:
            for i, (label, data) in enumerate(files):
                for name, content in (
                    (f"{i:06}.jpg", data),
                    (f"{i:06}.cls", b"%d" % label),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        with h5py.File(folder / "hdf5.h5", "a") as file:
            group = file.create_group(part)
            group["labels"] = np.array([label for label, _ in files])
            encoded = h5py.vlen_dtype(np.uint8)
            images = group.create_dataset("images", len(files), encoded)
            for i, (_, data) in enumerate(files):
                images[i] = np.frombuffer(data, np.uint8)


def ours(folder: Path, asked: argparse.Namespace) -> Load:
    config = TrainConfig(
        data=asked.data,
        data_dir=folder / ("hdf5.h5" if asked.data == "hdf5" else asked.data),
        image_size=asked.image_size,
        random_resized_crop=True,
        random_flip=True,
        normalize="imagenet",
        num_workers=asked.num_workers,
    )
    ranks = Communicator(MPI.COMM_SELF, WORLD)
    data = load_data(config, seed=1, world=WORLD, ranks=ranks)
    task = ImageClassification(None, data.num_classes)
    of_training = TrainData(
        data.train, data.val, config, WORLD, ranks, task, Sampling(None, None)
    )
    loader = of_training.loader(data.train, is_training=True)

    def load(epoch: int) -> int:
        shard = RankShard(
            rank=0,
            world_size=1,
            global_batch_size=asked.batch_size,
            order=data.train.order(1, epoch),
        )
        steps = loader.steps(shard, epoch)
        return sum(len(batch) for step in steps for batch in step.micro_batches)

    return load


def theirs(folder: Path, asked: argparse.Namespace) -> Load:
    steps = [
        transforms.RandomResizedCrop(asked.image_size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    loader = DataLoader(
        ImageFolder(folder / "folder/train", transforms.Compose(steps)),
        batch_size=asked.batch_size,
        shuffle=True,
        num_workers=asked.num_workers,
        persistent_workers=asked.num_workers > 0,
    )

    def load(epoch: int) -> int:
        del epoch
        return sum(len(inputs) for inputs, _ in loader)

    return load


if __name__ == "__main__":
    main()

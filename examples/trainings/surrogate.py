"""A surrogate of fields in HDF5: ragged station reports, RMSE in physical units.

Needs `pip install -e '.[hdf5]'`.

mpirun -np 4 --oversubscribe python examples/trainings/surrogate.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import mpitrain

VARIABLES = {"t2m": (280.0, 15.0), "z500": (54e3, 3e3), "u10": (0.0, 5.0)}
SIZE = 16  # of a field


def write_fields(path: Path, days: int, seed: int) -> None:
    """Write fields that drift and decay, and a ragged list of reports of each day."""
    if path.exists():
        return
    random = np.random.default_rng(seed)
    frequency = np.fft.fftfreq(SIZE, 1 / SIZE)
    smooth = np.exp(-(frequency[:, None] ** 2 + frequency**2) / 8)
    counts = random.integers(0, 9, days)
    unfinished = path.with_suffix(f".{os.getpid()}")
    with h5py.File(unfinished, "w") as file:
        for name, (mean, std) in VARIABLES.items():
            found, fields = (
                np.zeros((SIZE, SIZE), complex),
                np.empty((days, SIZE, SIZE)),
            )
            for day in range(days):
                noise = np.fft.fft2(random.normal(size=(SIZE, SIZE))) * smooth
                found = 0.97 * found * np.exp(-0.06j * np.pi * frequency) + noise
                fields[day] = np.fft.ifft2(found).real
            file[name] = (mean + std * fields / fields.std()).astype(np.float32)
        file["offsets"] = np.concatenate([[0], np.cumsum(counts)])
        file["reports"] = random.normal(size=(counts.sum(), 4)).astype(np.float32)
    unfinished.replace(path)  # whole: all ranks write the same


class Days(Dataset[dict[str, Tensor]]):
    """The normalized fields of a day, its reports, and the fields of the next day."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None
        with h5py.File(path) as file:
            self.num = len(file["t2m"]) - 1

    def __len__(self) -> int:
        return self.num

    def fields(self, day: int) -> Tensor:
        found = [(self.file[k][day] - m) / s for k, (m, s) in VARIABLES.items()]
        return torch.from_numpy(np.stack(found))

    def __getitem__(self, day: int) -> dict[str, Tensor]:
        self.file = self.file or h5py.File(self.path)  # in the process that reads
        start, stop = self.file["offsets"][day : day + 2]
        reports = torch.from_numpy(self.file["reports"][start:stop])
        return {
            "fields": self.fields(day),
            "reports": reports,
            "next_fields": self.fields(day + 1),
        }


class Surrogate(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        num, options = len(VARIABLES), {"padding": 1, "padding_mode": "circular"}
        self.report = nn.Linear(4, width)
        self.first = nn.Conv2d(num, width, 3, **options)
        self.body = nn.Sequential(
            *(nn.GELU(), nn.Conv2d(width, width, 3, **options)),
            *(nn.GELU(), nn.Conv2d(width, num, 3, **options)),
        )

    def forward(self, fields: Tensor, reports: Tensor, is_report: Tensor) -> Tensor:
        context = (self.report(reports) * is_report[..., None]).sum(1)
        return fields + self.body(self.first(fields) + context[..., None, None])


def collate(days: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad the reports to the longest list; return inputs and targets."""
    reports = [day["reports"] for day in days]
    is_report = [torch.ones(len(of_day)) for of_day in reports]
    inputs = {
        "fields": torch.stack([day["fields"] for day in days]),
        "reports": pad_sequence(reports, batch_first=True),
        "is_report": pad_sequence(is_report, batch_first=True),
    }
    return inputs, torch.stack([day["next_fields"] for day in days])


def squared_errors(found: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared errors `(N, V, H, W)`, and the area of each point as a weight."""
    latitude = torch.linspace(-1.5, 1.5, SIZE, dtype=found.dtype, device=found.device)
    return (found - true).square(), latitude.cos()[:, None].expand_as(found)


class Forecast(mpitrain.Task):
    collate_fn = staticmethod(collate)

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return squared_errors(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Any:
        values, weights = squared_errors(outputs, targets)
        return {k: (values[:, i], weights[:, i]) for i, k in enumerate(VARIABLES)}

    def derived_metrics(self, values: Any) -> dict[str, float]:
        return {
            f"rmse_{k}": std * values[k] ** 0.5 for k, (_, std) in VARIABLES.items()
        }


DEFAULTS = mpitrain.TrainConfig(
    epochs=3, global_batch_size=8, optimizer="adam", lr=3e-3
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS,
    world: mpitrain.World | None = None,
    folder: str = ".",
) -> mpitrain.Trainer:
    paths = [Path(folder) / name for name in ("fields-train.h5", "fields-val.h5")]
    for path, days, seed in zip(paths, (151, 41), (1, 2), strict=True):
        write_fields(path, days, seed)
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        Surrogate(), *map(Days, paths), config, world=world, task=Forecast()
    )


if __name__ == "__main__":
    build().fit()

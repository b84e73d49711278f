"""Read back what loggers wrote, each with its own library."""

from __future__ import annotations

import csv
import json
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

Points = dict[str, list[tuple[int, float]]]
"""Steps and values by name, in the order in which they were written."""


def as_floats(points: Points) -> Points:
    """In the precision of TensorBoard's files."""
    return {
        name: [(step, float(np.float32(value))) for step, value in of]
        for name, of in points.items()
    }


def from_csv(run_dir: Path) -> Points:
    found: Points = {}
    with (run_dir / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            assert None not in row
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    found.setdefault(name, []).append((step, float(value)))
    return found


def accumulator(run_dir: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # protobuf's, of what TensorBoard was made by
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )

        found = EventAccumulator(
            str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0}
        )
        return found.Reload()


def from_tensorboard(run_dir: Path) -> Points:
    events = accumulator(run_dir)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


FROM_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client, found = MlflowClient(), []
experiment = client.get_experiment_by_name("mpitrain")
for run in client.search_runs([experiment.experiment_id]):
    number, points = run.info.run_id, {}
    for name in run.data.metrics:
        of = client.get_metric_history(number, name)
        points[name] = [[it.step, it.value] for it in of]
    images = [it.path for it in client.list_artifacts(number, "images")]
    found.append([run.info.run_name, run.info.status, run.data.params, points, images])
json.dump(found, sys.stdout)
"""

FROM_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as Storage
runs = Storage.get_runs("mpitrain")
json.dump({it: Storage.get_logs("mpitrain", it) for it in runs}, sys.stdout)
"""


def read_by(code: str, cwd: Path) -> Any:
    """Let a library that warns and logs read its own files, in another process."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return json.loads(
        done.stdout[done.stdout.index("[" if "mlflow" in code else "{") :]
    )


def from_mlflow(cwd: Path) -> list[dict[str, Any]]:
    """Name, status, parameters, points and images of each run, the last one first."""
    names = ("name", "status", "params", "points", "images")
    runs = [dict(zip(names, it, strict=True)) for it in read_by(FROM_MLFLOW, cwd)]
    for run in runs:
        run["points"] = {
            name: sorted((step, value) for step, value in of)
            for name, of in run["points"].items()
        }
    return runs


def from_trackio(cwd: Path) -> dict[str, Points]:
    """The points of runs by name; of images their files."""
    found: dict[str, Points] = {}
    for run, rows in read_by(FROM_TRACKIO, cwd).items():
        points = found[run] = {}
        for row in rows:
            for name in row.keys() - {"step", "timestamp"}:
                points.setdefault(name, []).append((row["step"], row[name]))
    return found


def wandb_files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("*run-*/run-*.wandb"))


def wandb_records(file: Path) -> list[Any]:
    """Read an offline file: blocks of LevelDB's log format, records of wandb's.

    wandb 0.31 has no reader in Python any more; what a record says, its own classes
    know.
    """
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    assert data[:4] == b":W&B"
    found, part, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
        elif kind == 0:
            break
    return found


def from_wandb(*files: Path) -> Points:
    found: Points = {}
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                (it.key or ".".join(it.nested_key)): json.loads(it.value_json)
                for it in record.history.item
            }
            step = values.pop("step")
            for name, value in values.items():
                is_image = name.startswith(("_", "train/images"))
                if isinstance(value, int | float) and not is_image:
                    found.setdefault(name, []).append((step, value))
    return found


def from_record(run_dir: Path) -> Points:
    """What ``metrics.jsonl`` has, by the names that loggers are told."""
    found: Points = {}
    steps = {"train_loss": "train/loss", "lr": "train/lr"}
    steps["gradient_norm"] = "train/gradient_norm"
    epochs = {"train_loss": "train/epoch_loss", "val_loss": "val/loss"}
    epochs |= {"val_accuracy": "val/accuracy", "epoch": "train/epoch"}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = {"step": steps, "epoch": epochs}.get(row["event"], {})
        for name, ours in names.items():
            if name in row:
                found.setdefault(ours, []).append((row["step"], row[name]))
    return found

"""The file of ``--log openmetrics`` by Prometheus' parsers, and a board for it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from mpitrain.record import cost
from mpitrain.record.loggers.callback import _prefixed
from mpitrain.record.loggers.openmetrics import FILE, OpenMetricsLogger

parser = pytest.importorskip("prometheus_client.openmetrics.parser")
classic = pytest.importorskip("prometheus_client.parser")

BOARD = Path(__file__).parents[2] / "examples/grafana.json"
JOB = {
    "id": "slurm 17 0",
    "began": 1000.0,
    "ended": 4600.0,
    "cores": 16,
    "gpus": 4,
    "queue_seconds": 60.0,
    "peak_gpu_bytes": 1 << 30,
    "ranks": [
        {"energy_joules": 7.0e6, "energy_parts": ["cpu", "gpu"], "gpu_percent": 50.0},
        {"energy_joules": 0.2e6, "energy_parts": ["gpu"], "gpu_percent": 100.0},
        {"gpu_percent": 0.0},
        {},
    ],
}
LOGGED = {
    **_prefixed("train", {"loss": 0.25, "lr": 0.1}),
    **_prefixed("val", {"loss": math.nan, "accuracy": 0.5, "iou@0.5": -math.inf}),
    "throughput/samples_per_second": 1e6,
    "throughput/step_seconds": 0.5,
    "gpu/memory_bytes": 1 << 30,
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of a run of two jobs, which has a strange name."""
    second = {**JOB, "id": "slurm 18 0", "began": 9000.0, "ended": 9100.0}
    (tmp_path / cost.FILE).write_text(json.dumps({"jobs": [JOB, second]}))
    logger = OpenMetricsLogger(tmp_path, 'a "run" \\n')
    logger.log_metrics({"train/loss": 9.0}, 10)
    logger.log_metrics(LOGGED, 20)
    logger.save()
    assert {it.name for it in tmp_path.iterdir()} == {cost.FILE, FILE}
    return (tmp_path / FILE).read_text()


def test_openmetrics_own_parser_reads_all(text: str) -> None:
    families = {it.name: it for it in parser.text_string_to_metric_families(text)}
    assert all(it.documentation for it in families.values())
    samples = [sample for it in families.values() for sample in it.samples]
    assert {sample.labels["run"] for sample in samples} == {'a "run" \\n'}
    values = {sample.name: sample.value for sample in samples}
    assert math.isnan(values.pop("mpitrain_val_loss"))
    expected = {
        "mpitrain_step": 20,
        "mpitrain_train_loss": 0.25,
        "mpitrain_train_lr": 0.1,
        "mpitrain_val_accuracy": 0.5,
        "mpitrain_val_iou_0_5": -math.inf,
        "mpitrain_throughput_samples_per_second": 1e6,
        "mpitrain_throughput_step_seconds": 0.5,
        "mpitrain_gpu_memory_bytes": 1 << 30,
        "mpitrain_peak_gpu_bytes": 1 << 30,
        "mpitrain_gpu_percent": 50.0,
        "mpitrain_wall_seconds_total": 3700.0,
        "mpitrain_core_seconds_total": 16 * 3700.0,
        "mpitrain_gpu_seconds_total": 4 * 3700.0,
        "mpitrain_queue_seconds_total": 120.0,
        "mpitrain_energy_joules_total": 14.4e6,
    }
    assert values == pytest.approx(expected)
    assert families["mpitrain_energy_joules"].type == "counter"
    assert families["mpitrain_energy_joules"].unit == "joules"
    assert families["mpitrain_train_loss"].type == "gauge"


def test_the_node_exporter_reads_it_as_prometheus_text(text: str) -> None:
    families = classic.text_string_to_metric_families(text)
    names = {sample.name for it in families for sample in it.samples}
    assert {"mpitrain_core_seconds_total", "mpitrain_train_loss"} <= names
    assert not re.search(r"} \S+ ", text)  # it refuses timestamps


def test_the_board_asks_for_what_is_written(text: str) -> None:
    board = json.loads(BOARD.read_text())
    targets = [it for panel in board["panels"] for it in panel["targets"]]
    assert len(targets) >= len(board["panels"]) >= 4
    asked = {name for it in targets for name in re.findall(r"mpitrain_\w+", it["expr"])}
    written = set(re.findall(r"^(mpitrain_\w+)\{", text, re.MULTILINE))
    assert asked <= written
    assert {f"mpitrain_{it}_total" for it in ("core_seconds", "energy_joules")} <= asked

"""An installed package gives names to its loggers, tasks and sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.plugins import load_reference
from mpitrain.record.loggers import RunInfo
from mpitrain.record.loggers.process import LoggerProcess
from mpitrain.tools.jobs.jobscript import read_site
from mpitrain.tools.train.prepare import read_config

ENTRY_POINTS = """
[mpitrain.loggers]
acme = acme_plug:AcmeLogger
[mpitrain.tasks]
acme-flow = acme_plug:build
[mpitrain.sites]
acme-cluster = acme_plug:site
"""

CODE = """
from pathlib import Path
from mpitrain.record.loggers import Logger

class AcmeLogger(Logger):
    def __init__(self, run_dir):
        self._file = run_dir / "acme.txt"

    def log_metrics(self, metrics, step):
        with self._file.open("a") as file:
            file.write(f"{step} {metrics}\\n")

def build(config=None, depth: int = 3):
    raise AssertionError

def site():
    return Path(__file__).with_name("acme.yaml")
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on sys.path, as pip would leave it."""
    info = tmp_path / "acme_plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-plug\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "acme_plug.py").write_text(CODE)
    (tmp_path / "acme.yaml").write_text("scheduler: slurm\naccount: acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_logger_is_known_by_its_name(tmp_path: Path) -> None:
    assert read_config(["--log", "acme", "csv"]).log == ("acme", "csv")
    info = RunInfo(
        run_dir=tmp_path,
        run_name="a",
        run_id="b",
        config={},
        rank=0,
        world_size=1,
        step=0,
    )
    logger = LoggerProcess("acme", info, {}, print)
    logger.start()
    logger.send("log_metrics", ({"loss": 0.5}, 3))
    logger.send("finalize", ("finished",))
    assert logger.join(60)
    logger.close()
    assert (tmp_path / "acme.txt").read_text() == "3 {'loss': 0.5}\n"


def test_a_task_is_known_by_its_name_and_has_flags() -> None:
    config = read_config(["--task", "acme-flow", "--task.depth", "5"])
    assert config.task == "acme-flow"
    assert config.task_arguments == (("task.depth", 5),)


def test_a_site_is_known_by_its_name() -> None:
    assert read_site("acme-cluster")["account"] == "acme"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--log", "acne"],
            "expected csv, tensorboard, wandb, mlflow, trackio, openmetrics, acme",
        ),
        (["--task", "acme-flo"], "Did you mean 'acme-flow'"),
    ],
)
def test_another_name_is_an_error(words: list[str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_config(words)
    with pytest.raises(UsageError, match="Did you mean 'acme-cluster'"):
        read_site("acme-clusters")
    with pytest.raises(UsageError, match="no callable 'x'"):
        load_reference("acme_plug:x", "--log", "loggers")

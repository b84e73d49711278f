"""The loggers that ``--log`` knows by name; imported in their own process only."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from mpitrain.files import write_atomic
from mpitrain.record.loggers.base import Images, Logger, RunInfo, Status
from mpitrain.record.loggers.openmetrics import OpenMetricsLogger


class CSVLogger(Logger):
    """Writes ``metrics.csv``: a line per call, a column per name.

    Rows of steps after ``step``, of an earlier job, are dropped.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._path, self._step = run_dir / "metrics.csv", step
        self._new = list[dict[str, float]]()
        rows = [row for row in self._rows() if int(row["step"]) <= step]
        # A validation that was interrupted is repeated, and logged again.
        last = [row for row in rows if int(row["step"]) == step]
        self._logged = {name for row in last for name, value in row.items() if value}
        self._rewrite(rows)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a line; a new name adds a column."""
        if step == self._step:
            metrics = {k: v for k, v in metrics.items() if k not in self._logged}
        if new := [name for name in metrics if name not in self._columns]:
            self.save()
            rows = self._rows()
            self._columns += new
            self._rewrite(rows)
        if metrics:
            self._new.append({"step": step, **metrics})

    def save(self) -> None:
        """Append the new lines."""
        with self._path.open("a", newline="") as file:
            self._writer(file).writerows(self._new)  # floats with all digits
        self._new.clear()

    def _rows(self) -> list[dict[str, str]]:
        text = self._path.read_text() if self._path.exists() else ""
        # Without a last line that was cut.
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        self._columns = list(rows.fieldnames or ["step"])
        return [row for row in rows if (row.get("step") or "").isdecimal()]

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        text = io.StringIO()
        self._writer(text).writeheader()
        self._writer(text).writerows(rows)
        write_atomic(self._path, text.getvalue())

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        names = self._columns
        return csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")


class TensorBoardLogger(Logger):
    """Writes ``tensorboard/`` with TensorBoard's writer; it hides steps after ``step``.

    Not with torch's SummaryWriter: importing torch again takes seconds and 250 MB.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = Event
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        self._add(step + 1, session_log={"status": "START"})  # purges those steps

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the configuration as a text."""
        text = "".join(f"    {name}: {value}\n" for name, value in params.items())
        value = {
            "tag": "config/text_summary",
            "metadata": {"plugin_data": {"plugin_name": "text"}},
            "tensor": {
                "dtype": "DT_STRING",
                "string_val": [text.encode()],
                "tensor_shape": {"dim": [{"size": 1}]},
            },
        }
        self._add(0, summary={"value": [value]})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event with all values."""
        values = [{"tag": k, "simple_value": v} for k, v in metrics.items()]
        self._add(step, summary={"value": values})

    def log_images(self, name: str, images: Images, step: int) -> None:
        """Write each image as PNG, with its number in its tag."""
        from PIL import Image

        values = []
        for i, image in enumerate(images):
            png = io.BytesIO()
            Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(
                png, "png"
            )
            names = ("height", "width", "colorspace")
            shown = dict(zip(names, image.shape, strict=True))
            shown["encoded_image_string"] = png.getvalue()
            values.append({"tag": f"{name}/{i}", "image": shown})
        self._add(step, summary={"value": values})

    def save(self) -> None:
        """Write all events to disk."""
        self._writer.flush()

    def finalize(self, status: Status) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **event: Any) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), **event))


class WandbLogger(Logger):
    """Logs to Weights & Biases, or offline where that cannot be reached."""

    INIT_SECONDS = 6  # how long the server may take to begin a run
    SEND_SECONDS = 10  # how long `finalize` waits for the data to be sent

    def __init__(
        self,
        info: RunInfo,
        wandb_options: Mapping[str, Any],
        say: Callable[[str], object],
    ) -> None:
        import wandb

        self._wandb: Any = wandb
        mode = wandb.setup().settings.mode
        reason = f"as WANDB_MODE says ({mode})"
        options = {
            **wandb_options,
            "dir": str(info.run_dir),
            "config": dict(info.config),
            "resume": "allow",
            "settings": self._settings(),
        }
        run: Any = None
        if mode in ("online", "run"):
            try:
                run = wandb.init(**options)
            except Exception as error:
                traceback.print_exc()
                reason = (str(error) or type(error).__name__).splitlines()[0].strip(".")
                wandb.teardown()  # its service would hold the run's id
                options["mode"] = "offline"
        self._run = run or wandb.init(**options)
        if self._run.settings._offline:  # noqa: SLF001 - it has no other name
            folder = os.path.dirname(self._run.settings.sync_dir)  # noqa: PTH120
            all_jobs = f"{folder}/offline-run-*".removeprefix(f"{os.getcwd()}/")
            say(f"wandb: offline, {reason}; `wandb sync {all_jobs}` sends it later")
        elif self._run.url:
            say(f"wandb: {self._run.url}")
        # wandb's own step only rises; a resumed run may log a step again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _settings(self) -> Any:
        """Return settings: quiet, and without a look at console, code and git."""
        settings = {
            "quiet": True,
            "silent": True,
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "symlink": False,  # ranks would overwrite each other's
            "init_timeout": self.INIT_SECONDS,
            "finish_timeout": self.SEND_SECONDS,
            "stop_fn": lambda: None,  # the stop button in the browser has no effect
            "x_stats_pid": os.getppid(),  # the rank, whose memory and GPU it shows
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": 1.0,
        }
        # wandb refuses settings that its version does not know.
        known = getattr(self._wandb.Settings, "model_fields", settings)
        return self._wandb.Settings(**{k: v for k, v in settings.items() if k in known})

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values."""
        self._run.log({"step": step, **metrics})

    def log_images(self, name: str, images: Images, step: int) -> None:
        """Log the images."""
        if images.shape[-1] == 1:
            images = images[..., 0]
        self._run.log({"step": step, name: [self._wandb.Image(i) for i in images]})

    def finalize(self, status: Status) -> None:
        """Send the rest, for `SEND_SECONDS` at most."""
        if status == "stopped":
            self._run.mark_preempting()
        exit_code = {"finished": 0, "stopped": 75, "failed": 1}[status]
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown()


class MLflowLogger(Logger):
    """Logs to MLflow: to ``MLFLOW_TRACKING_URI``, else where MLflow does by default."""

    TAG = "mpitrain.run_id"  # by which a job that resumes finds the run

    def __init__(self, run_dir: Path, run_name: str, run_id: str) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mpitrain")
        with _alone_in(run_dir.parent):  # trials of a sweep, which make one database
            self._client: Any = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(experiment)
            number = found and found.experiment_id
            number = number or self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], f"tags.`{self.TAG}` = '{run_id}'")
        tags = {self.TAG: run_id}
        run = runs[0] if runs else self._client.create_run(number, None, tags, run_name)
        self._id, self._known = run.info.run_id, run.data.params
        self._client.update_run(self._id, "RUNNING")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the configuration; MLflow keeps values of an earlier job."""
        new = [
            self._param(k, str(v)) for k, v in params.items() if k not in self._known
        ]
        self._client.log_batch(self._id, params=new)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values."""
        now = int(1000 * time.time())
        found = [self._metric(_plain(k), v, now, step) for k, v in metrics.items()]
        self._client.log_batch(self._id, metrics=found)

    def log_images(self, name: str, images: Images, step: int) -> None:
        """Log each image, with its number in its name."""
        for i, image in enumerate(images):
            key = f"{_plain(name)}/{i}"
            self._client.log_image(self._id, image, key=key, step=step)

    def finalize(self, status: Status) -> None:
        """Close the run; MLflow has no word for one that can be resumed."""
        known = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, known[status])


def _plain(name: str) -> str:
    """Return a name with the characters that MLflow takes.

    >>> _plain("val/iou@0.5")
    'val/iou_0.5'
    """
    return re.sub(r"[^\w. /-]", "_", name)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for other loggers of runs in a folder, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TrackioLogger(Logger):
    """Logs to trackio: into ``TRACKIO_DIR``, or to the server of its variables."""

    def __init__(self, info: RunInfo) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "mpitrain"),
            name=f"{info.run_name}-{info.run_id[:4]}",  # it finds a run by its name
            config=dict(info.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values."""
        self._run.log(dict(metrics), step=step)

    def log_images(self, name: str, images: Images, step: int) -> None:
        """Log each image, with its number in its name."""
        images = images.repeat(3 // images.shape[-1], axis=-1)
        shown = {f"{name}/{i}": self._trackio.Image(it) for i, it in enumerate(images)}
        self._run.log(shown, step=step)

    def finalize(self, status: Status) -> None:
        """Write the rest."""
        self._trackio.finish()


BUILTIN: Mapping[str, type[Logger]] = {
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MLflowLogger,
    "trackio": TrackioLogger,
    "openmetrics": OpenMetricsLogger,
}

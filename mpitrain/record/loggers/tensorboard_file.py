"""TensorBoard's event files, in ``tensorboard/`` of the run folder.

torch.utils.tensorboard says what is in an event, TensorBoard how it lies in the file.
Not by torch's SummaryWriter: that has one more thread, which prints a traceback where
a disk is full, leaves a part of an event there, behind which nothing can be read, and
takes thrice the time.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from mpitrain.record.loggers.appending import Appending
from mpitrain.record.loggers.protocol import Images, Logger, RunFacts, Status

_text: Any = summary.text  # torch says nothing of their types
_image: Any = summary.image

FOLDER = "tensorboard"

MOST_BYTES = 1 << 16
"""That may wait to be written."""


class TensorBoard(Logger):
    """Writes scalars, images of a batch, and the configuration as text.

    Args:
        facts: Of the run; TensorBoard forgets steps that are not gone on from.
    """

    def __init__(self, facts: RunFacts) -> None:
        folder = facts.run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        # TensorBoard wants "tfevents" in the name, and takes files in their order.
        name = f"events.out.tfevents.{time.time():010.0f}"
        path = folder / f"{name}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appending(path)
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._write(0, file_version="brain.Event:2")
        self._write(facts.step + 1, session_log=SessionLog(status=SessionLog.START))
        lines = "".join(f"    {name}: {it}\n" for name, it in facts.config.items())
        self._write(facts.step, summary=_text("config", lines))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event for all values."""
        rows = [Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._write(step, summary=Summary(value=rows))

    def images(self, step: int, name: str, images: Images) -> None:
        """Write one image of all, side by side."""
        shown = _image(name, images, dataformats="NHWC")
        self._write(step, summary=shown)

    def flush(self) -> None:
        """Let all events reach the file."""
        self._file.write(self._waiting.getvalue())
        self._waiting.seek(0)
        self._waiting.truncate()

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Close the file."""
        del status, summary
        self.flush()
        self._file.close()

    def _write(self, step: int, **what: Any) -> None:
        event = Event(step=step, wall_time=time.time(), **what)
        self._records.write(event.SerializeToString())
        if self._waiting.tell() > MOST_BYTES:
            self.flush()

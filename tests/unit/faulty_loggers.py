"""Loggers with faults, for the process that runs a logger. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mpitrain.record.loggers import Logger


class Faulty(Logger):
    """Fails in the method that a file names."""

    def __init__(self, run_dir: Path) -> None:
        self.where = (run_dir / "where").read_text()
        self.call("make")

    def call(self, name: str) -> None:
        if name == self.where:
            raise ArithmeticError("this is the fault")
        if name == self.where.removeprefix("exit in "):
            sys.exit(3)
        if name == self.where.removeprefix("die in "):
            os.kill(os.getpid(), signal.SIGKILL)

    def log_hyperparams(self, params: Any) -> None:
        self.call("log_hyperparams")

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.call("log_metrics")

    def log_images(self, name: str, images: Any, step: int) -> None:
        self.call("log_images")

    def save(self) -> None:
        self.call("save")

    def finalize(self, status: Any) -> None:
        self.call("finalize")


class Hanging(Logger):
    """Waits until it is let go, then counts."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.num = 0

    def log_metrics(self, metrics: Any, step: int) -> None:
        while not (self.run_dir / "go").exists():
            time.sleep(0.01)
        self.num += 1

    def save(self) -> None:
        (self.run_dir / "num").write_text(str(self.num))


class Plain:
    """Not a `Logger`, but with methods of these names, as Lightning's loggers."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "plain"

    def log_hyperparams(self, params: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step}\n")

    def save(self) -> None:
        pass

    def finalize(self, status: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{status}\n")

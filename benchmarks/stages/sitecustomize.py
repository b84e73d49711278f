"""Notes when a training process reaches its stages; loaded by Python as it starts.

With its folder in PYTHONPATH, and the name of a folder in BENCH_STAGES, every process
that makes a process group leaves a file there, named by its process id: the times of
the system's monotonic clock, as doubles in the order of STAGES, 0 for what was not
reached. The same hooks for everybody's program, which knows nothing of them.
"""

from __future__ import annotations

import functools
import importlib.abc
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

STAGES = (
    *("python", "before MPI_Init", "MPI_Init", "torch"),
    *("before process group", "process group", "first step", "last step"),
)

_found = bytearray(8 * len(STAGES))


def _note(stage: str) -> None:
    struct.pack_into("d", _found, 8 * STAGES.index(stage), time.monotonic())


def _was(stage: str) -> bool:
    return struct.unpack_from("d", _found, 8 * STAGES.index(stage))[0] > 0


def _note_around(owner: ModuleType, name: str, stage: str) -> None:
    """Note when a function begins and ends, the first time."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args: object, **kwargs: object) -> object:
        if _was(stage):
            return function(*args, **kwargs)
        _note(f"before {stage}")
        result = function(*args, **kwargs)
        _note(stage)
        return result

    setattr(owner, name, noted)


def _keep() -> None:
    """Write into a file's memory from now on: a rank may leave in any way."""
    global _found
    with (Path(os.environ["BENCH_STAGES"]) / str(os.getpid())).open("w+b") as file:
        file.write(_found)
        file.flush()
        _found = mmap.mmap(file.fileno(), len(_found))


def _step(*_: object) -> None:
    if not _was("first step"):
        _keep()
        _note("first step")
    _note("last step")


def _mpi_is_there(module: ModuleType) -> None:
    _note_around(module, "Init_thread", "MPI_Init")


def _torch_is_there(_: ModuleType) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _note("torch")
    register_optimizer_step_post_hook(_step)


def _distributed_is_there(module: ModuleType) -> None:
    _note_around(module, "init_process_group", "process group")


_THEN: dict[str, Callable[[ModuleType], None]] = {
    "mpi4py.MPI": _mpi_is_there,
    "torch": _torch_is_there,
    "torch.distributed.distributed_c10d": _distributed_is_there,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and calls back when it has been imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        # Also asked for by who does not import it: the callback waits for the import.
        if fullname not in _THEN:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            if then := _THEN.pop(fullname, None):
                then(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if "BENCH_STAGES" in os.environ:
    _note("python")
    os.register_at_fork(after_in_child=lambda: _note("python"))  # of a warm rank
    sys.meta_path.insert(0, _Finder())

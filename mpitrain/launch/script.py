"""Somebody's own script, module or program, started as torchrun would start it.

The script becomes ``__main__`` of this process: MPI, the guard and the store stand
around it, and it may start torch.distributed by itself, by `mpitrain.init`, or never.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn

from mpitrain.errors import UsageError, agreed
from mpitrain.flags import PROGRAM
from mpitrain.launch import program, start, store
from mpitrain.launch.config import TIMEOUT_SECONDS, LaunchConfig
from mpitrain.launch.contradictions import MPI_RANK_VARIABLES
from mpitrain.launch.current import set_current
from mpitrain.launch.ending import exit_status, finish_mpi, finish_python
from mpitrain.launch.environ import script_variables
from mpitrain.launch.guard import Guard, leave
from mpitrain.launch.target import Asked, find_module, find_program, read_script
from mpitrain.topology import all_or_none, wait_for_all
from mpitrain.watchdog.heartbeat import State
from mpitrain.watchdog.process import COMMANDS, launchers_of, name_of
from mpitrain.world import World


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A start without process group, for the script's own `mpitrain.init`."""

    guard: Guard
    config: LaunchConfig
    world: World


_waiting: list[Standing] = []
"""At most one: what `run` has started and `take` has not yet taken."""


def run(guard: Guard, asked: Asked, environ: MutableMapping[str, str]) -> None:
    """Start all but the process group, run the script, and end with all ranks.

    Collective over all ranks.

    Args:
        guard: The guard that stands.
        asked: What the command line asks for.
        environ: The environment, which is written to.

    Raises:
        LaunchError: The job cannot start; on every rank or on none.
        UsageError: There is no such script; on every rank or on none.
        ProgramFailed: The program ended with a status that is not 0.
        BaseException: What the script raised, ``sys.exit(0)`` excepted.
    """
    if asked.target.kind == "program":
        _run_program(guard, asked, environ)
        return
    world, main, code = _load(guard, asked, environ)
    _waiting[:] = [Standing(guard=guard, config=asked.config, world=world)]
    set_current(guard, world)
    start.watch_steps(guard, asked.config, "in the script")
    # It stays: threads, `atexit` functions and pickle may look for it till the end.
    # Processes that multiprocessing spawned name its classes by the second.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    # Functions of `atexit` run last in, first out: the script's may still communicate.
    rank_itself = os.getpid()
    atexit.register(_at_exit, guard, rank_itself)
    _take_over_exits(guard, rank_itself)
    try:
        exec(code, main.__dict__)
    except SystemExit as left:
        if exit_status(left) != 0:
            raise
    if os.getpid() != rank_itself:  # a process that the script forked is no rank
        finish_python()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _run_program(guard: Guard, asked: Asked, environ: MutableMapping[str, str]) -> None:
    """Run what is no Python beside this rank, and wait for it and for the others.

    Collective over all ranks.
    """
    target = asked.target
    path = all_or_none(
        guard.comm, lambda: find_program(target.name, environ), "find the program"
    )
    _prepare(guard, asked, environ)
    if guard.watched is not None:
        guard.watched.progress("in the program")
    program.run(path, (target.name, *target.args), environ)
    leave_together(guard)


def _load(
    guard: Guard, asked: Asked, environ: MutableMapping[str, str]
) -> tuple[World, ModuleType, CodeType]:
    """Start, and read the script or find the module; `sys.argv` and path are its own.

    Collective over all ranks.

    Returns:
        Where this process stands; what is to be ``__main__``, and its code.
    """
    comm, target = guard.comm, asked.target
    if target.kind == "script":
        main, code = all_or_none(
            comm, lambda: read_script(target.name), "read the script"
        )
        world = _prepare(guard, asked, environ)
        path = Path(target.name).resolve()
        set_path(str(path if main.__spec__ else path.parent))
        sys.argv[:] = [target.name, *target.args]
        return world, main, code
    # After the start: packages above the module are imported to find it.
    world = _prepare(guard, asked, environ)
    set_path(os.getcwd())
    sys.argv[:] = ["-m", *target.args]  # as Python has it while it looks for one
    with guard.stage("find the module"):
        main, code = all_or_none(
            comm, lambda: find_module(target.name), "find the module"
        )
    sys.argv[0] = str(main.__file__)
    return world, main, code


def _at_exit(guard: Guard, rank_itself: int) -> None:
    if os.getpid() == rank_itself:
        with guard:
            leave_together(guard)


def _take_over_exits(guard: Guard, rank_itself: int) -> None:
    """Let ``os._exit(0)`` wait for the others, and ``MPI.COMM_WORLD.Abort`` be known.

    A process that ends without MPI_Finalize ends the job, with status 0, too (Open MPI
    4.1, 5.0, MPICH 5.0; tried). Other statuses of ``os._exit`` are meant to end it.
    """
    from mpi4py import MPI

    exit_at_once = os._exit

    def leave_and_exit(status: int) -> NoReturn:
        os._exit = exit_at_once
        if status == 0 and os.getpid() == rank_itself:
            with guard:
                leave_together(guard)
            if guard.watched is not None:
                guard.watched.close()
            finish_mpi(0)
        exit_at_once(status)

    class AllRanks(MPI.Intracomm):
        def Abort(self, errorcode: int = 0) -> NoReturn:
            if guard.watched is not None:
                guard.watched.set_state(State.FAILING)
            super().Abort(errorcode)

    os._exit = leave_and_exit
    MPI.COMM_WORLD = AllRanks(MPI.COMM_WORLD)  # type: ignore[misc]


def _prepare(guard: Guard, asked: Asked, environ: MutableMapping[str, str]) -> World:
    """Start all but the process group, and say so in the environment.

    Collective over all ranks.
    """
    world = start.prepare(guard, asked.config, TIMEOUT_SECONDS, environ)
    environ.update(script_variables(world, asked.run_id, environ))
    if world.world_size == 1:
        guard.store = None  # its port is for the script, or for what it spawns
    else:
        store.let_scripts_open_their_own(world.master_port)
        start.watch_returns(guard, world)
    end_stdin()
    return world


def end_stdin() -> None:
    """Give this rank an empty stdin where mpirun's own is ``/dev/null``.

    Open MPI 5's mpirun hands rank zero a pipe that it never closes: whoever reads it
    to its end waits for ever (5.0.11, tried; Open MPI 4.1 and MPICH close it).
    """
    above = launchers_of(os.getpid(), MPI_RANK_VARIABLES)
    if not above or name_of(above[-1].pid) not in COMMANDS:
        return
    with contextlib.suppress(OSError):  # another user's mpirun, or no stdin
        null = os.stat(os.devnull)  # noqa: PTH116
        theirs = os.stat(f"/proc/{above[-1].pid}/fd/0")  # noqa: PTH116
        if os.path.samestat(theirs, null) and stat.S_ISFIFO(os.fstat(0).st_mode):
            descriptor = os.open(os.devnull, os.O_RDONLY)
            os.dup2(descriptor, 0)
            os.close(descriptor)


def take(guard: Guard, config: LaunchConfig) -> Standing | None:
    """Take the start that stands already, for `mpitrain.init` in a script.

    Args:
        guard: The caller's guard, which gets the store.
        config: What the caller asks for.

    Returns:
        Where this process stands, and for what to watch it: where the caller names no
        time for hangs, ``run``'s holds. ``None`` where nothing was started, or where it
        was taken before: a second job is a start of its own.

    Raises:
        UsageError: It asks for another start than ``run`` made; raised on every rank
            where all ask for the same.
    """
    if not _waiting:
        return None
    standing = _waiting.pop()
    for name, default in (
        ("device", "auto"),
        ("backend", "auto"),
        ("interface", None),
    ):
        asked, made = getattr(config, name), getattr(standing.config, name)
        if asked not in (default, made):
            raise agreed(
                UsageError(
                    f"the script calls mpitrain.init({name}={asked!r}), but `run` has "
                    f"started with {made!r} already; expected the same.\n"
                    f"Type: {PROGRAM} run --{name} {asked} ..."
                )
            )
    guard.store = standing.guard.store
    guard.returned, standing.guard.returned = standing.guard.returned, None
    hang_timeout = config.hang_timeout or standing.config.hang_timeout
    return replace(standing, config=replace(config, hang_timeout=hang_timeout))


def set_path(folder: str) -> None:
    """Let imports begin in a folder, in place of where Python began for us."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def leave_together(guard: Guard) -> None:
    """Wait for the other ranks and take down what is left of the process group.

    Collective over all ranks.

    Asleep and without limit: the last rank may evaluate for an hour.

    Args:
        guard: The guard that stands.
    """
    leave(guard, None)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
    wait_for_all(guard.comm)  # before rank zero takes the store away
    guard.store = None

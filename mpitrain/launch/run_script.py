"""A user's own script, module or program, started as torchrun would start it.

The script becomes ``__main__`` of this process: MPI, the job and its store stand
around it, and it may start torch.distributed by itself, by `mpitrain.init`, or never.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NoReturn, TypeVar

from mpitrain.config import TIMEOUT_SECONDS
from mpitrain.errors import LaunchError
from mpitrain.flags import PROGRAM
from mpitrain.launch import init
from mpitrain.launch.env_checks import RANK_PID
from mpitrain.launch.import_torch import WITH_TORCH
from mpitrain.launch.job import Job
from mpitrain.launch.process_exit import (
    LOST_OUTPUT,
    exit_status,
    finish_mpi,
    finish_python,
    flush,
    flush_output,
    write_status,
)
from mpitrain.launch.run_target import (
    Kind,
    RunRequest,
    Target,
    find_module,
    find_program,
    read_script,
)
from mpitrain.mpi.collectives import all_or_none, barrier
from mpitrain.mpi.implementation import has_library
from mpitrain.mpi.launchers import is_program
from mpitrain.mpi.world import World
from mpitrain.schedulers.signals import had_term
from mpitrain.watchdog.heartbeat import State
from mpitrain.watchdog.process import has_signal, launchers_of, name_of, started_process

T = TypeVar("T")

Found = tuple[ModuleType, CodeType] | str  # ``__main__`` and its code, or a path
FINDERS: dict[Kind, Callable[[str], Found]] = {
    "script": read_script,
    "module": find_module,
    "program": find_program,
}


def run(job: Job, request: RunRequest, environ: MutableMapping[str, str]) -> None:
    """Start all but the process group, run the script, and end with all ranks."""
    world, found = load(job, request.target, lambda: _prepare(job, request, environ))
    if isinstance(found, str):
        run_program(job, request.target, found, environ)
        return
    job.pending = request.config
    job.run_in(world)
    job.watch_steps(request.config, "in the script")
    # Functions of `atexit` run last in, first out: the script's may still communicate.
    rank_itself = os.getpid()
    atexit.register(_leave_at_exit, job, rank_itself)
    _replace_exits(job, rank_itself)
    _stop_at_usr2(rank_itself)
    execute(found)


def execute(found: Found) -> None:
    """Run a script as ``__main__``; return if it ends with status 0."""
    assert isinstance(found, tuple)
    main, code = found
    rank_itself = os.getpid()
    # It stays: threads, `atexit` functions and pickle may look for it till the end.
    # Processes that multiprocessing spawned name its classes by the second.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        exec(code, main.__dict__)
    except SystemExit as left:
        if exit_status(left) != 0:
            raise
    if os.getpid() != rank_itself:  # a process that the script forked is no rank
        finish_python()
        flush()
        os._exit(0)


def load(job: Job, target: Target, start: Callable[[], T]) -> tuple[T, Found]:
    """Start, and find what is to be ``__main__`` and its code, or the program's path.

    Sets `sys.argv` and path. A script is read before the start, so that a wrong name is
    told at once; a module is found after it, because that imports the packages above
    it. Collective over all ranks, whose targets may differ in kind.
    """
    comm, name, is_module = job.comm, target.name, target.kind == "module"
    find, doing = FINDERS[target.kind], f"find the {target.kind}"
    early = all_or_none(comm, lambda: None if is_module else find(name), doing)
    started = start()
    if isinstance(early, tuple):
        path = Path(name).resolve()
        _set_path(str(path if early[0].__spec__ else path.parent))
    elif is_module:
        _set_path(os.getcwd())
    # As Python has it while it looks for a module.
    sys.argv[:] = ["-m" if is_module else name, *target.args]
    with job.start_step("find the module"):
        found = all_or_none(comm, lambda: early or find(name), doing)
    if is_module and isinstance(found, tuple):
        sys.argv[0] = str(found[0].__file__)
    return started, found


def _leave_at_exit(job: Job, rank_itself: int) -> None:
    if os.getpid() == rank_itself:
        with job.guard:
            _leave_together(job)


def _replace_exits(job: Job, rank_itself: int) -> None:
    """Let ``os._exit(0)`` wait for the others, and MPI's own start and end be known.

    A rank that becomes another program would leave MPI, which nobody notices.

    A process that ends without MPI_Finalize ends the job, with status 0, too (Open MPI
    4.1, 5.0, MPICH 5.0; tried). Other statuses of ``os._exit`` are meant to end it.
    """
    exit_at_once = os._exit

    def leave_and_exit(status: int) -> NoReturn:
        os._exit = exit_at_once  # finish_mpi calls it
        if status == 0 and os.getpid() == rank_itself:
            with job.guard:
                _leave_together(job)
            job.watchdog.close()
            finish_mpi(0)
        exit_at_once(status)

    def checked(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(execute)
        def execute_in_child(*words: Any, **named: Any) -> NoReturn:
            if os.getpid() == rank_itself and job.comm.size > 1:
                path = words[0] if words else named.get("path")
                raise LaunchError(
                    f"os.{execute.__name__} of {path} in a rank: MPI would lose this "
                    "rank, and the others would wait for it. Set the variables before "
                    f"mpirun, or: {PROGRAM} run --no-python python {sys.argv[0]} ..."
                )
            execute(*words, **named)

        return execute_in_child

    os._exit = leave_and_exit
    os.execv, os.execve = checked(os.execv), checked(os.execve)  # all others call them
    if not has_library():
        return
    from mpi4py import MPI

    class AllRanks(MPI.Intracomm):
        __module__ = MPI.__name__  # for pickle, by name, as of the original

        def __reduce__(self) -> str:
            return "COMM_WORLD"

        def Abort(self, errorcode: int = 0) -> NoReturn:
            job.watchdog.set_state(State.FAILING)
            super().Abort(errorcode)

    # A script that starts MPI itself would end: a second MPI_Init is an error.
    MPI.Init, MPI.Init_thread = lambda: None, lambda *_, **__: MPI.Query_thread()
    MPI.COMM_WORLD = AllRanks(MPI.COMM_WORLD)  # type: ignore[misc]


def _stop_at_usr2(rank_itself: int) -> None:
    """Let USR2 be TERM for a script without a handler of USR2, and once.

    A job script sends USR2 to mpirun, which forwards it, but not TERM, to all nodes.
    """

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if os.getpid() != rank_itself:
            return  # mpirun signals what the script forked, too
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        # A scheduler that ends the job has sent TERM to the rank, or to its proxy.
        started, above = started_process(rank_itself), launchers_of(rank_itself)
        if not had_term(started, above, os.environ):
            os.kill(rank_itself, signal.SIGTERM)

    signal.signal(signal.SIGUSR2, stop)


def _prepare(job: Job, request: RunRequest, environ: MutableMapping[str, str]) -> World:
    """Start all but the process group, and say so in the environment."""
    world = init.prepare(job, request.config, TIMEOUT_SECONDS, environ)
    environ.update(script_variables(world, request.run_id, environ))
    if world.world_size == 1:
        job.store = None  # its port is for the script, or for what it spawns
    else:
        from mpitrain.torch_compat import lead_scripts_by_port  # it imports torch

        lead_scripts_by_port(world.master_addr, world.master_port)
        job.watch_early_returns(world)
    _close_stdin()
    return world


def script_variables(
    world: World, run_id: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return all variables that a script written for torchrun may look for.

    The list is that of torch 2.15's ``elastic/agent/server/local_elastic_agent.py``.
    """
    return init.torchrun_variables(world) | {
        "GROUP_RANK": str(world.node_rank),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # With it env:// makes every rank, zero too, a client of the store that stands.
        # A world of one has none: the script, or what it starts, opens its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(world.world_size > 1),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
        ),
    }


def _close_stdin() -> None:
    """Give this rank an empty stdin where mpirun's own is ``/dev/null``.

    Open MPI 5's mpirun hands rank zero a pipe that it never closes: whoever reads it
    to its end waits for ever (5.0.11, tried; Open MPI 4.1 and MPICH close it).
    """
    above = launchers_of(os.getpid())
    if not above or not is_program(name_of(above[-1].pid)):
        return
    with contextlib.suppress(OSError):  # another user's mpirun, or no stdin
        null = os.stat(os.devnull)  # noqa: PTH116
        theirs = os.stat(f"/proc/{above[-1].pid}/fd/0")  # noqa: PTH116
        if os.path.samestat(theirs, null) and stat.S_ISFIFO(os.fstat(0).st_mode):
            descriptor = os.open(os.devnull, os.O_RDONLY)
            os.dup2(descriptor, 0)
            os.close(descriptor)


def _set_path(folder: str) -> None:
    """Let imports begin in a folder, in place of where Python began for us.

    What was imported after torch, by a fork server above all, must not hide what the
    folder has of that name, such as a ``statistics.py``: the script imports its own,
    and modules that have the other one keep it. Modules that torch imports stay.
    """
    if sys.flags.safe_path:  # with -P Python itself puts no folder there
        return
    sys.path[0] = folder
    names = {it.partition(".")[0] for it in sys.modules} if WITH_TORCH else set()
    for name in names - {*WITH_TORCH, "mpi4py"}:
        there = PathFinder.find_spec(name, [folder])
        known = getattr(sys.modules.get(name), "__spec__", None)
        if there is None or there.origin is None or known is None:
            continue
        if os.path.realpath(there.origin) != os.path.realpath(known.origin or ""):
            for it in [it for it in sys.modules if it.partition(".")[0] == name]:
                del sys.modules[it]


def _leave_together(job: Job) -> None:
    """Wait for the other ranks and destroy what is left of the process group."""
    job.leave(None)  # the last rank may evaluate for an hour
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
    barrier(job.comm)  # before rank zero takes the store away
    job.store = None
    if not job.guard.has_failed:  # a world of one comes here then, too
        # Not before: another rank may fail till now.
        write_status(0 if flush_output() is None else LOST_OUTPUT)


FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What the launcher sends to a rank, and the program is meant to get."""

_KILL_GROUP = 'read -r group || exit; read -r end; kill -KILL "-$group"'
"""Kill the process group that the first line of stdin names, when stdin ends."""


class ProgramFailed(LaunchError):
    """The program of this rank ended with a status that is not 0."""


def run_program(
    job: Job, target: Target, path: str, environ: MutableMapping[str, str]
) -> None:
    """Run a program beside this rank, and wait for it and for the other ranks.

    It has a process group of its own: mpirun signals the whole group of a rank (Open
    MPI 4.1 and 5.0, MPICH 5.0; tried), and a signal that is forwarded besides would
    come twice. A shell in a session of its own kills that group when this process ends
    in any way; it is started, like the program, without a fork of this process's
    memory, which some networks of MPI do not bear.
    """
    job.watchdog.progress("in the program")
    with subprocess.Popen(
        ["/bin/sh", "-c", _KILL_GROUP],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as killer:
        argv = (target.name, *target.args)
        # It is the rank: a training in it would be one of many.
        environ.pop(RANK_PID, None)  # none without mpirun
        child = subprocess.Popen(argv, executable=path, env=environ, process_group=0)
        assert killer.stdin is not None
        killer.stdin.write(b"%d\n" % child.pid)
        with _forwarding(child):
            status = child.wait()
        # Otherwise, as with an exception here, the end of this block closes the shell's
        # stdin, and it kills what is left of the group.
        if status == 0:
            killer.kill()  # what the program left running on purpose may stay
    if status != 0:
        raise failure(target.name, status)
    _leave_together(job)


def failure(name: str, status: int) -> ProgramFailed:
    """Return the error, with a shell's exit status, for a status of `subprocess`."""
    text = f"ended with status {status}"
    if status < 0:
        with_name = -status in {*signal.Signals}
        by = signal.Signals(-status).name if with_name else f"signal {-status}"
        text = f"was killed by {by}"
    error = ProgramFailed(f"{name} {text}")
    error.exit_status = status if status > 0 else 128 - status
    return error


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    has_forwarded_term = False

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal has_forwarded_term
        is_usr2 = number == signal.SIGUSR2
        # It would kill a program that has no handler.
        if is_usr2 and not has_signal(child.pid, "SigCgt", number):
            signal.signal(number, signal.SIG_IGN)
            if has_forwarded_term:
                return
            number = signal.SIGTERM  # as for a script
        if number == signal.SIGTERM:
            # PBS signals no program of a warm rank in another session than mpirun.
            if had_term(child.pid, launchers_of(os.getpid()), os.environ):
                return
            has_forwarded_term = True
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    yield
    # Others may have nobody to go to now, but must not end a rank that waits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

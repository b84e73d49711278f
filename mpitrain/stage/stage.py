"""`python -m mpitrain stage`: its command line, the order of things, what it prints.

The command runs in the same processes: after `exec` a second MPI_Init fails (Open MPI,
MPICH). The original files stay where they are, so that a path that is not replaced
still leads somewhere.
"""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.job import Job
from mpitrain.launch.run_target import Target, split
from mpitrain.mpi.collectives import Compressed, barrier, min_over_ranks
from mpitrain.mpi.topology import node_comm
from mpitrain.mpi.world import list_hosts
from mpitrain.settings import setting
from mpitrain.stage.copies import NodeCopy, hold
from mpitrain.stage.environment import Relocation, activate, find_roots
from mpitrain.stage.stream import Entry, Index, Source, send_through, walk

if TYPE_CHECKING:
    from mpi4py import MPI

USAGE = f"""\
  {PROGRAM} stage [FLAGS] -- python -m mpitrain ...
  {PROGRAM} stage [FLAGS] -- python SCRIPT.py [ARGS]
  {PROGRAM} stage [FLAGS] -- python -m PACKAGE.MODULE [ARGS]"""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Copy Python and its packages to each node by MPI, and run a command from there.

    Rank zero reads the environment; the other ranks receive it.
    """

    to: str | None = None
    """Folder on each node. '$NAME' in quotes is a variable of the rank. Default: the
    first folder of $SLURM_TMPDIR, $TMPDIR and /tmp."""
    data: tuple[str, ...] = setting((), is_repeatable=True)
    """A file or folder to copy, too, as the command names it; may be given several
    times."""


def read_words(
    flags: Sequence[str], words: Sequence[str]
) -> tuple[StageConfig, Target]:
    """Read the flags and the command; called on rank zero."""
    program, usage = f"{PROGRAM} stage", f"Usage:\n{USAGE}\n"
    config = read_flags(StageConfig, flags, program=program, further=usage, files=False)
    for path in config.data:
        error = ""
        if not Path(path).exists():
            error = "a file or folder, found nothing"
        elif "/" not in path:  # it may be another word of the command, too: a name
            error = f"a path with a slash, as the command names it: ./{path}"
        elif Path.cwd().is_relative_to(Path(path).resolve()):
            error = "a folder of data alone; what the command writes is in it, too"
        if error:
            raise UsageError(f"--data {path}: expected {error}")
    return config, read_command(words)


def read_command(words: Sequence[str], first: Target | None = None) -> Target:
    """Read the words after ``--``; ``first`` is what rank zero has read.

    >>> read_command(["python3", "-m", "mpitrain", "--epochs", "3"])
    Target(kind='module', name='mpitrain', args=('--epochs', '3'))
    """
    program, *rest = words or [""]
    flags, target = split(rest)
    # The command runs in this process: another Python cannot be had.
    folders = {Path(it).parent.resolve() for it in (program, sys.executable)}
    is_here = "/" not in program or len(folders) == 1
    is_python = program == sys.executable or Path(program).name.startswith("python")
    is_right = is_here and is_python and flags in ([], ["-u"])
    if not is_right or target is None or target.kind == "program":
        raise UsageError(
            f"stage runs a command of {sys.executable}; found {' '.join(words)!r} "
            f"after --, expected one of\n{USAGE}\n"
            "Options of Python, but -u: python -X ... -m mpitrain stage"
        )
    if target.kind == "script" and not Path(target.name).exists():
        raise UsageError(f"stage: there is no script {target.name!r} in {os.getcwd()}")
    if first is not None and replace(target, args=()) != replace(first, args=()):
        found = f"found {target.name} here and {first.name} on rank zero"
        raise UsageError(f"stage: {found}, expected one command; its words may differ")
    return target


def run(
    job: Job,
    config: StageConfig,
    target: Target,
    main: Callable[[Sequence[str]], int],
    *,
    is_unbuffered: bool,
) -> int:
    """Stage, and run the command in this process; return its exit status.

    `main` runs a command line of mpitrain; with `is_unbuffered`, as by ``python -u``.
    """
    with job.guard:
        with job.start_step("stage"):
            target = stage(job, config, target)
        job.watchdog.idle()
        for stream in (sys.stdout, sys.stderr):
            if is_unbuffered and isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
        if (target.kind, target.name) != ("module", "mpitrain"):
            # Only now: from the copy.
            from mpitrain.launch.run_script import execute, load

            _, found = load(job, target, lambda: None)
            execute(found)
            return 0
    sys.argv[1:] = target.args
    return main(target.args)


def stage(job: Job, config: StageConfig, target: Target) -> Target:
    """Stage, and let this process use the copies of its node from now on.

    Collective over all ranks. Returns the target of this rank. Paths of ``--data``
    in it are replaced if all nodes have a copy in the same folder: rank zero reads the
    flags of a training for all.
    """
    comm, copies, error = job.comm, Copies(), ""
    beat = partial(job.watchdog.start, "stage")
    on_node = node_comm(comm)
    leaders = cast("MPI.Intracomm", comm.Split(min(on_node.rank, 1), key=comm.rank))
    # Ranks that wait are alive. Those that they wait for beat when something moves.
    with job.mpi.cancel_waits_by(beat):
        if on_node.rank == 0:
            copies = _copy_all(leaders, config, beat)
        barrier(on_node)
        copies = on_node.bcast(copies)
        try:
            for folder in copies.folders:
                hold(folder)  # each process: that which has copied may end first
        except Exception as failure:  # of any kind: staging ends no job
            error = f"{socket.gethostname()}: {failure}"
        first = min_over_ranks(comm, comm.rank if error else comm.size)
        if first < comm.size:
            copies, error = Copies(), comm.bcast(error, first)
            if comm.rank == 0:
                _warn(f"the original files are read on all nodes: {error}")
        in_words = comm.bcast(copies.in_words)
    activate(Relocation(copies.environment, copies.data), os.environ)
    move, below = Relocation({}, in_words), Relocation(in_words)
    for word in target.args if comm.rank == 0 else ():
        path = os.path.abspath(word.rpartition("=")[2])  # noqa: PTH100
        if below(path) != path and path not in in_words:
            _warn(f"{word} is below --data: the command uses the original, no copy")
    args = tuple(map(move.word, target.args))
    return replace(target, name=move.word(target.name), args=args)


class Copies(NamedTuple):
    """The copies of a node: their folders, and their paths by the original ones."""

    folders: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    data: Mapping[str, str] = {}
    in_words: Mapping[str, str] = {}  # on rank zero: of data, if all nodes have them


def _copy_all(
    leaders: MPI.Intracomm, config: StageConfig, beat: Callable[[], object]
) -> Copies:
    """Copy all roots to all nodes, and report. Collective over the nodes' leaders."""
    started, to = time.perf_counter(), _folder(config.to)
    # They change at different times: each has a copy of its own.
    roots, data_roots = find_roots(config.data)
    environment = _copy(leaders, roots, to, beat, rewrites=True)
    data = _copy(leaders, data_roots, to, beat, rewrites=False)
    copies = (environment, data)
    error = "; ".join(dict.fromkeys(it.error for it in copies if it.error))
    had_it = all(it.had_it for it in copies)
    barrier(leaders)
    nodes = leaders.gather((socket.gethostname(), error, had_it, data.paths)) or []
    if nodes:
        _print_report(copies, nodes, time.perf_counter() - started)
    is_same = all(it[-1] == data.paths for it in nodes)
    folders = [it.folder for it in copies if it.paths]
    return Copies(folders, environment.paths, data.paths, data.paths if is_same else {})


def _copy(
    leaders: MPI.Intracomm,
    roots: Mapping[str, str],
    to: str,
    beat: Callable[[], object],
    *,
    rewrites: bool,
) -> NodeCopy:
    """Copy rank zero's roots to all nodes. Collective over the nodes' leaders."""
    error = ""
    entries: list[Entry] = []
    if leaders.rank == 0:
        try:
            entries = walk(roots.values(), beat)
        except Exception as failure:  # of any kind: staging ends no job
            error = str(failure)
    barrier(leaders)
    *found, error = leaders.bcast(Compressed((roots, entries, error))).value
    index = Index(*found)
    # A copy under a path that this node's Python does not have would not be used.
    if rewrites and index.roots and sys.prefix not in index.roots:
        error = error or f"its Python is that of {sys.prefix}"
    copy = NodeCopy(index, to, error, rewrites=rewrites)
    is_begun = copy.prepare()
    barrier(leaders)
    source, is_first = Source(index), leaders.rank == 0
    chain = cast("MPI.Intracomm", leaders.Split(not (is_begun or is_first)))
    if is_begun or (is_first and chain.size > 1):
        send_through(chain, index.sizes, source.read, copy.write, beat)
    chain.Free()
    barrier(leaders)
    # An error of rank zero is one of all copies: what it sent after that is no file.
    copy.finish(*leaders.bcast((source.error, copy.crc)))
    return copy


def _folder(to: str | None) -> str:
    if to is not None:
        return os.path.abspath(os.path.expandvars(to))  # noqa: PTH100
    named = [os.environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    # PBS removes its folder with the job; the next job finds a copy beside it.
    above, _, name = named[1].rpartition("/")
    if name == f"pbs.{os.environ.get('PBS_JOBID')}" and os.access(above, os.W_OK):
        named[1] = above
    return next((it for it in named if it and Path(it).is_dir()), "/tmp")


def _print_report(
    copies: Sequence[NodeCopy], nodes: Sequence[tuple[Any, ...]], seconds: float
) -> None:
    hosts_by_error: dict[str, list[str]] = {}
    for host, error, *_ in nodes:
        hosts_by_error.setdefault(error, []).append(host)
    num_good = len(hosts_by_error.pop("", []))
    for error, hosts in hosts_by_error.items():
        _warn(f"the original files are read on {list_hosts(hosts)}: {error}")
    num_files = sum(len(it.index.files) for it in copies)
    size = sum(it.index.size for it in copies)
    num_had = sum(had_it for _, _, had_it, _ in nodes)
    had_it = f"{num_had} node{'s' * (num_had != 1)} had a copy already"
    text = (
        f"{num_files:,} files, {size / 1e6:,.0f} MB, on {num_good} of {len(nodes)} "
        f"nodes in {seconds:.1f} s; {had_it}"
    )
    if not any(it.index.roots for it in copies):
        text = f"nothing: {sys.prefix} belongs to each node's own system"
    print(f"staged: {text}", file=sys.stderr, flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)

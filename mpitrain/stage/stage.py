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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.job import Job
from mpitrain.launch.run_target import Target, split
from mpitrain.mpi.collectives import Compressed, barrier, cancel_waits_by
from mpitrain.mpi.topology import node_comm
from mpitrain.mpi.world import list_hosts
from mpitrain.settings import setting
from mpitrain.stage.copies import NodeCopy, hold
from mpitrain.stage.environment import Relocation, Root, activate, find_roots, pairs_of
from mpitrain.stage.stream import PACK_NAME, Entry, Index, Source, send_through, walk

if TYPE_CHECKING:
    from mpi4py import MPI

NUM_WRITERS = min(4, len(os.sched_getaffinity(0)))
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
    """A file or folder to copy, too; the command reads the copy; may be given several
    times."""
    pack: str | None = None
    """File in which rank zero packs the environment for the next job, or none. Default:
    .mpitrain-stage.pack in the environment."""


class StageRequest(NamedTuple):
    """What the command line asks for. Equal on all ranks, but for `target.args`."""

    config: StageConfig
    target: Target
    is_unbuffered: bool


def read_words(flags: Sequence[str], command: Sequence[str]) -> StageRequest:
    """Read the flags and the command; called on rank zero."""
    program, usage = f"{PROGRAM} stage", f"Usage:\n{USAGE}\n"
    config = read_flags(StageConfig, flags, program=program, further=usage, files=False)
    for path in config.data:
        if not Path(path).exists():
            raise UsageError(f"--data {path}: expected a file or folder, found nothing")
        if "/" not in path:  # it may be another word of the command, too: a name
            expected = f"a path with a slash, as the command names it: ./{path}"
            raise UsageError(f"--data {path}: expected {expected}")
        if Path.cwd().is_relative_to(Path(path).resolve()):
            raise UsageError(
                f"--data {path} has the current folder in it, and so what the command "
                "writes; expected a folder of data alone"
            )
    return StageRequest(config, *read_command(command))


def with_own_args(request: StageRequest, command: Sequence[str]) -> StageRequest:
    """Return the request of rank zero, with the arguments of this rank's command."""
    own, first = read_command(command)[0], request.target
    if replace(own, args=()) != replace(first, args=()):
        found = f"found {own.name} here and {first.name} on rank zero"
        raise UsageError(f"stage: {found}, expected one command; its words may differ")
    return request._replace(target=own)


def read_command(command: Sequence[str]) -> tuple[Target, bool]:
    """Read the words after ``--``; return the target, and whether ``-u`` is given.

    >>> read_command(["python3", "-u", "-m", "mpitrain", "--epochs", "3"])
    (Target(kind='module', name='mpitrain', args=('--epochs', '3')), True)
    """
    program, *rest = command or [""]
    flags, target = split(rest)
    is_python = program == sys.executable or Path(program).name.startswith("python")
    is_wrong = not is_python or flags not in ([], ["-u"])
    if is_wrong or target is None or target.kind == "program":
        found = " ".join(command) if is_python else program
        raise UsageError(
            f"stage runs a command of Python; found {found!r} after --, expected one "
            f"of\n{USAGE}\nOptions of Python, but -u: python -X ... -m mpitrain stage"
        )
    folders = [Path(it).parent.resolve() for it in (program, sys.executable)]
    if "/" in program and folders[0] != folders[1]:
        raise UsageError(
            f"the command runs in this process, which is {sys.executable}; found "
            f"{program} after --. Start stage with that Python"
        )
    if target.kind == "script" and not Path(target.name).exists():
        raise UsageError(f"stage: there is no script {target.name!r} in {os.getcwd()}")
    return target, bool(flags)


def run(job: Job, request: StageRequest, main: Callable[[Sequence[str]], int]) -> int:
    """Stage, and run the command in this process; return its exit status.

    `main` runs a command line of mpitrain.
    """
    with job.guard:
        with job.start_step("stage"):
            target = stage(job, request)
        job.watchdog.idle()
        for stream in (sys.stdout, sys.stderr):
            if request.is_unbuffered and isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(write_through=True)
        if (target.kind, target.name) != ("module", "mpitrain"):
            # Only now: from the copy.
            from mpitrain.launch.run_script import execute, load

            _, found = load(job, target, lambda: None)
            execute(found)
            return 0
    sys.argv[1:] = target.args
    return main(target.args)


def stage(job: Job, request: StageRequest) -> Target:
    """Stage, and let this process use the copies of its node from now on.

    Collective over all ranks. Returns the target of this rank. Paths of ``--data``
    in it are replaced if all nodes have a copy at the same path: rank zero reads the
    flags of a training for all.
    """
    comm, config, started = job.comm, request.config, time.perf_counter()
    pairs: list[tuple[str, str]] = []  # old and new paths, of this node
    words: list[tuple[str, str]] = []  # those that the command line has
    notes: list[str] = []  # for the report
    beat = partial(job.watchdog.start, "stage")
    on_node = node_comm(comm)
    leaders = cast("MPI.Intracomm", comm.Split(min(on_node.rank, 1), key=comm.rank))
    # Ranks that wait are alive. Those that they wait for beat when something moves.
    with cancel_waits_by(beat):
        if on_node.rank == 0:
            pack: Path | None = None
            if config.pack != "none":
                pack = Path(config.pack or f"{sys.prefix}/{PACK_NAME}").absolute()
            # They change at different times: each group has copies of its own.
            environment, data = find_roots(config.data)
            to = _folder(config.to)
            copies = [
                _copy(leaders, environment, pack, to, notes, beat, own_python=True),
                _copy(leaders, data, None, to, notes, beat, own_python=False),
            ]
            pairs = copies[0].pairs + copies[1].pairs
            error = "; ".join(dict.fromkeys(it.error for it in copies if it.error))
            had_it = all(it.had_it for it in copies)
            node = (socket.gethostname(), error, had_it, copies[1].pairs)
            barrier(leaders)
            if nodes := leaders.gather(node):
                _print_report(copies, nodes, notes, time.perf_counter() - started)
                if all(it[-1] == node[-1] for it in nodes):
                    move = Relocation(copies[1].pairs)
                    given = map(os.path.normpath, config.data)
                    moved = [(it, move(os.path.abspath(it))) for it in given]  # noqa: PTH100
                    words = [*copies[1].pairs, *moved]
        barrier(on_node)
        pairs = on_node.bcast(pairs)
        for path in {str(Path(new).parents[1]) for _, new in pairs}:
            hold(path)
        barrier(comm)
        words = comm.bcast(words)
    activate(Relocation(pairs), os.environ)
    move, target = Relocation(words), request.target
    args = tuple(map(move.word, target.args))
    return replace(target, name=move.word(target.name), args=args)


def _copy(
    leaders: MPI.Intracomm,
    roots: Sequence[Root],
    pack: Path | None,
    to: str,
    notes: list[str],
    beat: Callable[[], object],
    *,
    own_python: bool,
) -> NodeCopy:
    """Copy rank zero's roots to all nodes. Collective over the nodes' leaders.

    With `own_python` they have the Python that runs here.
    """
    error, ended = "", ("", 0)
    entries: list[Entry] = []
    if leaders.rank == 0:
        try:
            entries = walk(roots, pack, beat)
        except OSError as failure:
            error = f"{failure.filename}: {failure.strerror}"
    barrier(leaders)
    sent = leaders.bcast(Compressed((roots, entries, error))).value
    index, error = Index(*sent[:2]), sent[2]
    if own_python and index.roots and sys.prefix not in dict(pairs_of(index.roots, "")):
        error = error or f"its Python is that of {sys.prefix}"
    copy = NodeCopy(index, to, error, rewrites=own_python)
    is_begun = copy.prepare()
    barrier(leaders)
    needing = leaders.allgather(is_begun)
    chain = [it for it, needs in enumerate(needing) if needs or it == 0]
    if any(needing) and leaders.rank in chain:
        source = Source(copy.index, pack) if leaders.rank == 0 else None
        sinks = [(copy.write, NUM_WRITERS)] if is_begun else []
        sinks += [(source.write, 1)] if source else []
        read = source.read if source else None
        send_through(leaders, chain, copy.index.sizes, read, sinks, beat)
        if source is not None:
            source.close()
            ended = source.error, source.crc
            notes += ["pack read"] * source.reads_pack
            if source.warning:
                print(f"warning: {source.warning}", file=sys.stderr)
    barrier(leaders)
    copy.finish(*leaders.bcast(ended))
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
    copies: Sequence[NodeCopy],
    nodes: Sequence[tuple[Any, ...]],
    notes: list[str],
    seconds: float,
) -> None:
    reasons: dict[str, list[str]] = {}
    for host, error, *_ in nodes:
        reasons.setdefault(error, []).append(host)
    whole = _num(len(reasons.pop("", [])), "node")
    for reason, hosts in reasons.items():
        read = f"{_num(len(hosts), 'node')} read{'s' * (len(hosts) == 1)}"
        where = f"{list_hosts(hosts)} ({reason})"
        print(f"warning: {read} the original files: {where}", file=sys.stderr)
    files = _num(sum(len(it.index.files) for it in copies), "file")
    size = sum(it.index.size for it in copies)
    amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
    if num_had := sum(had_it for _, _, had_it, _ in nodes):
        notes.append(f"{_num(num_had, 'node')} had it")
    more = f" ({', '.join(notes)})" if notes else ""
    text = f"{files}, {amount}, on {whole} in {seconds:.1f} s{more}"
    if not any(it.index.roots for it in copies):
        text = f"nothing: {sys.prefix} belongs to each node's own system"
    print(f"staged: {text}", file=sys.stderr, flush=True)


def _num(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"

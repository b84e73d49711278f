"""`python -m mpitrain stage`: the order of things, and what it prints.

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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.launch.run_target import Target
from mpitrain.mpi.collectives import barrier, cancel_waits_by
from mpitrain.mpi.topology import node_comm
from mpitrain.mpi.world import list_hosts
from mpitrain.stage.copies import NodeCopy, hold
from mpitrain.stage.environment import (
    Relocation,
    Root,
    activate,
    cache_folders,
    environment_roots,
    pairs_of,
    roots_of,
)
from mpitrain.stage.pack import Index, Source, walk
from mpitrain.stage.send import send_through

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """What the command line asks for. Equal on all ranks, but for `target.args`."""

    to: str | None
    data: tuple[str, ...]
    pack: Path | None
    target: Target
    is_unbuffered: bool


class NodeResult(NamedTuple):
    """What one node has of one group of roots."""

    hostname: str
    path: str  # of its copy; empty: it has none
    had_it: bool
    error: str  # why it has none


class Roots(NamedTuple):
    """Roots that are staged together: the environment, or the rest."""

    content: Index
    results: list[NodeResult]
    notes: list[str]  # on rank zero
    warnings: list[str]  # on rank zero


def stage(guard: ExitGuard, request: StageRequest) -> Target:
    """Stage, and let this process use the copies of its node from now on.

    Collective over all ranks. Returns the target of this rank. Paths of ``--data``
    in it are replaced if all nodes have a copy at the same path: rank zero reads the
    flags of a training for all.
    """
    comm, started = guard.comm, time.perf_counter()
    pairs: list[tuple[str, str]] = []  # old and new paths, of this node
    words: list[tuple[str, str]] = []  # those that the command line has
    staged: list[Roots] = []

    def beat() -> None:
        guard.watched.start("stage")

    on_node = node_comm(comm)
    leaders = cast("MPI.Intracomm", comm.Split(min(on_node.rank, 1), key=comm.rank))
    # Ranks that wait are alive. Those that they wait for beat when something moves.
    with cancel_waits_by(beat):
        if on_node.rank == 0:
            # They change at different times: each group has copies of its own.
            further = roots_of([*request.data, *cache_folders(os.environ)])
            for roots in (environment_roots(), further):
                to, is_environment = _folder(request.to), roots is not further
                pack = request.pack if is_environment else None
                group = _stage_group(leaders, roots, pack, to, beat, is_environment)
                staged.append(group)
                path = group.results[leaders.rank].path
                pairs += pairs_of(group.content.roots, path) if path else []
            if path and {it.path for it in group.results} == {path}:
                words = pairs_of(group.content.roots, path)
                move = Relocation(words)
                for given in map(os.path.normpath, request.data):
                    words.append((given, move(str(Path(given).absolute()))))
        barrier(on_node)
        paths = [group.results[leaders.rank].path for group in staged]
        paths, pairs, words = on_node.bcast((paths, pairs, words))
        for path in paths:
            if path and on_node.rank > 0:
                hold(path)
        barrier(comm)
        words = comm.bcast(words)
    on_node.Free()
    leaders.Free()
    if comm.rank == 0:
        _print_report(staged, time.perf_counter() - started)
    activate(Relocation(pairs), os.environ)
    move, target = Relocation(words), request.target
    args = tuple(map(move.word, target.args))
    return replace(target, name=move.word(target.name), args=args)


def _stage_group(
    leaders: MPI.Intracomm,
    roots: Sequence[Root],
    pack: Path | None,
    to: str,
    on_progress: Callable[[], object],
    is_environment: bool,
) -> Roots:
    """Copy rank zero's roots to all nodes. Collective over the nodes' leaders."""
    index, error = Index((), ()), ""
    notes: list[str] = []
    warnings: list[str] = []
    if leaders.rank == 0:
        try:
            index = walk(roots, pack, on_progress)
        except OSError as failure:
            error = f"{failure.filename}: {failure.strerror}"
    barrier(leaders)
    data, error = leaders.bcast((index.encode(), error))
    index = Index.decode(data)
    if not index.roots and not error:
        return Roots(index, [NodeResult("", "", False, "")] * leaders.size, [], [])
    copy = NodeCopy(index, to)
    move = Relocation(pairs_of(index.roots, copy.path))
    if is_environment and index.roots and move(sys.prefix) == sys.prefix:
        error = f"its Python is that of {sys.prefix}"
    copy.error = error
    had_it = bool(index.roots) and not error and copy.prepare()
    needs_it = bool(index.roots) and not had_it and not copy.error
    barrier(leaders)
    needing = leaders.allgather(needs_it)
    chain = [rank for rank in range(leaders.size) if rank == 0 or needing[rank]]
    if any(needing) and leaders.rank in chain:
        source = Source(index, pack) if leaders.rank == 0 else None
        receiver = copy if needs_it else None
        send_through(leaders, chain, index, source, receiver, on_progress)
        if source is not None:
            source.close()
            error, warnings = source.error, source.warnings
            notes = ["pack read"] if source.reads_pack else []
    barrier(leaders)
    error = leaders.bcast(error)
    if copy.error:
        copy.error = error or copy.error
    if not had_it and index.roots:
        copy.finish(move, rewrites=is_environment)
    path = copy.path if index.roots and not copy.error else ""
    result = NodeResult(socket.gethostname(), path, had_it, copy.error)
    barrier(leaders)
    return Roots(index, leaders.allgather(result), notes, warnings)


def _folder(to: str | None) -> str:
    if to is not None:
        return os.path.abspath(os.path.expandvars(to))  # noqa: PTH100
    named = [os.environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    # PBS removes its folder with the job; the next job finds a copy beside it.
    above, _, name = named[1].rpartition("/")
    if name == f"pbs.{os.environ.get('PBS_JOBID')}" and os.access(above, os.W_OK):
        named[1] = above
    return next((it for it in named if Path(it).is_dir() and it), "/tmp")


def _print_report(staged: Sequence[Roots], seconds: float) -> None:
    groups = [it for it in staged if it.content.roots or it.results[0].error]
    lines = [f"warning: {text}" for group in groups for text in group.warnings]
    nodes = list(zip(*(group.results for group in groups), strict=True))
    whole = [node for node in nodes if all(it.path for it in node)]
    reasons: dict[str, list[str]] = {}
    for node in nodes:
        for reason in dict.fromkeys(it.error for it in node if it.error):
            reasons.setdefault(reason, []).append(node[0].hostname)
    if reasons:
        hosts = "; ".join(f"{list_hosts(it)} ({why})" for why, it in reasons.items())
        num = len(nodes) - len(whole)
        read = f"{_num(num, 'node')} {'reads' if num == 1 else 'read'}"
        lines.append(f"warning: {read} the original files: {hosts}")
    num_had = sum(all(it.had_it for it in node) for node in nodes)
    notes = [note for group in groups for note in group.notes]
    notes += [f"{_num(num_had, 'node')} had it"] if num_had else []
    size = sum(group.content.size for group in groups)
    num_files = sum(group.content.num_files for group in groups)
    more = f" ({', '.join(notes)})" if notes else ""
    lines.append(
        f"staged: {_num(num_files, 'file')}, {_size(size)}, on "
        f"{_num(len(whole), 'node')} in {seconds:.1f} s{more}"
        if groups
        else f"staged: nothing: {sys.prefix} belongs to each node's own system"
    )
    print("\n".join(lines), file=sys.stderr, flush=True)


def _size(num_bytes: int) -> str:
    is_large = num_bytes >= 1e9
    return f"{num_bytes / 1e9:.1f} GB" if is_large else f"{num_bytes / 1e6:.0f} MB"


def _num(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def run(
    guard: ExitGuard, request: StageRequest, main: Callable[[Sequence[str]], int]
) -> int:
    """Stage, and run the command in this process; return its exit status.

    `main` runs a command line of mpitrain.
    """
    with guard:
        with guard.stage("stage"):
            target = stage(guard, request)
        guard.watched.idle()
        if request.is_unbuffered:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(write_through=True)
        if (target.kind, target.name) != ("module", "mpitrain"):
            # Only now: from the copy.
            from mpitrain.launch.run_script import execute, load

            _, found = load(guard, target, lambda: None)
            execute(found)
            return 0
    sys.argv[1:] = target.args
    return main(target.args)

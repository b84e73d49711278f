"""`python -m mpitrain hostfile`, and host files: names of hosts, and their slots.

    node1 slots=4 max-slots=8      Open MPI
    node1:4                        MPICH
    node1                          PBS: a line for each slot

Open MPI reads PBS's format, too. It refuses two slot counts for a host; MPICH takes
comments only on lines of their own. Tried with Open MPI 5.0.11 and MPICH 5.0.2.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mpitrain.errors import LaunchError, UsageError
from mpitrain.mpi.launchers import DEFAULT_FORMAT, HOST_FILE_LINES, HostFileFormat
from mpitrain.schedulers import detect, read_allocation
from mpitrain.schedulers.allocation import AllocatedNode
from mpitrain.settings import setting
from mpitrain.tools.jobs.check_nodes import check_nodes, short_name

MAX_SLOTS = r"(?:\s+max[-_]slots=[1-9]\d*)?"
# An IPv6 address has a count behind a colon only where it is in brackets.
LINE = re.compile(
    r"(?P<hostname>\w[\w.@-]*|\[[\da-fA-F:.]+\]|[\da-fA-F]*:[\da-fA-F.]*:[\da-fA-F:.]*)"
    rf"(?::(?P<count>[1-9]\d*)|{MAX_SLOTS}\s+slots=(?P<slots>[1-9]\d*){MAX_SLOTS})?"
)


def parse(text: str, source: str) -> tuple[AllocatedNode, ...]:
    """Parse a host file of any format; `source` is its name, for messages.

    >>> [(node.hostname, node.slots) for node in parse("a:2", "f")]
    [('a', 2)]
    """
    slots: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).strip()
        if not words:
            continue
        found = LINE.fullmatch(words)
        if found is None:
            raise UsageError(
                f"{source}:{number}: found {words!r}; expected `node1 slots=4`, "
                "`node1 slots=4 max-slots=8`, `node1:4`, or `node1` once for each slot"
            )
        name = found["hostname"].strip("[]")
        if name in slots and found["slots"]:
            raise UsageError(
                f"{source}:{number}: {words!r} counts the slots of {name} a second "
                "time; expected one line with slots= for each host"
            )
        slots[name] += int(found["count"] or found["slots"] or 1)
    if not slots:
        raise UsageError(f"{source} names no host; expected lines like `node1 slots=4`")
    return tuple(AllocatedNode(hostname=it, slots=n) for it, n in slots.items())


def render(nodes: Iterable[AllocatedNode], file_format: HostFileFormat) -> str:
    r"""Return the text of a host file; ranks fill the hosts in this order.

    >>> render([AllocatedNode(hostname="a", slots=2)], "pbs")
    'a\na\n'
    """
    if file_format == "pbs":
        return "".join(f"{node.hostname}\n" * node.slots for node in nodes)
    line, nodes = HOST_FILE_LINES[file_format], list(nodes)
    six = next((it.hostname for it in nodes if ":" in it.hostname), "")
    if six and ":" in line:
        raise UsageError(
            f"--format {file_format}: {six} is an IPv6 address, which its lines "
            "cannot hold; expected a name, as in /etc/hosts"
        )
    return "".join(line.format(node.hostname, node.slots) + "\n" for node in nodes)


@dataclass(frozen=True, kw_only=True)
class HostfileConfig:
    """Write a host file for mpirun, from the nodes that SLURM or PBS gave this job.

    With --probe, how mpirun is started follows --, as in -- mpirun --bind-to none.
    """

    format: HostFileFormat = DEFAULT_FORMAT
    """For mpirun --hostfile (openmpi), mpirun -f (mpich), or both (pbs)."""
    slots: int | None = setting(None, minimum=1)
    """Processes on each node. Default: its GPUs if known, else its tasks."""
    gpus: Literal["auto", "require", "ignore"] = "auto"
    """auto: a slot for each GPU if known; require: or an error; ignore: tasks only."""
    from_file: Path | None = setting(None, flag="from")
    """A host file of any format to read instead of this job's nodes."""
    probe: bool = False
    """Leave out nodes where mpirun cannot start a process, or where a GPU is broken."""
    probe_seconds: float = setting(120.0, above=0)
    """Time limit of the probe, for all nodes together."""
    nodes: int | None = setting(None, minimum=1)
    """Maximum number of nodes; the others are spare."""
    min_nodes: int = setting(1, minimum=1)
    """Minimum number of nodes; fewer are an error."""
    exclude: tuple[str, ...] = setting((), metavar="HOST [HOST ...]")
    """Nodes to leave out, with their domain or without."""
    output: Path | None = None
    """File to write; never left half-written. Default: standard output."""

    def __post_init__(self) -> None:
        if self.gpus == "auto":
            return
        for flag, given in (("--slots", self.slots), ("--from", self.from_file)):
            if given is not None:
                raise UsageError(
                    f"--gpus {self.gpus} has no effect beside {flag} {given}, which "
                    "gives the slots; expected one of the two"
                )


def text_of(
    config: HostfileConfig, environ: Mapping[str, str], mpirun: Sequence[str] = ()
) -> str:
    """Return the host file; `mpirun` has the words that start it, for --probe."""
    if config.probe != bool(mpirun):
        raise UsageError(
            "hostfile --probe needs the words that start mpirun after --, and nothing "
            "else takes them: expected both, as in hostfile --probe -- mpirun"
        )
    comment = ""
    if (file := config.from_file) is not None:
        try:
            nodes = parse(file.read_text(), str(file))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--from {file} cannot be read: {reason}") from None
    else:
        nodes, scheduler = read_allocation(environ), detect(environ)
        job = f"{scheduler.name.upper()} job {scheduler.job_id}"
        comment, nodes = f"# {job}\n", _with_gpu_slots(nodes, config.gpus, job)
    if config.slots is not None:
        nodes = tuple(replace(n, slots=config.slots) for n in nodes)
    excluded = {*map(short_name, config.exclude)}
    nodes = tuple(n for n in nodes if short_name(n.hostname) not in excluded)
    if config.probe:
        nodes = _usable(nodes, mpirun, config.probe_seconds, environ)
    # After the probe: spare nodes take the place of those that it left out.
    nodes = nodes[: config.nodes]
    if len(nodes) < config.min_nodes:
        raise LaunchError(
            f"found {len(nodes)} nodes, expected --min-nodes {config.min_nodes} or more"
        )
    return ("" if config.format == "pbs" else comment) + render(nodes, config.format)


def _usable(
    nodes: tuple[AllocatedNode, ...],
    mpirun: Sequence[str],
    seconds: float,
    environ: Mapping[str, str],
) -> tuple[AllocatedNode, ...]:
    try:
        good, bad = check_nodes(nodes, mpirun, seconds, environ)
    except OSError as error:
        raise UsageError(
            f"{mpirun[0]} cannot be started: {error.strerror}; expected an mpirun "
            "after --"
        ) from None
    if not good:
        raise LaunchError(
            f"no node answers as it should: {'; '.join(bad)}. Expected a node that "
            "starts a process within --probe-seconds, with all its GPUs; ask for none "
            "(jobscript --gpus-per-node 0) to train on CPUs"
        )
    for reason in bad:
        print(f"left out: {reason}", file=sys.stderr, flush=True)
    return tuple(good)


def _with_gpu_slots(
    nodes: tuple[AllocatedNode, ...], gpus: str, job: str
) -> tuple[AllocatedNode, ...]:
    unknown = [node.hostname for node in nodes if node.gpus is None]
    if gpus == "require" and unknown:
        raise UsageError(
            f"{job} does not tell the GPUs of {', '.join(unknown)}. Expected "
            "--gpus-per-node or --gres in what it asked for (SLURM); PBS tells none: "
            "say --slots N, with N the GPUs of a node"
        )
    if gpus == "ignore" or unknown:
        return nodes
    return tuple(replace(node, slots=node.gpus or node.slots) for node in nodes)

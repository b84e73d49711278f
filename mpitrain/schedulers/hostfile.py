"""Host files: which machines, and room for how many processes on each.

    node1 slots=4 max-slots=8      Open MPI
    node1:4                        MPICH
    node1                          PBS: a line for each slot

Open MPI reads lines as of PBS, too: a name alone is a slot. What each mpirun takes was
tried with Open MPI 5.0.11 and MPICH 5.0.2; MPICH takes a comment on a line of its own
only, and Open MPI refuses two slot counts for a host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, get_args

from mpitrain.errors import UsageError
from mpitrain.schedulers.allocation import AllocatedNode

Dialect = Literal["openmpi", "mpich", "pbs"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

LINE = re.compile(
    r"(?P<hostname>\w[\w.@-]*)"
    r"(?::(?P<count>[1-9]\d*)"
    r"|\s+slots=(?P<slots>[1-9]\d*)(?:\s+max[-_]slots=(?P<max_slots>[1-9]\d*))?)?"
)


def parse(text: str, source: str) -> tuple[AllocatedNode, ...]:
    """Read a host file of any dialect.

    Args:
        text: The file's text.
        source: Where it comes from, for messages.

    Returns:
        The hosts in the order in which they are first named, slots added up.

    Raises:
        UsageError: A line is of no dialect, or there is no host.

    >>> [(node.hostname, node.slots) for node in parse("a:2", "f")]
    [('a', 2)]
    """
    nodes: dict[str, AllocatedNode] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).strip()
        if not words:
            continue
        node = _parse_line(words, f"{source}:{number}")
        before = nodes.get(node.hostname)
        if before is not None:
            if "slots=" in words:
                raise UsageError(
                    f"{source}:{number}: {words!r} counts the slots of "
                    f"{node.hostname} a second time; expected one line with slots= "
                    "for each host, as Open MPI does"
                )
            node = replace(before, slots=before.slots + node.slots)
        nodes[node.hostname] = node
    if not nodes:
        raise UsageError(f"{source} names no host; expected lines like `node1 slots=4`")
    return tuple(nodes.values())


def _parse_line(words: str, where: str) -> AllocatedNode:
    found = LINE.fullmatch(words)
    if found is None:
        raise UsageError(
            f"{where}: found {words!r}; expected `node1 slots=4` or `node1 slots=4 "
            "max-slots=8` (Open MPI), `node1:4` (MPICH), or `node1` once for each slot "
            "(PBS)"
        )
    slots = int(found["count"] or found["slots"] or 1)
    max_slots = int(found["max_slots"]) if found["max_slots"] else None
    if max_slots is not None and max_slots < slots:
        raise UsageError(
            f"{where}: max-slots={max_slots} is below slots={slots}; expected at least "
            "as many"
        )
    return AllocatedNode(hostname=found["hostname"], slots=slots, max_slots=max_slots)


def render(nodes: Iterable[AllocatedNode], dialect: Dialect) -> str:
    r"""Write a host file.

    Args:
        nodes: The hosts, in the order in which ranks shall fill them.
        dialect: Who shall read it.

    Returns:
        The file's text.

    >>> render([AllocatedNode(hostname="a", slots=2)], "pbs")
    'a\na\n'
    """
    return "".join(_render_node(node, dialect) for node in nodes)


def _render_node(node: AllocatedNode, dialect: Dialect) -> str:
    match dialect:
        case "openmpi":
            most = "" if node.max_slots is None else f" max-slots={node.max_slots}"
            return f"{node.hostname} slots={node.slots}{most}\n"
        case "mpich":
            return f"{node.hostname}:{node.slots}\n"
        case "pbs":
            return f"{node.hostname}\n" * node.slots

"""The answer for people: the parts that `report` makes, as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from mpitrain.mpi.world import format_ranges

WIDTH = 100
INDENT = " " * 13

Part = Mapping[str, Any]


def world_lines(found: Part) -> list[str]:
    """Show who is there, a line per node, and how they meet."""
    rows = [("node", "host", "ranks", "cores per rank", "threads", "device")]
    shares = [rank["cores"] for rank in found["ranks"]]
    for node in found["nodes"]:
        ranks = [found["ranks"][rank] for rank in node["ranks"]]
        for (cores, threads), group in groupby(
            ranks, key=lambda rank: (rank["cores"], rank["num_threads"])
        ):
            alike = list(group)
            of = f" of {node['usable_cores']}" if len(shares) > 1 else ""
            rows.append(
                (
                    str(node["node_rank"]),
                    node["hostname"],
                    format_ranges([rank["rank"] for rank in alike]),
                    f"{cores:.3g}{of}",
                    str(threads),
                    devices_in_words(alike),
                )
            )
    lines = aligned(rows)
    address = found["master_addr"]
    if ":" in address:
        address = f"[{address}]"
    lines += labelled("address", f"{address}:{found['master_port']}; {found['why']}")
    if found["num_nodes"] > 1:
        lines += labelled("interfaces", ", ".join(interfaces(found["nodes"])))
    return [*lines, *labelled("backend", found["backend"])]


def interfaces(nodes: Sequence[Part]) -> list[str]:
    """Sum up by which interface the nodes meet.

    >>> interfaces([{"hostname": f"n{i}", "address": f"10.0.0.{i}", "interface": "ib0",
    ...              "kind": "infiniband", "speed_mbps": 0} for i in range(3)])
    ['ib0 (infiniband) on n0 (10.0.0.0), n1 (10.0.0.1), n2 (10.0.0.2)']
    """
    by_name: dict[str, list[str]] = {}
    for node in nodes:
        speed = f", {node['speed_mbps']} Mb/s" if node["speed_mbps"] else ""
        name = f"{node['interface'] or 'unknown'} ({node['kind']}{speed})"
        by_name.setdefault(name, []).append(f"{node['hostname']} ({node['address']})")
    return [
        f"{name} on {', '.join(hosts[:4])}"
        + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        for name, hosts in by_name.items()
    ]


def devices_in_words(ranks: Sequence[Part]) -> str:
    """Sum up the devices of a node's ranks.

    >>> devices_in_words([{"device": "cpu", "shared": False}] * 2)
    'cpu'
    >>> devices_in_words([{"device": f"cuda:{i % 2}", "shared": True} for i in (0, 1)])
    'cuda:0-1, shared'
    """
    shared = ", shared" if any(rank["shared"] for rank in ranks) else ""
    names = list(dict.fromkeys(rank["device"] for rank in ranks))
    if names == ["cpu"]:
        return "cpu"
    return (
        f"cuda:{format_ranges(sorted(int(n.partition(':')[2]) for n in names))}{shared}"
    )


def software_lines(found: Part) -> list[str]:
    """Show versions and the scheduler."""
    versions = ", ".join(f"{name} {text}" for name, text in found["versions"].items())
    scheduler = found["scheduler"]
    job = f", job {scheduler['job_id']}" if scheduler["job_id"] else ""
    return [
        *labelled("versions", versions),
        *labelled("scheduler", scheduler["name"] + job),
    ]


def start_lines(found: Part) -> list[str]:
    """Show how long the start took."""
    start = found["start"]
    stages = ", ".join(
        f"{stage} {value:.2f}" for stage, value in start["stage_seconds"].items()
    )
    own = start["without_imports_seconds"]
    return labelled(
        "start",
        f"{own:.2f} s without imports, from MPI_Init's return; slowest rank of each: "
        f"{stages}",
    )


def pair_lines(found: Part) -> list[str]:
    """Show which nodes talk to each other."""
    pairs = found["pairs"]
    if pairs["num_pairs"] == 0:
        return labelled("pairs", "one node, so none to try")
    if pairs["unreachable"]:
        ways = len(pairs["unreachable"])
        return labelled(
            "pairs",
            f"{ways} of {2 * pairs['num_pairs']} ways between nodes are closed, so "
            "that gloo cannot start: no collectives, gradients and bandwidth",
        )
    said = f"{pairs['num_pairs']} of nodes, each connects to the other"
    said += f"; {pairs['num_exchanged']} sent to each other through torch"
    return labelled("pairs", said)


def collective_lines(found: Part) -> list[str]:
    """Show how many kinds are right, and which are not."""
    lines = []
    for entry in found["collectives"]:
        kinds = entry["kinds"]
        words = [f"{sum(k == 'right' for k in kinds.values())} right"]
        for outcome in ("wrong", "failed", "lacking"):
            some = [kind for kind, came in kinds.items() if came == outcome]
            if some:
                words.append(f"{outcome}: {', '.join(some)}")
        where = f"{entry['backend']} on {entry['device']}"
        lines += labelled("collectives", f"{where}: {'; '.join(words)}")
    return lines


def gradient_lines(found: Part) -> list[str]:
    """Show how far gradients are from those of one process."""
    ddp = found["gradients"]
    said = f"but for {ddp['largest_difference']:.1e} at most (float64, DDP)"
    if "fsdp" in ddp:
        said += f", {ddp['fsdp']['largest_difference']:.1e} (float32, FSDP)"
    return labelled("gradients", f"those of one process, {said}")


def bandwidth_lines(found: Part) -> list[str]:
    """Show the table of times and bandwidths."""
    bandwidth = found["bandwidth"]
    if not bandwidth["rows"]:
        return labelled("all-reduce", f"not measured: {bandwidth['left_out']}")
    names = list(bandwidth["rows"][0]["backends"])
    head = f"{'all-reduce':{len(INDENT)}}"
    lines = [
        head + "".join(f"{name:>32}" for name in names),
        " " * len(head) + f"{'ms':>14}{'GB/s':>9}{'bus GB/s':>9}" * len(names),
    ]
    for row in bandwidth["rows"]:
        cells = [
            f"{1e3 * cell['seconds']:14.3f}{cell['algorithm_gb_per_second']:9.3f}"
            f"{cell['bus_gb_per_second']:9.3f}"
            for cell in row["backends"].values()
        ]
        lines.append(
            f"{size_in_words(row['num_bytes']):>{len(INDENT)}}" + "".join(cells)
        )
    limits = bandwidth["limits"]
    known = [
        f"memory copy {limits['memory_copy_gb_per_second']:.2f} GB/s per rank, all at "
        "once"
    ]
    if limits["link_gb_per_second"]:
        known.append(f"link {limits['link_gb_per_second']:.2f} GB/s per node")
    lines += labelled("limits", "; ".join(known))
    if bandwidth["left_out"]:
        lines += labelled("left out", f"larger messages: {bandwidth['left_out']}")
    return lines


def finding_lines(found: Part) -> list[str]:
    """Show the findings, the worst first, and their number."""
    lines = []
    for finding in found["findings"]:
        label = f"{finding['severity'].upper():8}"
        lines += _wrapped(f"{label} {finding['name']}: {finding['found']}", " " * 9)
        lines += _wrapped(f"         -> {finding['remedy']}", " " * 12)
    counts = [
        f"{found[f'num_{name}s']} {name}{'s' * (found[f'num_{name}s'] != 1)}"
        for name in ("error", "warning", "note")
    ]
    seconds = f"; {found['seconds']:.1f} s" if "seconds" in found else ""
    return [*lines, ", ".join(counts) + seconds]


def size_in_words(num_bytes: int) -> str:
    """Write a message's size.

    >>> size_in_words(1024), size_in_words(4 * 2**20)
    ('1 KiB', '4 MiB')
    """
    if num_bytes < 2**20:
        return f"{num_bytes // 2**10} KiB"
    return f"{num_bytes // 2**20} MiB"


def labelled(label: str, text: str) -> list[str]:
    """Put a label before a text, and wrap the text beside it."""
    return _wrapped(f"{label:{len(INDENT)}}{text}", INDENT)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Put cells under each other.

    >>> aligned([("a", "bcd"), ("ef", "g")])
    ['a   bcd', 'ef  g']
    """
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )

"""The parts of the answer as JSON has them; the screen prints the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mpitrain.mpi.world import World
from mpitrain.schedulers import Scheduler
from mpitrain.tools.check.facts import RankFacts, shares
from mpitrain.tools.check.findings import Finding
from mpitrain.tools.check.looks import Facts
from mpitrain.tools.check.pairs import Failure

if TYPE_CHECKING:
    from mpitrain.tools.check.bandwidth import Bandwidth
    from mpitrain.tools.check.collectives import Result

FORMAT = 1
"""Grows when a field of the object changes its meaning."""

NOT_OURS = ("starting MPI", "import torch")
"""Stages of the start that are not counted as its own time."""

Part = dict[str, Any]


def as_json(found: Mapping[str, Any]) -> str:
    """Write the object; numbers that JSON has not become null."""
    return json.dumps(_finite(found), indent=1, allow_nan=False)


def of_failure(text: str) -> Part:
    """Make the object of a job that ended before it could say more."""
    error = Finding(
        severity="error",
        name="failed",
        found=text,
        remedy="see the message on standard error",
    )
    return {"format": FORMAT, **of_findings([error])}


def of_findings(found: Sequence[Finding]) -> Part:
    """Tell the findings, and how many there are of each severity."""
    counts = {
        f"num_{severity}s": sum(finding.severity == severity for finding in found)
        for severity in ("error", "warning", "note")
    }
    return {
        "status": "errors" if counts["num_errors"] else "passed",
        **counts,
        "findings": [asdict(finding) for finding in found],
    }


def of_world(world: World, facts: Facts, why: str) -> Part:
    """Tell who is there, and how they meet."""
    users: dict[tuple[str, str], int] = {}
    for node in facts.nodes:
        for rank in node.ranks:
            place = (node.hostname, facts.ranks[rank].gpu)
            users[place] = users.get(place, 0) + 1
    ranks: list[Part] = []
    for node_rank, node in enumerate(facts.nodes):
        records = [facts.ranks[rank] for rank in node.ranks]
        of_cores = shares(records, facts.hosts[node_rank].quota)
        for local_rank, (rank, record, cores) in enumerate(
            zip(node.ranks, records, of_cores, strict=True)
        ):
            ranks.append(
                {
                    "rank": rank,
                    "hostname": node.hostname,
                    "node_rank": node_rank,
                    "local_rank": local_rank,
                    "cores": cores,
                    "num_threads": record.num_threads,
                    "device": record.device,
                    "gpu": record.gpu or None,
                    "shared": bool(record.gpu) and users[node.hostname, record.gpu] > 1,
                }
            )
    ranks.sort(key=lambda entry: entry["rank"])
    nodes = [
        {
            "node_rank": node_rank,
            "ranks": list(node.ranks),
            "usable_cores": node.num_cores,
            **asdict(host),
        }
        for node_rank, (node, host) in enumerate(
            zip(facts.nodes, facts.hosts, strict=True)
        )
    ]
    return {
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "ranks": ranks,
        "nodes": nodes,
        "backend": world.backend,
        "master_addr": world.master_addr,
        "master_port": world.master_port,
        "why": why,
    }


def of_software(versions: Mapping[str, str], scheduler: Scheduler) -> Part:
    """Tell versions and who runs the job."""
    return {"versions": dict(versions), "scheduler": asdict(scheduler)}


def of_start(ranks: Sequence[RankFacts]) -> Part:
    """Tell how long each stage of the start took, on the slowest rank of each."""
    seconds = {
        stage: max(rank.stage_seconds.get(stage, 0.0) for rank in ranks)
        for stage in ranks[0].stage_seconds
    }
    own = sum(value for stage, value in seconds.items() if stage not in NOT_OURS)
    return {"start": {"without_imports_seconds": own, "stage_seconds": seconds}}


def of_pairs(
    num_nodes: int, failures: Sequence[Failure], exchanged: int, num_wrong: int
) -> Part:
    """Tell which nodes talked to each other."""
    return {
        "pairs": {
            "num_pairs": num_nodes * (num_nodes - 1) // 2,
            "unreachable": [asdict(failure) for failure in failures],
            "num_exchanged": exchanged,
            "num_wrong": num_wrong,
        }
    }


def of_collectives(
    kinds: Sequence[tuple[str, str]],
    by_rank: Sequence[Sequence[Result]],
    backends: Mapping[str, str],
) -> Part:
    """Tell what came of each kind: the worst of all ranks.

    Args:
        kinds: All kinds that were tried, with their devices.
        by_rank: What each rank found, but for what was right there.
        backends: Backend by device.
    """
    order = ("failed", "wrong", "lacking", "right")
    worst = dict.fromkeys(kinds, "right")
    for results in by_rank:
        for result in results:
            key = (result.kind, result.device)
            worst[key] = min(worst[key], result.outcome, key=order.index)
    return {
        "collectives": [
            {
                "device": device,
                "backend": backend,
                "kinds": {k: worst[k, d] for k, d in kinds if d == device},
            }
            for device, backend in backends.items()
        ]
    }


def of_gradients(
    differences: Mapping[str, Sequence[float]], tolerances: Mapping[str, float]
) -> Part:
    """Tell how far gradients are from those of one process, by strategy."""
    by_strategy = {
        strategy: {
            "largest_difference": max(found),
            "tolerance": tolerances[strategy],
        }
        for strategy, found in differences.items()
    }
    return {"gradients": {**by_strategy.pop("ddp"), **by_strategy}}


def of_bandwidth(measured: Bandwidth, facts: Facts, factor: float) -> Part:
    """Tell times and bandwidths, beside what limits them where it is known.

    Args:
        measured: The table.
        facts: The nodes, with the speed of their interfaces.
        factor: What a rank must at least send, as a multiple of the message.
    """
    speeds = [host.speed_mbps for host in facts.hosts]
    limits: Part = {
        "memory_copy_gb_per_second": measured.copy_bytes_per_second / 1e9,
        "link_gb_per_second": min(speeds) / 8e3
        if len(speeds) > 1 and all(speeds)
        else None,
    }
    return {
        "bandwidth": {
            "rows": [
                {
                    "num_bytes": row.num_bytes,
                    "backends": {
                        backend: {
                            "seconds": seconds,
                            "algorithm_gb_per_second": row.num_bytes / seconds / 1e9,
                            "bus_gb_per_second": factor * row.num_bytes / seconds / 1e9,
                        }
                        for backend, seconds in row.seconds.items()
                    },
                }
                for row in measured.rows
            ],
            "limits": limits,
            "left_out": measured.left_out,
        }
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value

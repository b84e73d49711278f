"""The check under mpirun, in the order of the output. Each part is bounded in time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mpitrain import schedulers
from mpitrain.launch import init
from mpitrain.launch.job import Job
from mpitrain.launch.rendezvous.transports import gloo_error
from mpitrain.mpi.collectives import barrier, on_rank_zero
from mpitrain.mpi.implementation import mpi_abi, mpi_library_version
from mpitrain.mpi.world import World
from mpitrain.record.environment import versions
from mpitrain.schedulers import seconds_left
from mpitrain.tools.check import CheckConfig
from mpitrain.tools.check.environment import (
    Facts,
    find_problems,
    marker_file,
    node_facts,
    rank_facts,
)
from mpitrain.tools.check.login import library_of
from mpitrain.tools.check.report import Report
from mpitrain.watchdog.process import launcher_name

COLLECTIVE_SECONDS = 300.0  # how long one collective may take; the watchdog acts before
BANDWIDTH_SECONDS = 12.0
MEMORY_SHARE = 0.25  # of a node's available memory, for the messages of all its ranks

IMPORT_STAGES = ("starting MPI", "import torch")  # not counted as mpitrain's time


def check_job(job: Job, config: CheckConfig, environ: Mapping[str, str]) -> int:
    """Check all ranks and nodes; collective over all ranks."""
    # The start sets some: what the user had set is of interest.
    before = dict(environ)
    report = Report(prints=job.comm.rank == 0, as_json=config.json)
    # Whoever reads the JSON gets an object whatever happens.
    job.guard.on_failure.append(report.fail)
    world = init.prepare(job, config.launch, COLLECTIVE_SECONDS, os.environ)
    from mpitrain.tools.check import communication  # imports torch, as the start has

    job.watchdog.start("connect the nodes with each other")
    assert job.rendezvous is not None  # the start has set it
    address = job.rendezvous.own_address
    broken = communication.find_broken_links(job, world, address)
    if not broken:
        init.init_process_group(job, world, COLLECTIVE_SECONDS)
    # Each check reports progress; there are no steps.
    job.watchdog.hang_timeout_seconds = config.launch.hang_timeout or 0.0
    job.open(world, COLLECTIVE_SECONDS, {})
    with job:
        facts = _gather(job, world, config, before)
        report.add(
            world_size=world.world_size,
            num_nodes=world.num_nodes,
            **node_parts(facts),
            backend=world.backend,
            master_addr=world.master_addr,
            master_port=world.master_port,
            address_reason=job.rendezvous.why,
            versions=versions() | _library_versions(world),
            scheduler=asdict(facts.scheduler),
            launcher=facts.launcher,
            start=start_part(facts),
            unreachable=[link._asdict() for link in broken],
        )
        findings = find_problems(facts) + communication.link_findings(broken, world)
        if broken:
            return report.finish(findings)  # gloo would hang
        part, found = communication.check_all_reduce(job, world)
        report.add(all_reduce=part)
        findings += found
        gradients, found = communication.check_gradients(job, world)
        report.add(gradients=gradients)
        findings += found
        if not config.quick and world.world_size > 1:
            memory = int(min(it.available_bytes for it in facts.hosts) * MEMORY_SHARE)
            with_gloo = not any(job.comm.allgather(gloo_error(job.rendezvous)))
            rows, left_out = communication.measure_bandwidth(
                job, world, BANDWIDTH_SECONDS, memory, with_gloo=with_gloo
            )
            report.add(bandwidth=rows, left_out=left_out)
        if config.compute:
            from mpitrain.tools.check.compute import check_compute

            rows, found = check_compute(job, world)
            report.add(compute=rows)
            findings += found
        return report.finish(findings)


def _gather(
    job: Job, world: World, config: CheckConfig, before: Mapping[str, str]
) -> Facts:
    import torch

    rendezvous = job.rendezvous
    assert rendezvous is not None
    job.progress("check: nodes and ranks")
    with contextlib.ExitStack() as stack:
        written = ("", "")
        if world.is_rank_zero:
            written = stack.enter_context(marker_file(config.runs_dir))
        marker, unwritable = job.comm.bcast(written)
        host = job.all_or_none(
            lambda: (
                node_facts(world, rendezvous, config.runs_dir, marker)
                if world.local_rank == 0
                else None
            ),
            "look at this node",
        )
    barrier(job.comm)
    if host is not None:
        # Right after the barrier: so clocks are compared at one moment.
        host.clock_seconds = time.time()
    mine = rank_facts(world, before, job.start_seconds)
    by_rank = job.comm.allgather((mine, host))
    return Facts(
        nodes=world.nodes,
        ranks=tuple(rank for rank, _ in by_rank),
        hosts=tuple(host for _, host in by_rank if host is not None),
        unwritable=unwritable,
        torch_version=str(torch.__version__),
        scheduler=schedulers.detect(before),
        launcher=launcher_name(before),
        knows_end=on_rank_zero(
            job.comm, lambda: seconds_left(before) is not None, "ask for the job's end"
        ),
    )


def node_parts(facts: Facts) -> dict[str, list[dict[str, Any]]]:
    """Return the parts ``nodes`` and ``ranks`` of the result."""
    nodes: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    for at, (node, host) in enumerate(zip(facts.nodes, facts.hosts, strict=True)):
        mine = [facts.ranks[rank] for rank in node.ranks]
        summary: dict[str, Any] = {"node_rank": at, "ranks": list(node.ranks)}
        summary["usable_cores"] = node.num_cores
        summary["num_threads"] = max(it.num_threads for it in mine)
        summary["devices"] = list(dict.fromkeys(it.device for it in mine))
        nodes.append(summary | vars(host))
        for local_rank, (rank, it) in enumerate(zip(node.ranks, mine, strict=True)):
            place = {"rank": rank, "hostname": node.hostname, "node_rank": at}
            ranks.append({**place, "local_rank": local_rank, **vars(it)})
    return {"nodes": nodes, "ranks": sorted(ranks, key=lambda it: it["rank"])}


def start_part(facts: Facts) -> dict[str, Any]:
    """Return the duration of each stage of the start, on its slowest rank."""
    seconds = {
        stage: max(rank.stage_seconds.get(stage, 0.0) for rank in facts.ranks)
        for stage in facts.ranks[0].stage_seconds
    }
    ours = [value for stage, value in seconds.items() if stage not in IMPORT_STAGES]
    return {"seconds_without_imports": sum(ours), "seconds_by_stage": seconds}


def _library_versions(world: World) -> dict[str, str]:
    import torch

    known = library_of(mpi_library_version())
    name = str(known) if known.family else " ".join(mpi_library_version().split())
    found = {"MPI library": name, "MPI ABI": mpi_abi()}
    if world.device.startswith("cuda"):
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["NCCL"] = ".".join(map(str, nccl))
    return found

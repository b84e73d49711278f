"""The check under mpirun, in the order of the screen. Bounded in time, part by part."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from mpitrain import schedulers
from mpitrain.launch import stages
from mpitrain.launch.job import Job
from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.schedulers import seconds_left
from mpitrain.tools.check import facts, findings, looks, pairs, report, screen
from mpitrain.tools.check.config import CheckConfig
from mpitrain.tools.check.software import library_of, versions

if TYPE_CHECKING:
    from mpitrain.launch.exit_guard import ExitGuard

COLLECTIVE_SECONDS = 300.0
"""How long one collective may take; the watchdog comes before."""

EXCHANGE_SECONDS = 8.0
BANDWIDTH_SECONDS = 12.0
MEMORY_SHARE = 0.25
"""Of a node's memory, for the messages of all its ranks."""


ASK_END = {"slurm": "squeue -h -j {} -o %L", "pbs": "qstat -f {}"}
"""Scheduler, and what to type to learn when a job ends."""


class Voice:
    """Says what was found, on rank zero alone: lines as they come, or one object.

    With one object, whatever else is written to standard output, by NCCL for one, goes
    to standard error.
    """

    def __init__(self, *, speaks: bool, as_json: bool) -> None:
        self.as_json = as_json
        self._speaks = speaks
        self._said = False
        self._out: TextIO = sys.stdout
        if as_json:
            sys.stdout.flush()
            self._out = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)

    def show(self, lines: Sequence[str]) -> None:
        """Print lines, unless one object was asked for."""
        if self._speaks and not self.as_json:
            print("\n".join(lines), file=self._out, flush=True)

    def progress(self, doing: str) -> None:
        """Tell where only one object comes at the end that something is going on."""
        if self._speaks and self.as_json:
            print(f"check: {doing}", file=sys.stderr, flush=True)

    def give(self, found: Mapping[str, Any]) -> None:
        """Print the object."""
        if self._speaks and self.as_json and not self._said:
            self._said = True
            print(report.as_json(found), file=self._out, flush=True)

    def give_up(self, text: str) -> None:
        """Print an object about why the job ends, on the rank that knows."""
        if self.as_json and not self._said:
            self._speaks = True
            self.give(report.of_failure(text))
            time.sleep(0.5)  # for mpirun to forward it


def look(guard: ExitGuard, config: CheckConfig, environ: Mapping[str, str]) -> int:
    """Look at all ranks.

    Collective over all ranks.

    Args:
        guard: The guard that stands.
        config: What was asked for, equal on all ranks.
        environ: This rank's environment, as the user made it.

    Returns:
        The exit status: 1 if there are errors; equal on all ranks.
    """
    began = time.monotonic()
    before = dict(environ)
    launch = config.launch
    voice = Voice(speaks=guard.comm.rank == 0, as_json=config.json)
    guard.on_failure.append(voice.give_up)
    voice.progress("the start")
    world = stages.prepare(guard, launch, COLLECTIVE_SECONDS, os.environ)
    if guard.watched is not None:
        guard.watched.start("which nodes reach each other")
    rendezvous = guard.rendezvous
    assert rendezvous is not None  # the start has set it
    closed = pairs.find_failures(guard, world, rendezvous.own_address)
    if not closed:
        stages.init_process_group(guard, world, COLLECTIVE_SECONDS)
    if guard.watched is not None:  # no step comes here; each trial tells of itself
        guard.watched.hang_timeout_seconds = launch.hang_timeout or 0.0
    job = Job(world, guard, COLLECTIVE_SECONDS, {})
    with job:
        voice.progress("nodes and ranks")
        told = _gather(job, world, guard, rendezvous, config, before)
        answer = _describe(world, told, rendezvous.why, before)
        voice.show(screen.world_lines(answer))
        voice.show(screen.software_lines(answer))
        voice.show(screen.start_lines(answer))
        found = looks.find(told) + findings.of_pairs(closed, world.nodes)
        if closed:
            answer |= report.of_pairs(world.num_nodes, closed, 0, 0)
            voice.show(screen.pair_lines(answer))
        else:
            found += _try(job, world, guard, told, config, voice, answer)
        found = findings.by_severity(found)
        answer |= report.of_findings(found)
        answer["seconds"] = round(time.monotonic() - began, 3)
        voice.show(["", *screen.finding_lines(answer)])
        voice.give(answer)
    return 1 if answer["num_errors"] else 0


def _gather(
    job: Job,
    world: World,
    guard: ExitGuard,
    rendezvous: Rendezvous,
    config: CheckConfig,
    before: Mapping[str, str],
) -> looks.Facts:
    """Look at ranks and nodes, and tell all ranks. Collective over all ranks."""
    job.progress("check: nodes and ranks")
    leads = world.local_rank == 0
    zero_writes = (
        facts.marked(config.runs_dir)
        if world.is_rank_zero
        else contextlib.nullcontext(("", ""))
    )
    with zero_writes as written:
        marker, unwritable = job.comm.bcast(written)
        host = job.all_or_none(
            lambda: (
                facts.of_host(world, rendezvous, config.runs_dir, marker)
                if leads
                else None
            ),
            "look at this node",
        )
    barrier(job.comm)
    if host is not None:
        host = replace(host, clock_seconds=time.time())
    mine = facts.of_rank(
        world,
        before,
        guard.stage_seconds,
        is_watched=guard.watched is not None,
        host=host,
    )
    records = job.comm.allgather(mine)
    scheduler = schedulers.detect(before)
    return looks.Facts(
        nodes=world.nodes,
        ranks=tuple(records),
        hosts=tuple(record.host for record in records if record.host is not None),
        unwritable=unwritable,
        torch_version=torch_version(),
        job=f"{scheduler.name.upper()} job {scheduler.job_id}"
        if scheduler.job_id
        else "",
        ask_end=ASK_END.get(scheduler.name, "").format(scheduler.job_id),
        knows_end=on_rank_zero(
            job.comm, lambda: seconds_left(before) is not None, "ask for the job's end"
        ),
    )


def _describe(
    world: World, told: looks.Facts, why: str, before: Mapping[str, str]
) -> report.Part:
    """Word who is there, and with what."""
    software = versions() | {"MPI library": mpi_name()}
    if world.device != "cpu":
        software["NCCL"] = nccl_version()
    return {
        "format": report.FORMAT,
        **report.of_world(world, told, why),
        **report.of_software(software, schedulers.detect(before)),
        **report.of_start(told.ranks),
    }


def _try(
    job: Job,
    world: World,
    guard: ExitGuard,
    told: looks.Facts,
    config: CheckConfig,
    voice: Voice,
    answer: report.Part,
) -> list[findings.Finding]:
    """Try what a training needs. Collective over all ranks."""
    # They import torch at once, which stands by now.
    from mpitrain.tools.check import bandwidth, collectives, gradients, truths

    voice.progress("pairs of nodes")
    exchanged, num_wrong = pairs.exchange(job, world, EXCHANGE_SECONDS)
    answer |= report.of_pairs(world.num_nodes, [], exchanged, num_wrong)
    voice.show(screen.pair_lines(answer))
    found = findings.of_exchange(num_wrong)

    voice.progress("collectives")
    host = bandwidth.host_backend(world)
    devices = {"cpu": host}
    if world.device != "cpu":
        devices[world.device] = "nccl" if "nccl" in world.backend else host
    results = []
    for device in devices:
        results += collectives.try_all(job, world, device, guard.store, truths.TRUTHS)
    results += collectives.try_all(job, world, "cpu", guard.store, truths.OBJECT_TRUTHS)
    barrier(job.comm)
    by_rank = job.comm.allgather([r for r in results if r.outcome != "right"])
    answer |= report.of_collectives(
        [(result.kind, result.device) for result in results],
        by_rank,
        {device.partition(":")[0]: backend for device, backend in devices.items()},
    )
    voice.show(screen.collective_lines(answer))
    found += findings.of_collectives(by_rank, world.nodes)

    voice.progress("gradients")
    differences = {}
    for strategy in gradients.TOLERANCES:
        if strategy == "fsdp" and world.device != "cpu" and "nccl" not in world.backend:
            continue  # gloo and mpi4py have not all that FSDP calls on a GPU
        difference = gradients.largest_difference(job, world, strategy)
        barrier(job.comm)
        differences[strategy] = job.comm.allgather(difference)
    answer |= report.of_gradients(differences, gradients.TOLERANCES)
    voice.show(screen.gradient_lines(answer))
    found += findings.of_gradients(differences, gradients.TOLERANCES, world.nodes)

    if not config.quick and world.world_size > 1:
        voice.progress("bandwidth")
        memory = min(host.available_bytes for host in told.hosts) * MEMORY_SHARE
        measured = bandwidth.measure(job, world, BANDWIDTH_SECONDS, int(memory))
        factor = bandwidth.bus_factor(world.world_size)
        answer |= report.of_bandwidth(measured, told, factor)
        voice.show(screen.bandwidth_lines(answer))
    return found


def mpi_name() -> str:
    """Return family and version of the MPI library, or its own words."""
    known = library_of(mpi_library_version())
    return str(known) if known.family else " ".join(mpi_library_version().split())


def torch_version() -> str:
    """Return torch's version, of what is loaded."""
    import torch

    return str(torch.__version__)


def nccl_version() -> str:
    """Return the version of NCCL that torch has."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

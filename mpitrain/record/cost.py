"""What the jobs of a run cost: ``costs.json``, and their sum. Imports no torch.

A thread of rank zero asks the scheduler for the job, and writes the file now and then:
a job that is killed counts, too. Ranks that have counters read them in a thread; what
they have counted is gathered where all have just synchronized. At the end the
`Recorder` writes the sum into ``result.json``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.files import read_json, write_json
from mpitrain.launch.env_checks import STATUS_FILE
from mpitrain.mpi.collectives import MPI_PROCESS
from mpitrain.mpi.world import World
from mpitrain.record.energy import open_meter
from mpitrain.record.jsonl import CLOSE_SECONDS
from mpitrain.schedulers import detect, read_job
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import Throughput
from mpitrain.watchdog.process import age_seconds, launchers_of

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

FILE = "costs.json"
NEEDED = {"id", "began", "ended", "cores", "gpus"}  # of an entry
# Counted again after one part in RESOLUTION of the job's time, within these bounds.
RESOLUTION, MIN_SECONDS, MAX_SECONDS = 200, 2.0, 30.0


class Costs(Callback):
    """Writes what each job of a run costs; not of a trial of a sweep.

    Args:
        run_dir: The run folder. A `Recorder` of it stands before this callback.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir).absolute() / FILE
        self._ended = threading.Event()
        self._ended.set()  # hooks do nothing before a `fit`, and in a trial
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the counters, and start the thread."""
        self._world: World = trainer.engine.world
        if MPI_PROCESS.sub_worlds:
            return
        self._meter, self._has_counters = open_meter(self._world), True
        self._facts: dict[str, Any] = {}  # of this job, as far as all ranks know them
        self._seconds = self._gather_at = 0.0  # of steps: equal on all ranks
        self._ended, self._thread = threading.Event(), None
        if self._world.is_rank_zero or self._meter.has_counters:
            self._thread = threading.Thread(target=self._run, name=FILE, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # A second `fit` sets new ones, while this thread may wait for a scheduler.
        ended, meter, facts = self._ended, self._meter, self._facts
        began = time.monotonic()
        before: list[dict[str, Any]] = []
        job: dict[str, Any] = {}
        if self._world.is_rank_zero:
            job = describe_job(self._world, self._path)
            if meter.missing:
                job["energy_missing"] = meter.missing
            before = jobs_in(self._path)
        is_last = False
        while not is_last:
            # First: then what was gathered before the end is in the last file.
            is_last = ended.is_set()
            meter.update()
            if job:
                # A copy: the training's thread adds to the facts.
                now = {**job, **facts, "ended": time.time()}
                with contextlib.suppress(OSError):  # a full disk, say
                    write_json(self._path, {"jobs": [*before, now]})
            ended.wait(_interval(time.monotonic() - began))

    def on_throughput(self, trainer: Trainer, throughput: Throughput) -> None:
        """Gather what the ranks have counted, if it is time to."""
        if not self._ended.is_set():
            if throughput.gpu_bytes:
                self._facts["peak_gpu_bytes"] = throughput.gpu_bytes
            self._seconds += throughput.seconds
            if self._seconds >= self._gather_at:
                self._gather_at = self._seconds + _interval(self._seconds)
                self._gather(trainer)

    def _gather(self, trainer: Trainer) -> None:
        if self._has_counters:
            self._meter.update()
            ranks = trainer.engine.ranks.allgather(self._meter.counted())
            # Equal on all ranks, so that all leave out the next exchange, or none.
            self._has_counters = any(ranks)
            if self._has_counters:
                self._facts["ranks"] = ranks

    def on_fit_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Gather and write a last time."""
        if not self._ended.is_set():
            self._gather(trainer)
            self.on_exception(trainer)

    on_stop = on_fit_end

    def on_exception(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Write a last time; a disk or scheduler that is slow is not waited for."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread is not None:
                self._thread.join(CLOSE_SECONDS)


def _interval(seconds: float) -> float:
    return min(MAX_SECONDS, max(MIN_SECONDS, seconds / RESOLUTION))


def describe_job(world: World, path: Path) -> dict[str, Any]:
    """Return what is known of this start of a job.

    It began with the job, or where the last start in that job ended, of this run or of
    one beside it: the sum of all is the job's.
    """
    above = [it.pid for it in launchers_of(os.getpid())]
    launcher = above[-1] if above else os.getpid()
    began = time.time() - age_seconds(launcher)
    job: dict[str, Any] = {"id": f"{world.hostname} {launcher}"}
    cores = sum(node.num_cores for node in world.nodes)
    gpus = sum(len(set(node.gpus)) for node in world.nodes)
    if (record := read_job(os.environ)) is not None:
        began, scheduler = record.started, detect(os.environ)
        job["id"] = f"{scheduler.name} {scheduler.job_id} {began:.0f}"
        job["queue_seconds"] = began - record.queued
        # `supervise` has the whole job: its spare and its lost nodes are paid, too.
        if STATUS_FILE in os.environ or record.num_nodes == world.num_nodes:
            cores = record.num_cores  # of idle ones, too
            gpus = gpus * record.num_nodes // world.num_nodes
    beside = [jobs_in(file) for file in path.parent.parent.glob(f"*/{FILE}")]
    for it in itertools.chain.from_iterable(beside):
        if it["id"] == job["id"]:
            began = max(began, it["ended"])
            job["queue_seconds"] = 0.0
    return {**job, "began": began, "ended": began, "cores": cores, "gpus": gpus}


def jobs_in(path: Path) -> list[dict[str, Any]]:
    """Return the starts of jobs in a ``costs.json``; none where it cannot be read."""
    jobs = read_json(path).get("jobs", [])
    return [it for it in jobs if it.keys() >= NEEDED]


def end_job(run_dir: Path, began: float) -> None:
    """Let the last start of a job end now, if it is newer; in `supervise`."""
    jobs = jobs_in(run_dir / FILE)
    if jobs and jobs[-1]["ended"] > began:
        jobs[-1]["ended"] = time.time()
        with contextlib.suppress(OSError):
            write_json(run_dir / FILE, {"jobs": jobs})


def cost_of(run_dir: Path) -> dict[str, Any]:
    """Return what all jobs of a run cost, by name; nothing where that is not known."""
    if not (jobs := jobs_in(run_dir / FILE)):
        return {}
    hours = [(it["ended"] - it["began"]) / 3600 for it in jobs]
    ranks = [it for job in jobs for it in job.get("ranks", ())]
    found: dict[str, Any] = {
        "num_jobs": len({it["id"] for it in jobs}),
        "wall_hours": math.fsum(hours),
    }
    for name in ("core", "gpu"):
        counts = [it[f"{name}s"] for it in jobs]
        found[f"{name}_hours"] = math.fsum(map(operator.mul, hours, counts))
    if all("queue_seconds" in it for it in jobs):
        found["queue_seconds"] = math.fsum(it["queue_seconds"] for it in jobs)
    # Of all starts, or nothing: a sum with gaps would look like a low consumption.
    if all(any("energy_joules" in it for it in job.get("ranks", ())) for job in jobs):
        found["energy_joules"] = math.fsum(it.get("energy_joules", 0.0) for it in ranks)
        parts = [it.get("energy_parts", ()) for it in ranks]
        found["energy_parts"] = sorted(set(itertools.chain.from_iterable(parts)))
    if percents := [it["gpu_percent"] for it in ranks if "gpu_percent" in it]:
        found["gpu_percent"] = math.fsum(percents) / len(percents)
    if peak := max(it.get("peak_gpu_bytes", 0) for it in jobs):
        found["peak_gpu_bytes"] = peak
    return found

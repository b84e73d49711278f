"""A sweep on all ranks, from the ready job to its end."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import fields

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.checkpoint.resume import hosts_without
from mpitrain.config import DataConfig
from mpitrain.data.sources import Data, load_data
from mpitrain.data.torchvision_sets import CLASSES
from mpitrain.errors import LaunchError, MpitrainError, UsageError
from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.launch.subworld import destroy_process_group
from mpitrain.mpi.mailbox import Mailbox
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.topology import has_thread_multiple
from mpitrain.mpi.world import World, list_hosts
from mpitrain.record.run_dir import shown
from mpitrain.tools.sweep.config import PreparedSweep, ReadConfig
from mpitrain.tools.sweep.server import Server
from mpitrain.tools.sweep.worker import Worker


def run_sweep(
    guard: ExitGuard,
    world: World,
    sweep: PreparedSweep,
    handler: PreemptionHandler,
    read_config: ReadConfig,
) -> int:
    """Run the trials of a sweep; return the exit status: 0, or 75 if it was stopped.

    Collective over all ranks.

    Raises:
        UsageError: It asks for more ranks than there are; on every rank.
        LaunchError: MPI allows no second thread; on every rank.
    """
    if not has_thread_multiple():
        raise LaunchError(
            "MPI was started without MPI_THREAD_MULTIPLE, which sweep needs: expected "
            "an MPI library with it, and no MPI4PY_RC_THREAD_LEVEL"
        ).on_all_ranks()
    num_ranks, size = sweep.config.ranks_per_trial, world.world_size
    if num_ranks > size:
        raise UsageError(
            f"--ranks-per-trial {num_ranks}: found {size} ranks; expected as many at "
            f"least: mpirun -np {num_ranks} ..."
        ).on_all_ranks()
    ranks = communicator(world)
    if blind := hosts_without(sweep.path, sweep.run_id, world, ranks):
        raise UsageError(
            f"{list_hosts(blind)} cannot see {shown(sweep.path)}; expected a folder "
            "that all nodes share: --sweeps-dir"
        ).on_all_ranks()
    data = _shared_data(sweep, world)
    mailbox = Mailbox(guard.comm)
    destroy_process_group()
    screen = sys.stdout  # a trial's goes into its log
    errors: list[BaseException] = []

    def say(line: str) -> None:
        print(line, file=screen, flush=True)

    def serve() -> None:
        try:
            server = Server(mailbox, world, sweep, handler, say)
            server.end_all(server.run())
        except BaseException as error:
            if isinstance(error, MpitrainError):
                error.on_all_ranks()
            errors.append(error)
            if world.world_size > 1:
                guard.fail(error)  # a rank may be in a trial; alone, `Worker` raises

    if world.is_rank_zero:
        threading.Thread(target=serve, name="sweep server", daemon=True).start()
    worker = Worker(
        guard,
        world,
        mailbox,
        handler,
        read_config,
        waits=sweep.search.pruner is not None,
        data=data,
        server_error=lambda: errors[0] if errors and world.world_size == 1 else None,
    )
    status = worker.run()
    handler.close()
    time.sleep(0.05)  # gloo's threads drop their last tensors, as in `Job.close`
    return status


def _shared_data(sweep: PreparedSweep, world: World) -> Data | None:
    """Load the data set once for all trials, if they have the same and it is in memory.

    Collective over all ranks.
    """
    training, search = sweep.training, sweep.search
    varies = search.function or search.names & {it.name for it in fields(DataConfig)}
    if varies or training.data not in {*CLASSES, "synthetic"}:
        return None
    ranks = communicator(world)
    return load_data(training, seed=training.seed, world=world, ranks=ranks)

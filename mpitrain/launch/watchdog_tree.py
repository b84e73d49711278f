"""Which watchdog each rank's watchdog reports to: rank zero's, or in a tree."""

from __future__ import annotations

import logging
import operator
import secrets
from typing import TYPE_CHECKING

from mpitrain.mpi.collectives import merge_on_rank_zero
from mpitrain.mpi.world import World
from mpitrain.watchdog.client import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpitrain")

MAX_DIRECT_LINKS = 4096  # to rank zero's watchdog; of more ranks they are a tree
FAN_OUT = 128  # nodes whose watchdogs report to one


def connect_watchdogs(
    comm: MPI.Intracomm,
    watchdog: Watchdog,
    world: World,
    on_node: MPI.Intracomm,
    own_address: str,
) -> None:
    """Connect the ranks' sidecars to rank zero's, at the rendezvous address.

    Beyond `MAX_DIRECT_LINKS` ranks in a tree: the ranks of a node report through that
    of its first rank, and each group of `FAN_OUT` nodes through that of its first node.
    Collective over `comm`, all ranks; `on_node` has those of this node, which other
    nodes reach at `own_address`.
    """
    token, size = "", world.world_size

    def listen(address: str) -> tuple[str, int] | None:
        try:
            return address, watchdog.listen(address, token, world.rank, size)
        except OSError as error:
            logger.warning("hangs may be seen late: %s", error)
            return None

    place = None
    if world.is_rank_zero and not watchdog.is_connected:
        token = secrets.token_hex(16)
        place = listen(world.master_addr if size > 1 else "")
    place, token = comm.bcast((place, token))
    if place is None:  # rank zero's answer: all ranks return here, or none
        return  # also for a second job of these processes: the first's stands
    watchdog.is_connected = True
    places = [place]
    if size > MAX_DIRECT_LINKS:
        node, is_first = world.node_rank, world.local_rank == 0
        is_hub = 0 < node < world.num_nodes - 1 and node % FAN_OUT == 0
        local = None
        if is_first and node > 0:
            local = listen(own_address if is_hub else "127.0.0.1")
        found = {node: local} if is_first and is_hub else {}
        hubs = merge_on_rank_zero(comm, found, operator.or_)
        hub = comm.bcast(hubs).get(node - node % FAN_OUT)
        local = on_node.bcast(local)
        # Rank zero's, too: a relay may be out of reach, or end before others.
        nearest_first = (None if is_first else local, None if is_hub else hub, place)
        places = list(dict.fromkeys(filter(None, nearest_first)))
    if not world.is_rank_zero:
        watchdog.connect(places, token, world.rank, size)

"""The interface and address that gloo and NCCL use, and whether MPI's own works."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError
from mpitrain.launch.rendezvous.interfaces import SYS_CLASS_NET, slingshot_names
from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.implementation import mpi_library_version
from mpitrain.mpi.launchers import interface_setting
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"

MESSAGE_BYTES = 384 << 10  # Open MPI sends parts of it over every interface
MESSAGE_SECONDS = 60.0  # how long such a message may take between two nodes


def socket_variables(
    rendezvous: Rendezvous, environ: Mapping[str, str], root: Path = SYS_CLASS_NET
) -> dict[str, str]:
    """Return the variables, unless they are set, that name this node's interface.

    NCCL gets all that are Slingshot's: it uses them together
    (https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html).
    """
    name = rendezvous.interface.name
    if not name:
        return {}
    # NCCL takes a name as a prefix unless "=" stands before it, what stands behind ":"
    # as a port (ncclOsFindInterfaces, parseStringList of NCCL 2.30), and prefers IPv4.
    names = [name.partition(":")[0]]
    if rendezvous.interface.kind == "slingshot":
        names = slingshot_names(root) or names
    variables = {GLOO: name, NCCL: "=" + ",".join(names)}
    if ":" in rendezvous.own_address and NCCL not in environ:
        variables["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {key: value for key, value in variables.items() if key not in environ}


def gloo_error(rendezvous: Rendezvous) -> str:
    """Return why this node's gloo would listen where no other reaches it; or ``""``.

    gloo takes the first address of its interface, IPv4 before IPv6, and waits for ever
    where the others cannot reach that one.
    """
    address, interface = rendezvous.own_address, rendezvous.interface
    first = next(iter(interface.addresses), address)
    if first == address:
        return ""
    return (
        f"the nodes connect at {address}, but gloo would listen on {first}, the first "
        f"address of {interface.name}"
    )


def check_gloo(rendezvous: Rendezvous, backend: str, environ: Mapping[str, str]) -> str:
    """Refuse gloo where it would hang; with another backend return a warning of it."""
    error = "" if GLOO in environ else gloo_error(rendezvous)
    if not error:
        return ""
    name = rendezvous.interface.name
    if "gloo" in backend:
        raise LaunchError(
            f"{error}.\nTake --backend mpi4py (torch 2.14 or newer), another "
            f"--interface, or export {GLOO}={name} to try it."
        )
    return (
        f'{error}: dist.new_group(backend="gloo") would hang. Take groups of the '
        "default backend, or another --interface"
    )


def check_mpi_messages(
    comm: MPI.Intracomm, world: World, rendezvous: Rendezvous, start_timeout: float
) -> None:
    """Send a large message by MPI from each node to the next. Collective over `comm`.

    Small messages may go over one interface while a part of every large one waits for
    ever at another that is filtered.
    """
    seconds = min(MESSAGE_SECONDS, 0.8 * start_timeout)  # before the watchdog ends it
    if world.local_rank == 0:
        # In a ring, where each node sends and receives at once: none waits for a turn.
        firsts = [node.ranks[0] for node in world.nodes]
        following = firsts[(world.node_rank + 1) % len(firsts)]
        requests = [
            comm.Irecv(bytearray(MESSAGE_BYTES), source=firsts[world.node_rank - 1]),
            comm.Isend(bytes(MESSAGE_BYTES), dest=following),
        ]
        end = time.monotonic() + seconds
        while not all(request.Test() for request in requests):
            if time.monotonic() > end:
                # Not collective: small messages now wait behind it.
                raise LaunchError(_stuck(world, rendezvous, seconds))
            time.sleep(0.001)
    barrier(comm)


def _stuck(world: World, rendezvous: Rendezvous, seconds: float) -> str:
    name = rendezvous.interface.name
    setting = interface_setting(mpi_library_version(), name)
    return (
        f"a message of {MESSAGE_BYTES >> 10} KiB by MPI between node {world.hostname} "
        f"and its neighbours did not arrive within {seconds:.0f} s, though "
        f"{rendezvous.address} ({name}) is reached by all nodes.\nUsual cause: MPI "
        f"uses another interface, too, which is filtered. Set {setting}"
    )

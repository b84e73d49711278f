"""What a network may be like: further ones, filtered ones, one address everywhere.

All of it lives in the virtual hosts' own namespaces, and is taken back at the end.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from .hosts import LOGIN, PREFIX, VirtualHosts, ip
from .needs import which

LAUNCHER_PORTS = "21000-23999"
"""What a firewall must let pass for mpirun; see `OPEN_MPI_IN_PORTS`.

The kernel gives none of these away to those who ask for any free port, as we do.
"""

OPEN_MPI_IN_PORTS = (
    *("--prtemca", "oob_tcp_static_ipv4_ports", "21000"),
    *("--mca", "btl_tcp_port_min_v4", "23000", "--mca", "btl_tcp_port_range_v4", "999"),
)
"""Flags of mpirun that keep its daemons and ranks to those ports."""


@contextmanager
def further_network(
    hosts: VirtualHosts, interface: str, addresses: Mapping[str, Sequence[str]]
) -> Iterator[None]:
    """Give hosts one more interface, all of them on one bridge of their own.

    Args:
        hosts: The hosts.
        interface: Its name on each.
        addresses: With their prefix, by host, in the order in which they are added.
    """
    login, bridge = PREFIX + LOGIN, f"br-{interface}"
    ip("-n", login, "link", "add", bridge, "up", "type", "bridge")
    with ExitStack() as stack:
        stack.callback(ip, "-n", login, "link", "delete", bridge)
        for host, own in addresses.items():
            space, peer = PREFIX + host, f"{interface}-{host}"
            veth = ["type", "veth", "peer", "name", peer, "netns", login]
            ip("link", "add", interface, "netns", space, *veth)
            stack.callback(ip, "-n", space, "link", "delete", interface)
            ip("-n", login, "link", "set", peer, "master", bridge, "up")
            for address in own:
                # An address of IPv6 is not ready for a second unless told so.
                now = ["nodad"] if ":" in address else []
                ip("-n", space, "address", "add", address, "dev", interface, *now)
            ip("-n", space, "link", "set", interface, "up")
        yield


@contextmanager
def docker_bridge(hosts: VirtualHosts, address: str) -> Iterator[None]:
    """Give every host a docker0 with one and the same address, a container in it.

    And each host's own name leads there first.
    """
    with ExitStack() as stack:
        for host in hosts.names:
            space = PREFIX + host
            ip("-n", space, "link", "add", "docker0", "up", "type", "bridge")
            stack.callback(ip, "-n", space, "link", "delete", "docker0")
            veth = ["type", "veth", "peer", "name", "container"]
            ip("-n", space, "link", "add", "veth1", "master", "docker0", "up", *veth)
            stack.callback(ip, "-n", space, "link", "delete", "veth1")
            ip("-n", space, "link", "set", "container", "up")
            ip("-n", space, "address", "add", f"{address}/16", "dev", "docker0")
            own = f"{hosts.addresses[host]} {host}\n"
            named = hosts._changed(host, "hosts", own, f"{address} {host}\n{own}")
            stack.enter_context(named)
        yield


@contextmanager
def somebody_else_at(hosts: VirtualHosts, address: str) -> Iterator[None]:
    """Let a host's own sshd accept on every port of an address, as a proxy may."""
    table = (
        "table ip mpitrain {\nchain output {\ntype nat hook output priority -100\n"
        f"ip daddr {address} tcp dport 1024-65535 redirect to :22\n}}\n}}\n"
    )
    with ExitStack() as stack:
        for host in hosts.names[1:]:
            nft(host, "-f", "-", told=table)
            stack.callback(nft, host, "delete", "table", "ip", "mpitrain")
        yield


@contextmanager
def ipv6_alone(hosts: VirtualHosts) -> Iterator[None]:
    """Take the hosts' IPv4 addresses away; their names lead to IPv6."""
    names = "".join(f"{hosts.addresses[name]} {name}\n" for name in hosts.names)
    by_ipv6 = "".join(f"fd99::{i} {name}\n" for i, name in enumerate(hosts.names, 1))
    with ExitStack() as stack:
        for i, host in enumerate(hosts.names, 1):
            old = (f"{hosts.addresses[host]}/24", "dev", "eth0")
            new = (f"fd99::{i}/64", "dev", "eth0")
            ip("-n", PREFIX + host, "address", "delete", *old)
            stack.callback(ip, "-n", PREFIX + host, "address", "add", *old)
            ip("-n", PREFIX + host, "address", "add", *new, "nodad")
            stack.callback(ip, "-n", PREFIX + host, "address", "delete", *new)
            stack.enter_context(hosts._changed(host, "hosts", names, by_ipv6))
        yield


@contextmanager
def filtered(hosts: VirtualHosts, *rules: str) -> Iterator[None]:
    """Let every host drop what comes in and matches one of some rules of nft."""
    drops = "\n".join(f"{rule} drop" for rule in rules)
    table = (
        "table inet mpitrain {\nchain input {\ntype filter hook input priority 0\n"
        f"{drops}\n}}\n}}\n"
    )
    with ExitStack() as stack:
        for host in hosts.names:
            nft(host, "-f", "-", told=table)
            stack.callback(nft, host, "delete", "table", "inet", "mpitrain")
        yield


def all_but_the_launcher(network: str) -> str:
    """Return the rule for new connections to ports other than ssh's and mpirun's."""
    return (
        f"ip daddr {network} tcp flags & (syn | ack) == syn "
        f"tcp dport != {{ 22, {LAUNCHER_PORTS} }}"
    )


def nft(host: str, *words: str, told: str = "") -> None:
    """Run the `nft` command on a host."""
    command = ["ip", "netns", "exec", PREFIX + host, which("nft") or "nft", *words]
    subprocess.run(command, check=True, input=told, text=True)

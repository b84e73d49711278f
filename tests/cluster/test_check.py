"""`check` over two hosts: interface and address, and two hosts that cannot talk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .hosts import LOGIN, PREFIX, VirtualHosts, ip

CHECK = ("python", "-m", "mpitrain", "check", "--quick", "--json")
TIMEOUT_SECONDS = 200


def check(
    hosts: VirtualHosts,
    folder: Path,
    names: list[str],
    *mpirun: str,
    flags: tuple[str, ...] = (),
) -> tuple[int, dict]:
    """Run the check from the first of some hosts, on all of them."""
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    prefix = ["--prefix", f"{folder}/.venv"]
    done = hosts.run(
        names[0],
        [
            *("sh", "-c", 'exec "$@" 2> errors', "sh", "mpirun", *prefix),
            *("--hostfile", "hosts", "-x", "PATH", *mpirun, *CHECK, *flags),
        ],
        cwd=folder,
        timeout_seconds=TIMEOUT_SECONDS,
        environ={"PATH": f"{folder}/.venv/bin:{hosts.environ['PATH']}"},
    )
    said = done.stdout + (folder / "errors").read_text()
    assert done.stdout.startswith("{"), said
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_two_hosts_reach_each_other_and_say_how(
    hosts: VirtualHosts, folder: Path
) -> None:
    names = hosts.names[:2]
    with hosts.named_as_debian_does():
        address = hosts.run(names[0], ["hostname", "-i"]).stdout.strip()
        assert address == "127.0.1.1"
        status, found = check(hosts, folder, names)
    assert status == 0, found["findings"]
    assert found["num_nodes"] == 2
    assert found["master_addr"] == hosts.addresses[names[0]]
    assert "reached by all 2 nodes" in found["address_reason"]
    assert [node["hostname"] for node in found["nodes"]] == names
    for node in found["nodes"]:
        assert node["address"] == hosts.addresses[node["hostname"]]
        assert node["interface"] == "eth0"
        assert node["sees_runs"]
    assert found["unreachable"] == []


def test_two_hosts_that_cannot_talk_are_both_named(
    hosts: VirtualHosts, folder: Path
) -> None:
    """MPI has a network that works; on the one that is asked for, one pair is cut."""
    with second_network(hosts):
        for one, other in ((2, 3), (3, 2)):
            route = ["route", "add", "unreachable", f"10.98.0.{other}"]
            ip("-n", f"{PREFIX}node{one}", *route)
        status, found = check(
            hosts,
            folder,
            hosts.names,
            *("--mca", "btl_tcp_if_include", "10.99.0.0/24"),
            flags=("--interface", "ib0"),
        )
    assert status == 1, found
    assert found["master_addr"] == "10.98.0.1"
    ways = [(way["source"], way["target"]) for way in found["unreachable"]]
    assert ways == [(1, 2), (2, 1)]
    said = [e["found"] for e in found["findings"] if e["severity"] == "error"]
    assert len(said) == 2
    assert said[0].startswith("node2 does not reach node3: ")
    assert said[1].startswith("node3 does not reach node2: ")
    assert "all_reduce" not in found


@contextmanager
def second_network(hosts: VirtualHosts) -> Iterator[None]:
    """Join the hosts a second time, by `ib0` with 10.98.0.x, the own name's address."""
    login = PREFIX + LOGIN
    ip("-n", login, "link", "add", "bridge2", "type", "bridge")
    ip("-n", login, "link", "set", "bridge2", "up")
    overlays = [Path("/etc/netns") / (PREFIX + name) / "hosts" for name in hosts.names]
    before = [path.read_text() for path in overlays]
    try:
        for i, name in enumerate(hosts.names, 1):
            space, port = PREFIX + name, f"{name}b"
            peer = ["peer", "name", port, "netns", login]
            ip("link", "add", "ib0", "netns", space, "type", "veth", *peer)
            ip("-n", login, "link", "set", port, "master", "bridge2", "up")
            ip("-n", space, "address", "add", f"10.98.0.{i}/24", "dev", "ib0")
            ip("-n", space, "link", "set", "ib0", "up")
            # Its own name leads to the second network, the others' to the first.
            own = f"{hosts.addresses[name]} {name}\n"
            text = overlays[i - 1].read_text()
            overlays[i - 1].write_text(text.replace(own, f"10.98.0.{i} {name}\n"))
        yield
    finally:
        for path, text in zip(overlays, before, strict=True):
            path.write_text(text)
        for name in hosts.names:
            ip("-n", PREFIX + name, "link", "delete", "ib0")
        ip("-n", login, "link", "delete", "bridge2")

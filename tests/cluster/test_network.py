"""Where rank zero is reached, on networks as clusters have them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from .hostfile import mpirun
from .hosts import VirtualHosts
from .networks import (
    OPEN_MPI_IN_PORTS,
    all_but_the_launcher,
    docker_bridge,
    filtered,
    further_network,
    ipv6_alone,
    somebody_else_at,
)
from .runs import assert_finished

pytestmark = pytest.mark.usefixtures("firewall")

DOCKER = "172.17.0.1"
FIRST_NETWORK = "10.99.0.0/24"
WITHOUT_DOCKER = ("--mca", "btl_tcp_if_exclude", "lo,docker0")
"""Open MPI itself must be told: it would connect to its own host."""


def met_at(
    hosts: VirtualHosts,
    folder: Path,
    *,
    num_hosts: int = 2,
    words: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> str:
    """Train for a step on the first hosts; return the address at which they met."""
    names = hosts.names[:num_hosts]
    words = ["--dry-run", *words]
    done = mpirun(hosts, folder, names, slots=1, words=words, flags=flags)
    assert done.returncode == 0, done.stdout
    assert_finished(folder, done.stdout, hosts=names, world_size=num_hosts)
    assert "hostname of the client socket" not in done.stdout, done.stdout
    found = re.search(r"rendezvous at (\S+):\d+,", done.stdout)
    assert found is not None, done.stdout
    return found[1]


@pytest.fixture
def second_network(hosts: VirtualHosts) -> Iterator[None]:
    """A further interface eth1 on every host, with IPv6 alone."""
    own = {name: [f"fd98::{i}/64"] for i, name in enumerate(hosts.names, 1)}
    with further_network(hosts, "eth1", own):
        yield


def test_docker0_is_not_taken_though_each_hosts_name_leads_there(
    hosts: VirtualHosts, folder: Path
) -> None:
    with docker_bridge(hosts, DOCKER):
        met = met_at(hosts, folder, flags=WITHOUT_DOCKER)
    assert met == hosts.addresses["node1"]


def test_hosts_meet_by_ipv6_where_the_first_network_is_filtered(
    hosts: VirtualHosts, folder: Path, second_network: None
) -> None:
    with filtered(hosts, all_but_the_launcher(FIRST_NETWORK)):
        met = met_at(hosts, folder, num_hosts=3, flags=OPEN_MPI_IN_PORTS)
    assert met == "fd98::1"


def test_hosts_with_ipv6_alone_train_together(
    hosts: VirtualHosts, folder: Path
) -> None:
    with ipv6_alone(hosts):
        assert met_at(hosts, folder) == "fd99::1"


@pytest.mark.slow  # tests/unit/test_network.py: gloo on an address that was not proved
def test_gloo_is_refused_where_nodes_meet_at_another_address_than_it_takes(
    hosts: VirtualHosts, folder: Path
) -> None:
    own = {
        name: [f"10.98.0.{i}/24", f"10.97.0.{i}/24"]
        for i, name in enumerate(hosts.names, 1)
    }
    rules = [all_but_the_launcher(net) for net in (FIRST_NETWORK, "10.98.0.0/24")]
    words = ["--backend", "gloo"]
    with further_network(hosts, "eth1", own), filtered(hosts, *rules):
        said = refused(hosts, folder, words=words, flags=OPEN_MPI_IN_PORTS)
        assert "gloo would listen on 10.98.0.1, the first address of eth1" in said


def test_an_interface_that_a_host_lacks_is_one_error(
    hosts: VirtualHosts, folder: Path
) -> None:
    with further_network(hosts, "eth1", {"node1": ["10.98.0.1/24"]}):
        said = refused(hosts, folder, words=["--interface", "eth1"])
    assert "no interface 'eth1'" in said
    assert "  node2, where there is eth0, lo\n" in said


def test_a_filtered_interface_that_open_mpi_uses_too_is_named_within_the_start_timeout(
    hosts: VirtualHosts, folder: Path
) -> None:
    """Its launcher uses eth1 alone, and ssh is let pass."""
    own = {name: [f"10.98.0.{i}/24"] for i, name in enumerate(hosts.names, 1)}
    rule = f"ip daddr {FIRST_NETWORK} tcp flags & (syn | ack) == syn tcp dport != 22"
    flags = ("--prtemca", "prte_if_include", "eth1")
    with further_network(hosts, "eth1", own), filtered(hosts, rule):
        said = refused(hosts, folder, words=["--start-timeout", "12"], flags=flags)
        assert "did not arrive within 10 s" in said
        assert "Set OMPI_MCA_btl_tcp_if_include=eth1 for mpirun" in said
        flags += ("--mca", "btl_tcp_if_include", "eth1")
        shutil.rmtree(folder / "runs")
        assert met_at(hosts, folder, flags=flags) == "10.98.0.1"


def test_no_common_address_is_one_error_with_the_table(
    hosts: VirtualHosts, folder: Path
) -> None:
    """One is filtered; at the other the second host's own sshd answers."""
    with (
        filtered(hosts, all_but_the_launcher(FIRST_NETWORK)),
        docker_bridge(hosts, DOCKER),
        somebody_else_at(hosts, DOCKER),
    ):
        said = refused(hosts, folder, flags=OPEN_MPI_IN_PORTS + WITHOUT_DOCKER)
    assert "no address of rank zero's host node1 is reachable" in said
    assert re.search(r"^  10\.99\.0\.1 \(eth0, .*\): timed out: node2$", said, re.M)
    else_ = r"^  172\.17\.0\.1 \(docker0, .*\): another program answered: node2$"
    assert re.search(else_, said, re.M), said


def refused(
    hosts: VirtualHosts,
    folder: Path,
    *,
    words: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> str:
    """Try to train on two hosts; return the one error that is said."""
    names = hosts.names[:2]
    words = ["--dry-run", *words]
    done = mpirun(hosts, folder, names, slots=1, words=words, flags=flags)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("LaunchError") == 1, done.stdout
    return done.stdout

"""Where rank zero is reached: the choice, as tables; the proof, on loopback."""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.rendezvous import reachability, select, transports
from mpitrain.launch.rendezvous.interfaces import (
    Interface,
    find_interfaces,
    kind_of,
    speed_of,
)
from mpitrain.launch.rendezvous.select import Attempt, Offer

SECONDS = 5.0
"""For what comes at once where it comes at all."""


def card(name: str, kind: str, speed: int = 0, *addresses: str) -> Interface:
    return Interface(name=name, kind=kind, speed_mbps=speed, addresses=addresses)


IB = card("ib0", "infiniband", 100_000)
ROCE = card("eth4", "roce", 25_000)
FAST = card("hsn0", "ethernet", 200_000)
SLOW = card("eth0", "ethernet", 1_000)
CLOUD = card("ens3", "ethernet")
VETH = card("veth", "virtual", 10_000)
VPN = card("tun0", "tunnel", 10)
DOCKER = card("docker0", "bridge", 10_000)


def offers_of(*interfaces: Interface) -> list[Offer]:
    return [
        Offer(address=f"10.{i}.0.1", port=i, interface=interface)
        for i, interface in enumerate(interfaces)
    ]


def reached(interface: Interface) -> Attempt:
    return Attempt(source="10.0.0.2", interface=interface)


@pytest.mark.parametrize(
    ("interfaces", "best"),
    [
        ([SLOW], SLOW),
        ([DOCKER, VPN, VETH, SLOW, ROCE, IB], IB),
        ([DOCKER, VPN, VETH, FAST, ROCE], ROCE),
        ([SLOW, FAST], FAST),
        ([CLOUD, SLOW], SLOW),
        ([DOCKER, VETH], VETH),
        ([DOCKER, VPN], VPN),
        ([DOCKER], DOCKER),
        # A tie: the first.
        ([SLOW, card("eth1", "ethernet", 1_000)], SLOW),
    ],
)
def test_the_best_class_then_speed_wins(interfaces: list, best: Interface) -> None:
    offers = offers_of(*interfaces)
    everyone = {tuple(reached(end) for end in interfaces): "bc"}
    assert offers[select.select_offer("a", offers, everyone)].interface == best
    assert offers[select.select_offer("a", offers, {})].interface == best


def test_a_connection_is_as_good_as_its_slower_end() -> None:
    offers = offers_of(IB, FAST)
    assert select.select_offer("a", offers, {(reached(IB), reached(FAST)): "b"}) == 0
    # b has no InfiniBand: what reached ib0 there went over a router.
    over_router = {(reached(SLOW), reached(FAST)): "b"}
    assert select.select_offer("a", offers, over_router) == 1


def test_ipv4_is_taken_before_ipv6_where_all_else_is_equal() -> None:
    offers = [
        Offer(address=address, port=1, interface=SLOW)
        for address in ("fd00::1", "10.0.0.1")
    ]
    assert select.select_offer("a", offers, {(reached(SLOW),) * 2: "b"}) == 1


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({"b": []}, 0),
        ({"b": [0], "c": []}, 1),
        ({"b": [0], "c": [1]}, 2),
        ({"b": [0, 1], "c": [1]}, 2),
    ],
)
def test_only_what_every_node_reached_is_chosen(failing: dict, expected: int) -> None:
    interfaces = [IB, ROCE, SLOW]
    attempts = {
        tuple(
            Attempt(failure="refused") if i in failed else reached(end)
            for i, end in enumerate(interfaces)
        ): [host]
        for host, failed in failing.items()
    }
    assert select.select_offer("a", offers_of(*interfaces), attempts) == expected


def test_no_common_address_is_one_error_with_the_table() -> None:
    lost, refused = Attempt(failure="timed out"), Attempt(failure="refused")
    attempts = {
        (lost, reached(DOCKER)): ["b"],
        (reached(SLOW), refused): ["c"],
        (lost, refused): [f"n{i}" for i in range(100)],
    }
    with pytest.raises(LaunchError, match="rank zero's host a is reachable") as caught:
        select.select_offer("a", offers_of(SLOW, DOCKER), attempts)
    first, second = str(caught.value).splitlines()[1:3]
    assert first == (
        "  10.0.0.1 (eth0, ethernet, 1000 Mb/s): "
        "reached: c; timed out: b, n0, n1, n2, n3, n4, n5, n6 and 93 more"
    )
    assert second.startswith("  10.1.0.1 (docker0, bridge, 10000 Mb/s): reached: b; ")
    assert caught.value.reporting_rank == 0


def test_an_error_of_a_host_without_an_address_names_what_to_do() -> None:
    with pytest.raises(LaunchError, match="host a has no address of loopback") as alone:
        select.select_offer("a", [], {})
    assert "ip link set lo up" in str(alone.value)
    with pytest.raises(LaunchError, match="a has no address that other") as several:
        select.select_offer("a", [], {(): ["b"]})
    assert "firewall" not in str(several.value)


def test_a_missing_interface_is_named_with_those_that_are_there() -> None:
    interfaces = {("ib0",): ["a"], ("lo", "eth0"): ["b"], ("eth0", "lo"): ["c"]}
    with pytest.raises(LaunchError, match=r"b, c, where there is eth0, lo") as caught:
        select.check_interface("ib0", interfaces)
    assert "'ib0'" in str(caught.value)
    select.check_interface("ib0", {("ib0",): ["a"]})


LO = card("lo", "loopback", 0, "127.0.0.1", "::1", "10.9.0.1")
ETH = card("eth0", "ethernet", 0, "10.0.0.1", "fd00::1", "fe80::1")


@pytest.mark.parametrize(
    ("name", "alone", "expected"),
    [
        (None, True, ["127.0.0.1"]),
        # An address of the host on its loopback interface, as BGP fabrics have it.
        (None, False, ["10.9.0.1", "10.0.0.1", "fd00::1"]),
        ("eth0", True, ["10.0.0.1", "fd00::1"]),
        ("eth0", False, ["10.0.0.1", "fd00::1"]),
        ("ib0", False, []),
    ],
)
def test_rank_zero_offers_what_others_may_reach(
    name: str | None, alone: bool, expected: list
) -> None:
    offered = select.addresses_to_offer([LO, ETH], name, is_alone=alone)
    assert [address for address, _ in offered] == expected


# What the kernel shows in /sys/class/net/<name>: files with their content, folders.
ETHERNET = {"type": "1\n"}
CARD = {**ETHERNET, "device/": "", "speed": "25000\n"}
SYS = {
    "lo": {"type": "772\n"},
    "ib0": {"type": "32\n", "device/infiniband/mlx5_0/": "", "speed": "100000\n"},
    "eth0": CARD,
    "eth1": {**ETHERNET, "device/": "", "speed": "-1\n"},
    "eth4": {**CARD, "device/infiniband/mlx5_1/": ""},
    "hsn0": {**ETHERNET, "device/": "", "speed": "200000\n", "operstate": "up\n"},
    "hsn10": {**ETHERNET, "device/": "", "operstate": "up\n"},
    "hsn2": {**ETHERNET, "device/": "", "operstate": "up\n"},
    "hsn3": {**ETHERNET, "device/": "", "operstate": "down\n"},
    "eth9": {**ETHERNET, "device/cxi/": "", "operstate": "down\n"},
    "wlan0": {**CARD, "wireless/": ""},
    "veth1": {**ETHERNET, "speed": "10000\n"},
    "docker0": {**ETHERNET, "bridge/": "", "lower_veth1/": ""},
    "virbr0": {**ETHERNET, "bridge/": ""},
    "br0": {**ETHERNET, "bridge/": "", "lower_eth0/": "", "lower_veth1/": ""},
    "bond0": {**ETHERNET, "lower_eth0/": "", "lower_eth4/": ""},
    "bond0.7": {**ETHERNET, "lower_bond0/": ""},
    "bond1": {"type": "32\n", "lower_ib0/": ""},
    "tun0": {"type": "65534\n", "tun_flags": "0x1001\n"},
    "tap0": {**ETHERNET, "tun_flags": "0x1002\n"},
    "gre1": {"type": "778\n"},
    "loop0": {**ETHERNET, "lower_loop0/": ""},
}


@pytest.fixture
def sys_class_net(tmp_path: Path) -> Path:
    for name, entries in SYS.items():
        for entry, text in entries.items():
            path = tmp_path / name / entry
            (path if entry.endswith("/") else path.parent).mkdir(
                parents=True, exist_ok=True
            )
            if text:
                path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "speed"),
    [
        ("lo", "loopback", 0),
        ("ib0", "infiniband", 100_000),
        ("bond1", "infiniband", 0),
        ("eth0", "ethernet", 25_000),
        ("eth1", "ethernet", 0),
        ("eth4", "roce", 25_000),
        ("hsn0", "slingshot", 200_000),
        ("eth9", "slingshot", 0),
        ("wlan0", "wireless", 25_000),
        ("veth1", "virtual", 10_000),
        ("docker0", "bridge", 0),
        ("virbr0", "bridge", 0),
        ("br0", "ethernet", 0),
        ("bond0", "roce", 0),
        ("bond0.7", "roce", 0),
        ("tun0", "tunnel", 0),
        ("tap0", "tunnel", 0),
        ("gre1", "tunnel", 0),
        ("loop0", "virtual", 0),
        ("gone", "virtual", 0),
    ],
)
def test_an_interface_is_classed_by_what_it_stands_on(
    name: str, kind: str, speed: int, sys_class_net: Path
) -> None:
    assert kind_of(name, sys_class_net) == kind
    assert speed_of(name, sys_class_net) == speed


def test_this_host_has_a_loopback_interface() -> None:
    found = {interface.kind: interface for interface in find_interfaces()}
    assert "127.0.0.1" in found["loopback"].addresses


SECRET = secrets.token_bytes(32)


def ask(
    listener: socket.socket, secret: bytes = SECRET, seconds: float = SECONDS
) -> tuple[str, str]:
    return reachability.connect(listener.getsockname()[:2], 0, secret, seconds=seconds)


def test_rank_zero_proves_itself_to_those_who_know_the_secret() -> None:
    with (
        reachability.listen("127.0.0.1") as listener,
        reachability.answering([listener], SECRET),
    ):
        assert ask(listener) == ("127.0.0.1", "")
        where = listener.getsockname()[:2]
        came = reachability.connect(
            where, 0, SECRET, seconds=SECONDS, source="127.0.0.9"
        )
        assert came == ("127.0.0.9", "")


@pytest.mark.parametrize(
    ("secret", "index"), [(b"another", 0), (SECRET, 1)], ids=["secret", "index"]
)
def test_who_does_not_know_the_secret_gets_no_answer(secret: bytes, index: int) -> None:
    with (
        reachability.listen("127.0.0.1") as listener,
        reachability.answering([listener], SECRET),
    ):
        where = listener.getsockname()[:2]
        came = reachability.connect(where, index, secret, seconds=0.3)
        assert came == ("", "connected, but no reply")


def test_where_nobody_listens_is_refused_at_once() -> None:
    gone = reachability.listen("127.0.0.1")
    where = gone.getsockname()[:2]
    gone.close()
    assert reachability.connect(where, 0, SECRET, seconds=SECONDS) == ("", "refused")


@contextmanager
def service(serve: Callable[[socket.socket], object]) -> Iterator[socket.socket]:
    """Accept on loopback, and do something with every connection."""
    with reachability.listen("127.0.0.1") as listener, ExitStack() as connections:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    sock = connections.enter_context(listener.accept()[0])
                    with suppress(OSError):
                        serve(sock)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        thread.join(SECONDS)


@pytest.mark.parametrize(
    ("serve", "failure"),
    [
        (
            lambda sock: sock.sendall(sock.recv(32)),
            reachability.SOMEBODY_ELSE,
        ),  # an echo
        (lambda sock: sock.sendall(b"SSH-2.0-OpenSSH\r\n"), reachability.SOMEBODY_ELSE),
        (lambda sock: sock.sendall(b"x" * 100_000), reachability.SOMEBODY_ELSE),
        (lambda sock: None, reachability.SILENT),
        (lambda sock: sock.close(), reachability.SILENT),
    ],
)
def test_a_look_alike_is_not_taken_for_rank_zero(serve: Callable, failure: str) -> None:
    with service(serve) as listener:
        assert ask(listener, seconds=0.3) == ("", failure)


@contextmanager
def stranger(
    listener: socket.socket, say: Callable[[socket.socket], object]
) -> Iterator[list[int]]:
    """Connect again and again, say something, and keep the last ones open.

    After the first burst at 200 connections a second: an endless loop would take the
    cores from the listener, which is in this process, and fill the kernel's queue.
    """
    stop, count = threading.Event(), [0]
    connections: deque[socket.socket] = deque()

    def connect() -> None:
        while not stop.is_set():
            with suppress(OSError):
                sock = socket.create_connection(listener.getsockname(), 0.2)
                connections.append(sock)
                count[0] += 1
                say(sock)
            if len(connections) > reachability.MAX_STRANGERS + 10:
                connections.popleft().close()
            if count[0] > 2 * reachability.MAX_STRANGERS:
                stop.wait(0.005)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    yield count
    stop.set()
    thread.join(SECONDS)
    for sock in connections:
        sock.close()


@pytest.mark.parametrize(
    "say",
    [
        lambda sock: None,
        lambda sock: sock.sendall(b"G"),
        lambda sock: sock.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10),
        lambda sock: sock.close(),
    ],
    ids=["silence", "a letter", "http", "gone"],
)
def test_a_flood_of_strangers_keeps_nobody_from_an_answer(say: Callable) -> None:
    with (
        reachability.listen("127.0.0.1") as listener,
        reachability.answering([listener], SECRET),
        stranger(listener, say) as count,
    ):
        while (
            count[0] <= 2 * reachability.MAX_STRANGERS
        ):  # more than may be open at once
            time.sleep(0.001)
        for _ in range(5):
            assert ask(listener) == ("127.0.0.1", "")


def test_a_listener_is_bound_to_its_address_alone() -> None:
    with reachability.listen("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=1).close()


def rendezvous(own: str, *addresses: str, name: str = "eth0") -> select.Rendezvous:
    return select.Rendezvous(
        address="10.0.0.1",
        port=1,
        why="",
        own_address=own,
        interface=card(name, "ethernet", 0, *addresses),
        listener=None,
    )


GLOO, NCCL = {"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "=eth0"}
FAMILY = {"NCCL_SOCKET_FAMILY": "AF_INET6"}


@pytest.mark.parametrize(
    ("own", "environ", "expected"),
    [
        ("10.0.0.2", {}, GLOO | NCCL),
        ("fd00::2", {}, GLOO | NCCL | FAMILY),
        ("fd00::2", {"NCCL_SOCKET_FAMILY": "AF_INET"}, GLOO | NCCL),
        ("fd00::2", {"NCCL_SOCKET_IFNAME": "eth7"}, GLOO),
        ("10.0.0.2", {"GLOO_SOCKET_IFNAME": "eth7"}, NCCL),
    ],
)
def test_gloo_and_nccl_are_told_unless_the_user_told_them(
    own: str, environ: dict, expected: dict
) -> None:
    assert transports.socket_variables(rendezvous(own), environ) == expected


def test_nccl_gets_all_interfaces_of_slingshot_that_are_up(sys_class_net: Path) -> None:
    here = rendezvous("10.0.0.2", name="hsn0")
    here = replace(here, interface=replace(here.interface, kind="slingshot"))
    found = transports.socket_variables(here, {}, sys_class_net)
    assert found == {
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_SOCKET_IFNAME": "=hsn0,hsn2,hsn10",
    }


def test_a_label_is_told_to_gloo_and_not_to_nccl() -> None:
    found = transports.socket_variables(rendezvous("10.0.0.2", name="eth0:1"), {})
    assert found == {"GLOO_SOCKET_IFNAME": "eth0:1", "NCCL_SOCKET_IFNAME": "=eth0"}


@pytest.mark.parametrize(
    ("own", "addresses", "environ"),
    [
        ("127.0.0.1", ["127.0.0.1", "::1"], {}),
        ("127.0.0.2", ["127.0.0.1", "127.0.0.2"], {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("127.0.0.1", [], {}),
    ],
)
def test_gloo_is_left_alone_where_it_takes_the_address_itself(
    own: str, addresses: list, environ: dict
) -> None:
    found = transports.check_gloo(rendezvous(own, *addresses), "gloo", environ)
    assert found == ""


def test_gloo_on_an_address_that_was_not_proved_is_refused() -> None:
    elsewhere = rendezvous("10.1.0.2", "10.0.0.2", "10.1.0.2")
    with pytest.raises(LaunchError, match=r"gloo would listen on 10\.0\.0\.2"):
        transports.check_gloo(elsewhere, "gloo", {})
    warning = transports.check_gloo(elsewhere, "mpi4py", {})
    assert "gloo would listen on 10.0.0.2" in warning


@pytest.mark.parametrize("num_nodes", [1, 2, 256, 257, 600, 16384])
def test_so_many_nodes_try_the_addresses(num_nodes: int) -> None:
    probing = [n for n in range(num_nodes) if select.probes(n, num_nodes)]
    assert 0 not in probing
    assert len(probing) == num_nodes - 1 or 128 <= len(probing) <= 256
    gaps = {b - a for a, b in itertools.pairwise(probing)}
    assert len(gaps) <= 1  # evenly spread
    assert len(probing) == (num_nodes - 1) // select.probing_stride(num_nodes)


def test_a_node_that_does_not_try_finds_its_address_by_its_routes() -> None:
    lo = card("lo", "loopback", 0, "127.0.0.1", "::1")
    offer = Offer(address="127.0.0.1", port=9, interface=lo)
    found = select.source_for(offer, [ETH, lo], None)
    assert (found.source, found.interface) == ("127.0.0.1", lo)
    assert select.source_for(offer, [ETH, lo], "eth0").source == "10.0.0.1"
    lost = Offer(address="fe80::1%nosuch", port=9, interface=lo)
    assert select.source_for(lost, [ETH, lo], None) == Attempt()

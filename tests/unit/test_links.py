"""The sidecars' connections: strangers are turned away, and cannot hold up the rest."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpitrain.watchdog import links
from mpitrain.watchdog.links import Hub, Link

TOKEN = "secret"


@pytest.fixture
def address() -> str:
    """Where the hub listens; a test may say otherwise."""
    return "127.0.0.1"


@pytest.fixture
def hub(address: str) -> Iterator[Hub]:
    """The center's side, for two ranks."""
    with contextlib.closing(Hub(address, TOKEN, 2)) as made:
        yield made


@pytest.fixture
def link(hub: Hub, address: str) -> Iterator[Link]:
    """The connection of rank 1's sidecar."""
    with contextlib.closing(Link(address, hub.port, TOKEN, 1)) as made:
        yield made


def pump(hub: Hub, seconds: float = 0.3) -> list[tuple[int, dict[str, Any]]]:
    """Let the hub hear for a while."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found += hub.receive(hub.sockets())
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_sidecar_that_knows_the_secret_is_heard_and_answered(
    hub: Hub, link: Link
) -> None:
    link.send({"step": 3})
    assert pump(hub) == [(1, {"step": 3})]
    assert link.receive(link.sockets()) == [{"do": "nothing"}]
    assert link.stands
    hub.broadcast({"do": "stacks"})
    assert link.receive(link.sockets()) == [{"do": "stacks"}]
    assert not link.is_closed


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(500) + b"\n",
        b'wrong 1\n{"step": 3}\n',
        b"[" * 180 + b"\n",
        b"[" * 50000 + b"\n",
        b"\n\n\n",
        b"x" * (links.LINE_BYTES + 10),
        f"{TOKEN}\n".encode(),
        f"{TOKEN} none\n".encode(),
        f"{TOKEN} -1\n".encode(),
        f"{TOKEN} {'9' * 150}\n".encode(),
    ],
)
def test_a_stranger_is_dropped_and_others_are_served(hub: Hub, rubbish: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port)) as stranger:
        stranger.setblocking(False)
        sent = 0
        for _ in range(200):
            try:
                sent += stranger.send(rubbish[sent:])
            except BlockingIOError:
                pass
            except OSError:
                break
            pump(hub, 0.01)
            if sent == len(rubbish):
                break
        with contextlib.closing(Link("127.0.0.1", hub.port, TOKEN, 1)) as link:
            link.send({"step": 3})
            assert pump(hub) == [(1, {"step": 3})]


def test_many_silent_connections_are_bounded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "STRANGER_SECONDS", 0.2)
    silent = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(200)]
    pump(hub, 0.05)
    assert len(hub.sockets()) <= 1 + 2 + links.STRANGERS
    pump(hub, 0.3)
    assert len(hub.sockets()) == 1
    with contextlib.closing(Link("127.0.0.1", hub.port, TOKEN, 1)) as link:
        link.send({"step": 3})
        assert pump(hub) == [(1, {"step": 3})]
    for sock in silent:
        sock.close()


def test_a_center_that_turned_one_away_is_asked_again() -> None:
    """Only one that had answered and then closed is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(Link("127.0.0.1", port, TOKEN, 1)) as link:
            listener.accept()[0].close()
            time.sleep(0.05)
            link.receive(link.sockets())
            assert not link.is_closed
            link.try_again(time.monotonic() + 10)
            listener.accept()[0].close()


def test_a_center_that_goes_away_is_noticed(hub: Hub, link: Link) -> None:
    pump(hub, 0.1)
    link.receive(link.sockets())
    assert link.stands
    hub.close()
    time.sleep(0.05)
    link.receive(link.sockets())
    assert link.is_closed

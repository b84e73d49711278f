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
from mpitrain.watchdog.links import CoordinatorClient, CoordinatorServer

TOKEN = "secret"


@pytest.fixture
def address() -> str:
    """Where the server listens; a test may say otherwise."""
    return "127.0.0.1"


@pytest.fixture
def server(address: str) -> Iterator[CoordinatorServer]:
    """The coordinator's side, for two ranks."""
    with contextlib.closing(CoordinatorServer(address, TOKEN, 2)) as made:
        yield made


@pytest.fixture
def client(server: CoordinatorServer, address: str) -> Iterator[CoordinatorClient]:
    """The connection of rank 1's sidecar."""
    with contextlib.closing(
        CoordinatorClient([(address, server.port)], TOKEN, 1)
    ) as made:
        yield made


def pump(
    server: CoordinatorServer, seconds: float = 0.3
) -> list[tuple[int, dict[str, Any]]]:
    """Let the server receive for a while."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found += server.receive(server.sockets())
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_sidecar_that_knows_the_secret_is_heard_and_answered(
    server: CoordinatorServer, client: CoordinatorClient
) -> None:
    client.send({"step": 3})
    assert pump(server) == [(1, {"step": 3})]
    assert client.receive(client.sockets()) == [{"command": "ping"}]
    assert client.is_established
    server.broadcast({"command": "dump_stacks"})
    assert client.receive(client.sockets()) == [{"command": "dump_stacks"}]
    assert not client.is_closed


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(500) + b"\n",
        b'wrong 1\n{"step": 3}\n',
        b"[" * 180 + b"\n",
        b"[" * 50000 + b"\n",
        b"\n\n\n",
        b"x" * (links.MAX_LINE_BYTES + 10),
        f"{TOKEN}\n".encode(),
        f"{TOKEN} none\n".encode(),
        f"{TOKEN} -1\n".encode(),
        f"{TOKEN} {'9' * 150}\n".encode(),
    ],
)
def test_a_stranger_is_dropped_and_others_are_served(
    server: CoordinatorServer, rubbish: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.setblocking(False)
        sent = 0
        for _ in range(200):
            try:
                sent += stranger.send(rubbish[sent:])
            except BlockingIOError:
                pass
            except OSError:
                break
            pump(server, 0.01)
            if sent == len(rubbish):
                break
        with contextlib.closing(
            CoordinatorClient([("127.0.0.1", server.port)], TOKEN, 1)
        ) as client:
            client.send({"step": 3})
            assert pump(server) == [(1, {"step": 3})]


def test_many_silent_connections_are_bounded(
    server: CoordinatorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "UNKNOWN_SECONDS", 0.2)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    pump(server, 0.05)
    assert len(server.sockets()) <= 1 + 2 + links.MAX_UNKNOWN
    pump(server, 0.3)
    assert len(server.sockets()) == 1
    with contextlib.closing(
        CoordinatorClient([("127.0.0.1", server.port)], TOKEN, 1)
    ) as client:
        client.send({"step": 3})
        assert pump(server) == [(1, {"step": 3})]
    for sock in silent:
        sock.close()


def test_a_coordinator_that_turned_one_away_is_asked_again() -> None:
    """Only one that had answered and then closed is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(
            CoordinatorClient([("127.0.0.1", port)], TOKEN, 1)
        ) as client:
            listener.accept()[0].close()
            time.sleep(0.05)
            client.receive(client.sockets())
            assert not client.is_closed
            client.retry(time.monotonic() + 10)
            listener.accept()[0].close()


def test_a_coordinator_that_goes_away_is_noticed(
    server: CoordinatorServer, client: CoordinatorClient
) -> None:
    pump(server, 0.1)
    client.receive(client.sockets())
    assert client.is_established
    server.close()
    time.sleep(0.05)
    client.receive(client.sockets())
    assert client.is_closed

"""The pure parts of the start, as tables."""

from __future__ import annotations

import socket

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch import network
from mpitrain.launch.ending import exit_status, message

OFFERS = [("10.0.0.1", 1), ("172.17.0.1", 2), ("fd00::1", 3)]


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({}, OFFERS[0]),
        ({"b": [0, 1, 2], "c": [0, 2]}, OFFERS[0]),
        ({"b": [0, 2], "c": [2]}, OFFERS[2]),
        ({"b": [1], "c": [1]}, OFFERS[1]),
    ],
)
def test_the_first_address_that_all_reached_is_chosen(
    reached: dict, expected: tuple
) -> None:
    assert network.choose(OFFERS, reached) == expected


def test_no_address_that_all_reached_is_an_error_with_the_table() -> None:
    with pytest.raises(LaunchError) as caught:
        network.choose(OFFERS, {"b": [0, 1], "c": [2], "d": []})
    said = str(caught.value)
    assert "b: reached 10.0.0.1, 172.17.0.1" in said
    assert "d: reached none of them" in said


def test_only_listening_sockets_are_reached() -> None:
    with network.listen("127.0.0.1") as open_one, network.listen("127.0.0.1") as gone:
        offers = [s.getsockname()[:2] for s in (open_one, gone)]
        gone.close()
        assert network.connect_to_each(offers) == {0: "127.0.0.1"}


def test_a_listener_is_bound_to_its_address_alone() -> None:
    with network.listen("127.0.0.1") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=1).close()


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SystemExit(7), 7, "[rank 1/2 h] sys.exit(7)"),
        (SystemExit(256), 1, "sys.exit(256)"),
        (SystemExit(-1), 255, "sys.exit(-1)"),
        (SystemExit("no"), 1, "sys.exit('no')"),
        (KeyboardInterrupt(), 130, "interrupted by Ctrl-C"),
        (ValueError("bad"), 1, "[rank 1/2 h] ValueError: bad"),
        (LaunchError("worse"), 1, "[rank 1/2 h] LaunchError: worse"),
    ],
)
def test_every_way_out_has_a_status_and_words(
    error: BaseException, status: int, words: str
) -> None:
    assert exit_status(error) == status
    assert words in message(error, "rank 1/2 h")


def test_leaving_well_is_no_failure() -> None:
    assert exit_status(SystemExit()) == 0
    assert exit_status(SystemExit(0)) == 0

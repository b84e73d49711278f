"""Lines of JSON between the sidecars and the coordinator, over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

MAX_LINE_BYTES = 1 << 20  # a connection that sends a longer line is dropped
MAX_WAITING_BYTES = 64 << 20  # one on which so much waits to be sent is dropped
MAX_HELLO_BYTES = 200  # the same before the other side has authenticated itself
UNKNOWN_SECONDS = 5.0  # how long a connection may take to authenticate itself
MAX_UNKNOWN = 64  # such connections beyond the number of ranks; more are refused

PING = '{"command": "ping"}'


class JsonSocket:
    """A connection that carries one object per line; never blocks.

    The first line that a sidecar sends is the token and its rank. Nothing is read as
    JSON before that.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank: int | None = None
        self.began = time.monotonic()
        self.is_closed = False
        self._in = b""
        self._out = b""
        sock.setblocking(False)

    def send(self, text: str) -> None:
        """Send a line; what does not go now goes with the next."""
        self._out += text.encode() + b"\n"
        try:
            sent = self.sock.send(self._out)
            self._out = self._out[sent:]
        except BlockingIOError:
            self.is_closed |= len(self._out) > MAX_WAITING_BYTES
        except OSError:
            self.is_closed = True

    def receive(self) -> list[bytes]:
        """Return the complete lines that arrived."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.is_closed |= not data
        *lines, self._in = (self._in + data).split(b"\n")
        limit = MAX_HELLO_BYTES if self.rank is None else MAX_LINE_BYTES
        self.is_closed |= len(self._in) > limit
        return lines

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self.sock.close()


class CoordinatorServer:
    """The coordinator's side: listens on a free `port` for the other sidecars.

    A relay is one, too, that does not answer: what it passes on from the coordinator
    tells its clients that they are heard.
    """

    def __init__(
        self, address: str, token: str, world_size: int, *, answers: bool = True
    ) -> None:
        self._answers = answers
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=2048)
        self._listener.setblocking(False)
        self._token = token
        self._max_unknown = world_size + MAX_UNKNOWN
        self._connections: list[JsonSocket] = []
        self.port: int = self._listener.getsockname()[1]

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for."""
        return [self._listener, *(one.sock for one in self._connections)]

    def receive(
        self, ready: Sequence[socket.socket]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return the messages that arrived, each with the rank of its sidecar."""
        if self._listener in ready:
            self._accept()
        found = []
        for one in self._connections:
            if one.sock not in ready:
                continue
            for text in one.receive():
                if one.rank is not None:
                    found.append((one.rank, json.loads(text)))
                    continue
                one.rank = self._authenticated_rank(text)
                if one.rank is None:
                    one.close()
                    break
                if self._answers:
                    one.send(PING)  # so that it knows it is heard
        late = time.monotonic() - UNKNOWN_SECONDS
        for one in self._connections:
            if one.is_closed or (one.rank is None and one.began < late):
                one.close()
        self._connections = [one for one in self._connections if not one.is_closed]
        return found

    def _authenticated_rank(self, hello: bytes) -> int | None:
        token, _, rank = hello.partition(b" ")
        # In constant time: the port is open to other users of the cluster.
        is_known = hmac.compare_digest(token, self._token.encode())
        return int(rank) if is_known and rank.isdigit() and len(rank) < 10 else None

    def close(self) -> None:
        """Close all connections and the port."""
        self._listener.close()
        for one in self._connections:
            one.close()

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send to every authenticated sidecar."""
        for one in self._connections:
            if one.rank is not None:
                one.send(json.dumps(message))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                num_unknown = sum(one.rank is None for one in self._connections)
                if num_unknown >= self._max_unknown:
                    sock.close()
                else:
                    self._connections.append(JsonSocket(sock))


class CoordinatorClient:
    """A sidecar's connection to the coordinator, or to a relay of its messages.

    `places` are addresses and ports, tried in turn; a connection that is not answered
    within `answer_seconds` is given up if there is another place.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, int]],
        token: str,
        rank: int,
        answer_seconds: float = 5.0,
    ) -> None:
        self._places = deque(places)
        self._answer_seconds = answer_seconds
        self._hello = f"{token} {rank}"
        self._connection: JsonSocket | None = None
        self._retry_at = 0.0
        self.is_established = False  # whether the coordinator ever answered
        self.heard_at = time.monotonic()
        self.retry(self.heard_at)

    @property
    def _is_open(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether the coordinator went away after it had answered."""
        return self.is_established and not self._is_open

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for."""
        return [self._connection.sock] if self._connection and self._is_open else []

    def retry(self, now: float) -> None:
        """Connect if nobody has answered and the last try was not just now."""
        is_in_time = now < self.heard_at + self._answer_seconds
        is_waiting = len(self._places) == 1 or is_in_time
        if now < self._retry_at or (self._is_open and is_waiting):
            return
        self._retry_at = now + 2.0
        self.close()
        place = self._places[0]
        self._places.rotate(-1)
        with contextlib.suppress(OSError):
            sock = socket.create_connection(place, timeout=1.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = JsonSocket(sock)
            self._connection.rank = 0  # it listens to rank zero alone
            self._connection.send(self._hello)
            self.heard_at = time.monotonic()

    def leave_relay(self) -> bool:
        """Forget a relay that has gone away; return whether there is another place."""
        if len(self._places) == 1:
            return False
        self._places.pop()  # the last one that was tried
        self.is_established, self._retry_at = False, 0.0
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; lost where there is no connection."""
        if self._connection is not None and self._is_open:
            self._connection.send(json.dumps(message))

    def receive(self, ready: Sequence[socket.socket]) -> list[dict[str, Any]]:
        """Return the messages that arrived."""
        if self._connection is None or self._connection.sock not in ready:
            return []
        found = [json.loads(text) for text in self._connection.receive()]
        if found:
            self.is_established = True
            self.heard_at = time.monotonic()
        return found

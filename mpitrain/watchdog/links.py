"""Lines of JSON between the sidecars and the center, over TCP."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

LINE_BYTES = 1 << 20
"""A longer line is not ours: the other side is dropped."""

HELLO_BYTES = 200
"""The same for the first line, of somebody who may be anybody."""

STRANGERS = 64
"""Connections beyond the ranks' own that may not have said yet who they are."""

STRANGER_SECONDS = 5.0


class JsonLines:
    """One connection that carries an object per line; never blocks.

    The first line, from a sidecar to the center, is the token and the rank. Nothing of
    a stranger's is read as JSON.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank: int | None = None
        self.began = time.monotonic()
        self.is_closed = False
        self._in = b""
        self._out = b""
        sock.setblocking(False)

    def send(self, message: dict[str, Any]) -> None:
        """Send an object; what does not go now goes with the next."""
        self.send_line(json.dumps(message))

    def send_line(self, text: str) -> None:
        """Send a line."""
        self._out += text.encode() + b"\n"
        try:
            sent = self.sock.send(self._out)
            self._out = self._out[sent:]
        except BlockingIOError:
            self.is_closed |= len(self._out) > LINE_BYTES
        except OSError:
            self.is_closed = True

    def receive(self) -> list[bytes]:
        """Return the lines that came whole."""
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.is_closed |= not data
        *lines, self._in = (self._in + data).split(b"\n")
        limit = HELLO_BYTES if self.rank is None else LINE_BYTES
        self.is_closed |= len(self._in) > limit
        return lines

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True
        self.sock.close()


class Hub:
    """The center's side: one connection of each other sidecar.

    Args:
        address: Where to listen, IPv4 or IPv6; on a free port, `port`.
        token: What a connection must say first to be heard.
        world_size: Number of ranks.
    """

    def __init__(self, address: str, token: str, world_size: int) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=2048)
        self._listener.setblocking(False)
        self._token = token
        self._strangers = world_size + STRANGERS
        self._lines: list[JsonLines] = []
        self.port: int = self._listener.getsockname()[1]

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for."""
        return [self._listener, *(line.sock for line in self._lines)]

    def receive(
        self, ready: Sequence[socket.socket]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Return what came: the rank, and what its sidecar says."""
        if self._listener in ready:
            self._accept()
        found = []
        for line in self._lines:
            if line.sock not in ready:
                continue
            for text in line.receive():
                if line.rank is not None:
                    found.append((line.rank, json.loads(text)))
                    continue
                line.rank = self._rank_of(text)
                if line.rank is None:
                    line.close()
                    break
                line.send({"do": "nothing"})  # so that it knows it is heard
        late = time.monotonic() - STRANGER_SECONDS
        for line in self._lines:
            if line.is_closed or (line.rank is None and line.began < late):
                line.close()
        self._lines = [line for line in self._lines if not line.is_closed]
        return found

    def _rank_of(self, hello: bytes) -> int | None:
        """Return who says hello; ``None`` for a stranger."""
        token, _, rank = hello.partition(b" ")
        known = hmac.compare_digest(token, self._token.encode())
        return int(rank) if known and rank.isdigit() and len(rank) < 10 else None

    def close(self) -> None:
        """Close all connections, and listen no more."""
        self._listener.close()
        for line in self._lines:
            line.close()

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send to every sidecar that said who it is."""
        for line in self._lines:
            if line.rank is not None:
                line.send(message)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                if sum(line.rank is None for line in self._lines) >= self._strangers:
                    sock.close()
                else:
                    self._lines.append(JsonLines(sock))


class Link:
    """A sidecar's connection to the center.

    Args:
        address: Where the center listens.
        port: Its port.
        token: What to say first.
        rank: Whose sidecar this is.

    Attributes:
        stands: Whether the center ever answered.
        heard_at: When the center last spoke, on the monotonic clock.
    """

    def __init__(self, address: str, port: int, token: str, rank: int) -> None:
        self._where = (address, port)
        self._hello = f"{token} {rank}"
        self._line: JsonLines | None = None
        self._next_try = 0.0
        self.stands = False
        self.heard_at = time.monotonic()
        self.try_again(self.heard_at)

    @property
    def is_closed(self) -> bool:
        """Whether the center went away after it had answered."""
        return self.stands and (self._line is None or self._line.is_closed)

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for."""
        return [self._line.sock] if self._line and not self._line.is_closed else []

    def try_again(self, now: float) -> None:
        """Connect, where there is no connection and it was not lately tried."""
        if now < self._next_try or (self._line and not self._line.is_closed):
            return
        self._next_try = now + 2.0
        self.close()
        with contextlib.suppress(OSError):
            sock = socket.create_connection(self._where, timeout=1.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._line = JsonLines(sock)
            self._line.rank = 0  # whose lines these are from here on
            self._line.send_line(self._hello)
            self.heard_at = time.monotonic()

    def close(self) -> None:
        """Close the connection."""
        if self._line is not None:
            self._line.close()

    def send(self, message: dict[str, Any]) -> None:
        """Tell the center something; lost where there is no connection."""
        if self._line is not None and not self._line.is_closed:
            self._line.send(message)

    def receive(self, ready: Sequence[socket.socket]) -> list[dict[str, Any]]:
        """Return what the center says."""
        if self._line is None or self._line.sock not in ready:
            return []
        found = [json.loads(text) for text in self._line.receive()]
        if found:
            self.stands = True
            self.heard_at = time.monotonic()
        return found

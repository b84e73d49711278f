"""A connection that proves who is at its other end.

docker0 has the same address on every node, so whoever accepts a connection there may
be somebody else's service. Both ends show that they know a secret that only this job's
ranks were told, over MPI.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DIGEST_BYTES = 32
MAX_CALLERS = 256
"""Connections that may be open at once without having said who they are."""
MAX_ACCEPTS = 64
"""Connections taken at once before those that are open are looked at again."""

TIMED_OUT = "timed out"
REFUSED = "refused"
SILENT = "accepted, no answer"
SOMEBODY_ELSE = "answered by somebody else"


def ask(
    where: tuple[str, int],
    index: int,
    secret: bytes,
    *,
    seconds: float,
    source: str | None = None,
) -> tuple[str, str]:
    """Connect to one of rank zero's listeners and have it prove itself.

    Args:
        where: Address and port.
        index: Which of the listeners it must be.
        secret: What only the ranks of this job know.
        seconds: How long all of it may take.
        source: The own address to come from; ``None``: as the system routes it.

    Returns:
        The own address that the connection came from and ``""``, or ``""`` and why
        there is none.
    """
    end = time.monotonic() + seconds
    failure = TIMED_OUT
    while (left := end - time.monotonic()) > 0:
        try:
            sock = socket.create_connection(
                where, left, source_address=(source, 0) if source else None
            )
        except TimeoutError:
            return "", failure
        except ConnectionRefusedError:
            return "", REFUSED
        except OSError as error:
            return "", (error.strerror or repr(error)).lower()
        with sock:
            failure = _prove(sock, index, secret, end)
            if not failure:
                return str(sock.getsockname()[0]), ""
        if failure == SOMEBODY_ELSE:
            break
        time.sleep(0.05)  # it was busy with strangers: once more
    return "", failure


def _prove(sock: socket.socket, index: int, secret: bytes, end: float) -> str:
    """Exchange proofs over a connection; return what was wrong, or ``""``."""
    answer = b""
    with contextlib.suppress(OSError):
        sock.sendall(_proof(secret, "ask", index))
        while len(answer) < DIGEST_BYTES:
            sock.settimeout(max(0.001, end - time.monotonic()))
            part = sock.recv(DIGEST_BYTES - len(answer))
            if not part:
                break
            answer += part
    if hmac.compare_digest(answer, _proof(secret, "answer", index)):
        return ""
    return SOMEBODY_ELSE if answer else SILENT


@contextlib.contextmanager
def answering(listeners: Sequence[socket.socket], secret: bytes) -> Iterator[None]:
    """Answer those who ask at some listeners, in a thread, while the block runs.

    Strangers are given no answer; those who say nothing, or too many at once, are
    hung up on, the oldest first.

    Args:
        listeners: Bound and listening; they stay open.
        secret: What only the ranks of this job know.
    """
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(
            target=_answer, args=(listeners, secret, there), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            here.close()
            thread.join()


@dataclass(frozen=True)
class _Caller:
    """A connection that has not yet said all."""

    sock: socket.socket
    index: int
    said: bytes = b""


def _answer(
    listeners: Sequence[socket.socket], secret: bytes, stop: socket.socket
) -> None:
    """Serve until the other end of `stop` is closed."""
    callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)

        def hang_up(caller: _Caller) -> None:
            del callers[caller.sock.fileno()]
            selector.unregister(caller.sock)
            caller.sock.close()

        ready: set[object] = set()
        while stop not in ready:
            ready = {key.fileobj for key, _ in selector.select()}
            # First who is here, then who waits outside.
            for caller in [c for c in callers.values() if c.sock in ready]:
                heard = _hear(caller, secret)
                if heard is None:
                    hang_up(caller)
                else:
                    callers[caller.sock.fileno()] = heard
            for index, listener in enumerate(listeners):
                if listener not in ready:
                    continue
                for sock in _accepted(listener):
                    if len(callers) == MAX_CALLERS:
                        hang_up(next(iter(callers.values())))
                    callers[sock.fileno()] = _Caller(sock, index)
                    selector.register(sock, selectors.EVENT_READ)
        for caller in list(callers.values()):
            hang_up(caller)
    for listener in listeners:
        listener.setblocking(True)


def _hear(caller: _Caller, secret: bytes) -> _Caller | None:
    """Read what a caller says, and answer if it is one of us.

    Returns:
        The caller, if it must say more; ``None`` when it is done with.
    """
    try:
        part = caller.sock.recv(DIGEST_BYTES - len(caller.said))
        said = caller.said + part
        if part and len(said) < DIGEST_BYTES:
            return _Caller(caller.sock, caller.index, said)
        if hmac.compare_digest(said, _proof(secret, "ask", caller.index)):
            caller.sock.sendall(_proof(secret, "answer", caller.index))
    except BlockingIOError:
        return caller
    except OSError:
        pass
    return None


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Take the connections that wait at a listener, some at a time."""
    for _ in range(MAX_ACCEPTS):
        try:
            sock = listener.accept()[0]
        except OSError:  # none is left, or the one that was is gone
            return
        sock.setblocking(False)
        yield sock


def _proof(secret: bytes, word: str, index: int) -> bytes:
    return hmac.digest(secret, f"{word} {index}".encode(), "sha256")

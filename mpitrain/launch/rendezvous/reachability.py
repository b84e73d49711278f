"""Whether an address is reached, by a connection whose two ends prove themselves.

docker0 has the same address on every node, so a stranger's service may accept a
connection there. Both ends show that they know a secret that only this job's ranks
were given, over MPI.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

DIGEST_BYTES = 32  # of SHA-256
POLL_SECONDS = 0.05
STRANGER_SECONDS = 1.0  # how long a connection may stay open without a proof
MAX_STRANGERS = 256  # open connections without a proof; others wait

TIMED_OUT = "timed out"
REFUSED = "refused"
SILENT = "connected, but no reply"
SOMEBODY_ELSE = "another program answered"


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of one numeric address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=2048)


def connect(
    where: tuple[str, int],
    index: int,
    secret: bytes,
    *,
    seconds: float,
    source: str | None = None,
) -> tuple[str, str]:
    """Connect to a listener of rank zero; return this end's address, or why not."""
    own = (source, 0) if source else None
    end = time.monotonic() + seconds
    failure = TIMED_OUT
    while (left := end - time.monotonic()) > 0:
        try:
            sock = socket.create_connection(where, left, source_address=own)
        except TimeoutError:
            return "", failure
        except ConnectionRefusedError:
            return "", REFUSED
        except OSError as error:
            return "", (error.strerror or repr(error)).lower()
        with sock:
            answer = b""
            with contextlib.suppress(OSError):
                sock.sendall(_proof(secret, "ask", index))
                answer = _receive(sock, end)
            if hmac.compare_digest(answer, _proof(secret, "answer", index)):
                return str(sock.getsockname()[0]), ""
        if answer:
            return "", SOMEBODY_ELSE
        failure = SILENT
        time.sleep(POLL_SECONDS)  # it was busy with strangers: once more
    return "", failure


@contextlib.contextmanager
def answering(listeners: Sequence[socket.socket], secret: bytes) -> Iterator[None]:
    """Answer those who know the secret, in threads, while the block runs."""
    stop = threading.Event()
    strangers = threading.BoundedSemaphore(MAX_STRANGERS)

    # A proof names the listener: an address that leads to another one is not reached.
    def answer(sock: socket.socket, index: int) -> None:
        with sock, contextlib.suppress(OSError):
            asked = _receive(sock, time.monotonic() + STRANGER_SECONDS)
            if hmac.compare_digest(asked, _proof(secret, "ask", index)):
                sock.sendall(_proof(secret, "answer", index))
        strangers.release()

    def serve(listener: socket.socket, index: int) -> None:
        listener.settimeout(POLL_SECONDS)  # so that `stop` is seen
        while not stop.is_set():
            with contextlib.suppress(OSError):  # nobody came, or is gone again
                sock = listener.accept()[0]
                strangers.acquire()
                threading.Thread(target=answer, args=(sock, index), daemon=True).start()
        # Blocking again: the store's copy of the socket shares this flag.
        listener.settimeout(None)

    with ThreadPoolExecutor(max(1, len(listeners))) as pool:
        for index, listener in enumerate(listeners):
            pool.submit(serve, listener, index)
        try:
            yield
        finally:
            stop.set()  # before the pool waits for its threads


def _receive(sock: socket.socket, end: float) -> bytes:
    # TCP may bring it in parts. One deadline for all of them: a stranger that sends a
    # byte now and then does not hold the connection open.
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < DIGEST_BYTES:
            sock.settimeout(max(0.001, end - time.monotonic()))
            part = sock.recv(DIGEST_BYTES - len(received))
            if not part:
                break
            received += part
    return received


def _proof(secret: bytes, word: str, index: int) -> bytes:
    return hmac.digest(secret, f"{word} {index}".encode(), "sha256")

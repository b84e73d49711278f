"""A sidecar's words: on the screen, which is the rank's, and in the rank's log."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

NOTE_SECONDS = 0.5
"""How long a line in a log may hold up the rest."""


class Voice:
    """Says and notes what a sidecar has to tell.

    Attributes:
        log: The rank's log; ``None``: it has none.
        stay_until: How long the sidecar must stay, so that no other one says the same.
    """

    def __init__(self) -> None:
        self.log: str | None = None
        self.stay_until = 0.0
        self._claim: socket.socket | None = None

    def say(self, text: str) -> None:
        """Write on the screen."""
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode())

    def take_the_word(self, launcher: object) -> bool:
        """Take the word, and tell whether no other sidecar of this job and host has it.

        Without a center they agree by a name that only one socket of a host can have.

        Args:
            launcher: Of the job on this host, as a name.
        """
        if self._claim is not None:
            return False
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._claim.bind(f"\0mpitrain-{os.getuid()}-{launcher}")
        except OSError:
            return False
        self.stay_until = time.monotonic() + 4.0  # the name is taken for so long
        return True

    def note(self, text: str) -> None:
        """Write into the rank's log, and not for long.

        A file server that does not answer is what a rank hangs for most often.
        """
        path = self.log
        if not path or not text:
            return

        def write() -> None:
            with contextlib.suppress(OSError), open(path, "a") as log:  # noqa: PTH123
                log.write(f"watchdog: {text.rstrip()}\n")

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(NOTE_SECONDS)

    def let_go(self, launcher_sockets: Sequence[int]) -> None:
        """Close what mpirun reads: it waits for the end of it before it leaves."""
        with contextlib.suppress(OSError):
            for descriptor in launcher_sockets:
                os.close(descriptor)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)

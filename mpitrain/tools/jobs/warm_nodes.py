"""`supervise --warm`: a fork server on each node, for the starts after the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial

from mpitrain.errors import UsageError
from mpitrain.tools.jobs.check_nodes import begin_without_term, end_session, reason_in
from mpitrain.tools.jobs.launch_words import LaunchWords


class WarmNodes:
    """Keeps a fork server on each node: an mpirun of its own that outlives the ranks.

    A node that is lost ends that mpirun; the next start is cold, and starts the
    servers again.
    """

    def __init__(self, words: LaunchWords, environ: Mapping[str, str]) -> None:
        words.launcher.check_hosts("--warm")
        # They would not hold for servers, one on each node.
        flags = {it.partition("=")[0] for it in words.start}
        if placed := flags & set(words.launcher.places):
            raise UsageError(
                f"--warm: found {min(placed)}; expected {words.launcher.host_file} "
                "FILE, whose slots say how many ranks each node has"
            )
        self._words, self._environ = words, environ
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._hosts: Sequence[str] = ()

    def keep(self, hosts: Sequence[str]) -> None:
        """Start the servers of some hosts, unless they run."""
        if self._mpirun is not None:
            has_ended = self._mpirun.poll() is not None
            if not has_ended and set(hosts) <= set(self._hosts):
                return
            self._output.seek(0)
            reason = f": {reason_in(self._output.read())}" if has_ended else ""
            text = f"supervise: new fork servers, this start is cold{reason}"
            print(text, file=sys.stderr, flush=True)
            self.stop()
            self._output.seek(0)
            self._output.truncate()
        self._hosts = hosts
        start, of_hosts = self._words.start, self._words.launcher.words_for(hosts)
        self._mpirun = subprocess.Popen(
            [
                # The last words of the start may be of a program around Python.
                *(start[0], *of_hosts, *self._words.exported, *start[1:]),
                *(self._words.program[0], "-m", "mpitrain", "serve"),
            ],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A scheduler's TERM is for the ranks, which save, and need their server.
            preexec_fn=partial(begin_without_term, os.getpid()),
        )

    def stop(self) -> None:
        """End the servers, and what is left of their ranks."""
        if self._mpirun is not None:
            # TERM is blocked for it.
            end_session(self._mpirun, signal.SIGINT)
            self._mpirun = None

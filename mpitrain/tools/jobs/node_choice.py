"""Which nodes each start under `supervise` takes: those that work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.files import write_atomic
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.schedulers import detect
from mpitrain.tools.jobs.hostfile import HostfileConfig, parse, text_of
from mpitrain.tools.jobs.launch_words import LaunchWords

logger = logging.getLogger("mpitrain")


class NodeChoice:
    """Chooses among the nodes of the job, or of the host file that the words name.

    Attributes:
        probe: Words of a program that writes `host_file`, with the nodes that work;
            empty where the launcher takes the job's nodes, or this machine.
    """

    def __init__(
        self,
        words: LaunchWords,
        environ: Mapping[str, str],
        file: Path,
        *,
        limit: int | None,
        minimum: int,
        seconds: float,
    ) -> None:
        self.probe: list[str] = []
        self._file, self._environ = file, environ
        self._lost: tuple[str, ...] = ()
        self._wrong: tuple[str, ...] = ()  # they compute wrongly, and answer a probe
        launcher = words.launcher
        source = ("--from", str(words.host_file)) if words.host_file else ()
        flags = [
            *source,
            # As mpirun counts by itself: a slot for each task of the scheduler.
            *("--gpus", "auto" if source else "ignore"),
            *("--format", launcher.host_file_format, "--min-nodes", str(minimum)),
            *(() if limit is None else ("--nodes", str(limit))),
        ]
        program = f"{PROGRAM} hostfile"
        self._config = read_flags(HostfileConfig, flags, program=program, files=False)
        self._has_list = bool(words.host_file) or detect(environ).name != "none"
        if limit is not None:
            launcher.check_hosts(f"--nodes {limit}")
            if not self._has_list:
                raise UsageError(f"--nodes {limit}: expected a job, or a host file")
        if not (launcher.host_file and self._has_list):
            return
        self.probe = [
            *(words.program[0], "-m", "mpitrain", "hostfile", *flags),
            *("--probe", "--probe-seconds", str(seconds)),
            *("--output", str(file), "--", *words.start),
        ]

    @property
    def host_file(self) -> Path | None:
        """The file of the nodes that were chosen last; ``None``: all are taken."""
        return self._file if self._file.exists() else None

    @property
    def hosts(self) -> list[str]:
        """The names of the nodes that are taken; this machine without a list."""
        if not self._has_list:
            return ["localhost"]
        text = (
            self._file.read_text()
            if self._file.exists()
            else text_of(self._config, self._environ)
        )
        return [it.hostname for it in parse(text, str(self._file))]

    def leave_out(self, hostname: str, *, is_wrong: bool = False) -> bool:
        """Choose without a node that is lost, until the next probe; return if it can.

        It takes no time, where a probe waits for the node. One that ``is_wrong``
        answers a probe, and is left out for good.
        """
        if not self.probe:
            return False
        lost = (*self._lost, hostname)
        try:
            before, text = (
                text_of(replace(self._config, exclude=it), self._environ)
                for it in (self._lost, lost)
            )
        except MpitrainError:  # too few are left
            return False
        if text == before:  # its name is another one there
            return False
        self._wrong += (hostname,) * is_wrong
        try:
            write_atomic(self._file, text)
        except OSError as error:  # a full disk
            logger.warning("supervise: %s is not renewed: %s", self._file, error)
            return False
        self._lost = lost
        return True

    def begin_probe(self) -> list[str]:
        """Return the words of `probe`; nodes that were lost are tried again."""
        self._lost = self._wrong
        words = ["--exclude", *self._wrong] if self._wrong else []
        # Behind the command's name: the last words are mpirun's.
        return [*self.probe[:4], *words, *self.probe[4:]]

"""The words that `supervise` runs: the launcher's, and those of its program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.launch.env_checks import STATUS_FILE
from mpitrain.mpi.launchers import OPTION_VALUES, Launcher
from mpitrain.tools.jobs.hostfile import parse

HOST_FILE = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "-f", "--f")
PYTHON = re.compile(r"(.*/)?python[\d.]*t?")
# Programs between the launcher's words and Python: their -n, -c or -f is their own.
AROUND = (
    *("chrt", "env", "ionice", "nice", "numactl", "taskset", "time", "timeout"),
    *("gdb", "likwid-perfctr", "likwid-pin", "ltrace", "ncu", "nsys", "perf", "strace"),
    *("rocprof", "rocprofv2", "rocprofv3", "valgrind", "vtune"),
    *("apptainer", "conda", "mamba", "micromamba", "pixi", "singularity", "uv"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchWords:
    """A command line that starts ranks, cut where the launcher's own words end."""

    launcher: Launcher
    start: tuple[str, ...]  # the launcher and its options, but for those below
    host_file: Path | None = None  # that they name
    num_ranks: int | None = None  # that they ask for
    program: tuple[str, ...]  # with its arguments

    @property
    def flags(self) -> list[str]:
        """What follows ``python -m mpitrain``, of a staged training within `stage`."""
        words = self._training
        if words[1:3] != ("-m", "mpitrain"):
            raise UsageError(
                "--jobs restarts a training of mpitrain: expected mpirun ... python "
                f"-m mpitrain FLAGS after --, found {shlex.join(words)}"
            )
        return list(words[3:])

    @property
    def is_script(self) -> bool:
        """Whether the program is a script, which may write no result."""
        words = self._training
        return words[1:3] != ("-m", "mpitrain") or words[3:4] == ("run",)

    @property
    def _training(self) -> tuple[str, ...]:
        # `stage` starts a training or a script; its own flags stand before the --.
        words = self.program
        if words[1:4] != ("-m", "mpitrain", "stage") or "--" not in words:
            return words
        words = words[words.index("--") + 1 :]
        for i, word in enumerate(words):  # others stand before it, such as numactl
            if PYTHON.fullmatch(word):
                return words[i:]
        if words and Path(words[0]).name == "mpitrain":  # the command: as python -m
            return "python", "-m", "mpitrain", *words[1:]
        return words

    @property
    def exported(self) -> list[str]:
        """Options that give processes on other hosts the variable of `supervise`."""
        return [self.launcher.export, STATUS_FILE] if self.launcher.export else []

    def on_hosts(self, file: Path | None, container: Sequence[str] = ()) -> list[str]:
        """Return the words of a start on the hosts of a file; ``None``: as given.

        The ranks are as many as the words ask for, and no more than the hosts have
        slots.
        """
        num_ranks, file = self.num_ranks, file or self.host_file
        # With the user's own file as many as they asked for, also more than its slots.
        if num_ranks is not None and file is not None and file != self.host_file:
            slots = sum(node.slots for node in parse(file.read_text(), str(file)))
            num_ranks = min(num_ranks, slots)
        options = [] if file is None else [self.launcher.host_file, str(file)]
        options += [] if num_ranks is None else ["-np", str(num_ranks)]
        options += self.exported
        # First: the last words may be of a program around Python, such as numactl.
        return [self.start[0], *options, *self.start[1:], *container, *self.program]


def parse_words(words: Sequence[str], launcher: Launcher) -> LaunchWords:
    """Cut a command line at its program: ``python``, or what ends the launcher's words.

    >>> from mpitrain.mpi.launchers import LAUNCHERS
    >>> words = "mpirun -np 8 --hostfile hosts -x PATH python train.py -n 3".split()
    >>> found = parse_words(words, LAUNCHERS["openmpi"])
    >>> found.start, found.host_file, found.num_ranks
    (('mpirun', '-x', 'PATH'), PosixPath('hosts'), 8)
    >>> found.program
    ('python', 'train.py', '-n', '3')
    """
    end = next((i for i, it in enumerate(words) if i and PYTHON.fullmatch(it)), 0)
    if not end:
        raise UsageError(
            f"expected mpirun ... python ... after --, found {shlex.join(words)}"
        )
    program = tuple(words[end:])
    if not launcher.host_file:  # its nodes are the job's: as given
        return LaunchWords(launcher=launcher, start=tuple(words[:end]), program=program)
    start, host_file, num_ranks = [words[0]], None, None
    rest, num_left, is_sure = iter(words[1:end]), 0, True  # values that may follow
    for word in rest:
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            if not num_left or (not is_sure and Path(word).name in AROUND):
                start += [word, *rest]  # the first word that is not the launcher's
                break
            start, num_left = [*start, word], num_left - 1
            continue
        num_left = 0
        is_num = flag in launcher.num_ranks and num_ranks is None
        if not equals and (is_num or flag in HOST_FILE):
            value = next(rest, "")
        if flag in HOST_FILE:
            host_file = Path(value)
        elif is_num and value.isdecimal():
            num_ranks = int(value)
        else:
            start += [word, value] if is_num and not equals else [word]
            known = OPTION_VALUES.get(word.lstrip("-"))
            num_left, is_sure = 1 if known is None else known, known is not None
            num_left *= not (equals or is_num)
    return LaunchWords(
        launcher=launcher,
        start=tuple(start),
        host_file=host_file,
        num_ranks=num_ranks,
        program=program,
    )

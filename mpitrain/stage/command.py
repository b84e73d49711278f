"""The command line of `stage`: its flags, and the command that runs after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import UseAppendAction

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.run_target import Target
from mpitrain.stage.pack import PACK_NAME
from mpitrain.stage.stage import StageRequest

USAGE = f"""\
  {PROGRAM} stage [FLAGS] -- python -m mpitrain ...
  {PROGRAM} stage [FLAGS] -- python SCRIPT.py [ARGS]
  {PROGRAM} stage [FLAGS] -- python -m PACKAGE.MODULE [ARGS]"""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Copy Python and its packages to each node by MPI, and run a command from there.

    Rank zero reads the environment; the other ranks receive it.
    """

    to: str | None = None
    """Folder on each node. '$NAME' in quotes is a variable of the rank. Default: the
    first folder of $SLURM_TMPDIR, $TMPDIR and /tmp."""
    data: UseAppendAction[tuple[str, ...]] = ()
    """A file or folder to copy, too; the command reads the copy; may be given several
    times."""
    pack: str | None = None
    """File in which rank zero packs the environment for the next job, or none. Default:
    .mpitrain-stage.pack in the environment."""


def read_words(flags: Sequence[str], command: Sequence[str]) -> StageRequest:
    """Read the flags and the command; called on rank zero."""
    program, usage = f"{PROGRAM} stage", f"Usage:\n{USAGE}\n"
    config = read_flags(StageConfig, flags, program=program, further=usage, files=False)
    for path in config.data:
        if not Path(path).exists():
            raise UsageError(f"--data {path}: expected a file or folder, found nothing")
        if "/" not in path:  # it may be another word of the command, too: a name
            raise UsageError(
                f"--data {path}: expected a path with a slash, as the command names "
                f"it: ./{path}"
            )
    pack = config.pack or str(Path(sys.prefix, PACK_NAME))
    return StageRequest(
        to=config.to,
        data=config.data,
        pack=None if pack == "none" else Path(pack).absolute(),
        target=read_command(command),
        is_unbuffered=command[1] == "-u",
    )


def with_own_args(request: StageRequest, command: Sequence[str]) -> StageRequest:
    """Return the request of rank zero, with the arguments of this rank's command."""
    own, first = read_command(command), request.target
    if replace(own, args=()) != replace(first, args=()):
        found = f"found {own.name} here and {first.name} on rank zero"
        raise UsageError(f"stage: {found}, expected one command; its words may differ")
    return replace(request, target=own)


def read_command(command: Sequence[str]) -> Target:
    """Read the words after ``--``.

    >>> read_command(["python3", "-u", "-m", "mpitrain", "--epochs", "3"])
    Target(kind='module', name='mpitrain', args=('--epochs', '3'))
    """
    program, *rest = command or [""]
    if program != sys.executable and not Path(program).name.startswith("python"):
        raise UsageError(
            f"stage runs a command of Python; found {program!r} after --, expected one "
            f"of\n{USAGE}"
        )
    folder, here = os.path.dirname(program), os.path.dirname(sys.executable)  # noqa: PTH120
    if folder and os.path.realpath(folder) != os.path.realpath(here):
        raise UsageError(
            f"the command runs in this process, which is {sys.executable}; found "
            f"{program} after --. Start stage with that Python"
        )
    if rest[:1] == ["-u"]:
        del rest[0]
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest or rest[0].startswith("-"):
        found = f"{rest[0]!r}" if rest else "nothing"
        raise UsageError(
            f"stage: found {found} after {program}, expected one of\n{USAGE}\n"
            f"Options of Python, but -u: python -X ... -m mpitrain stage -- {program}"
        )
    name, *args = rest
    if not is_module and not Path(name).exists():
        raise UsageError(f"stage: there is no script {name!r} in {os.getcwd()}")
    return Target(kind="module" if is_module else "script", name=name, args=tuple(args))

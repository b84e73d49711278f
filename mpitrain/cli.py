"""The command line: one function per subcommand, imports inside.

A first word that is a subcommand dispatches; without one it is ``train``. Rank zero
reads the command line and hands what it read to the others, so that a mistake is told
once.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from mpitrain import __version__
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.launch.contradictions import (
    launched_rank,
    launched_size,
    was_launched,
)
from mpitrain.train.config import TrainConfig
from mpitrain.world import place

PROGRAM = "python -m mpitrain"


class Answered(MpitrainError):
    """The command line only asked for help or the version, and was answered."""

    exit_status = 0


def console() -> None:
    """Run the command line of this process and leave with its status."""
    from mpitrain.launch.guard import exit_now

    exit_now(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Args:
        argv: The words after the program's name.

    Returns:
        The exit status. With several ranks a failure does not return: the guard ends
        the job.
    """
    from mpitrain.launch.guard import exit_status, message

    name, words = (
        (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    )
    try:
        COMMANDS[name](words)
    except BaseException as error:
        if exit_status(error) != 0:
            rank, size = launched_rank(os.environ), launched_size(os.environ)
            text = message(error, place(rank, size, socket.gethostname()))
            print(text, file=sys.stderr, flush=True)
        return exit_status(error)
    return 0


def train(argv: Sequence[str]) -> None:
    """Train a network. Collective over all ranks that mpirun started."""
    if {"-h", "--help", "--version"} & set(argv) and not was_launched(os.environ):
        read_config(argv)  # answers and raises; MPI need not start for that

    from mpitrain.launch import guarded, init
    from mpitrain.record import folder, recorder
    from mpitrain.topology import all_or_none, on_rank_zero

    def prepare() -> tuple[TrainConfig, Path]:
        config = read_config(argv)
        run_dir = folder.reserve(config.runs_dir, config.name)
        folder.write_whole(run_dir / "config.yaml", config.as_yaml(run_dir.name))
        return config, run_dir

    with guarded() as guard:
        comm = guard.comm
        config, run_dir = on_rank_zero(comm, prepare, "prepare the run")
        # The log stands before the long imports: it tells whose process this is.
        hostname = socket.gethostname()
        log = all_or_none(
            comm,
            lambda: folder.open_log(run_dir, comm.rank, comm.size, hostname),
            "open the log",
        )
        folder.start_logging(log, is_rank_zero=comm.rank == 0)
        faulthandler.enable(log)  # the stack of a crash in compiled code goes there
        guard.on_failure += [
            lambda text: log.write(text + "\n"),
            lambda text: recorder.fail(run_dir, text),
        ]
        job = init(device=config.device, guard=guard)
        with job:
            start_seconds = time.time() - psutil.Process().create_time()
            from mpitrain.train.run import run_training

            run_training(job, config, run_dir, start_seconds)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": train}
"""Subcommands by name."""


def read_config(argv: Sequence[str]) -> TrainConfig:
    """Read flags, and the YAML file that they may name, into a configuration.

    Args:
        argv: The words after the subcommand. Flags win over the file.

    Returns:
        The configuration.

    Raises:
        UsageError: What stands there cannot be used.
        Answered: Help or the version was asked for; it is printed.
    """
    if "--version" in argv:
        print(f"mpitrain {__version__}")
        raise Answered
    if argv and not argv[0].startswith("-"):
        raise UsageError(
            f"unknown command {argv[0]!r}; expected one of {', '.join(COMMANDS)}, "
            "or flags (see --help)"
        )
    before = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path, action="append", default=[])
    with usage_errors("--config"):
        given, words = before.parse_known_args(list(argv))
    flags: list[str] = []
    for file in given.config:
        from_file = flags_from_yaml(file)
        parse_flags(from_file, f"--config {file}")  # so that the file is named
        flags += from_file
    return parse_flags(flags + words, None)


def parse_flags(flags: Sequence[str], source: str | None) -> TrainConfig:
    """Turn flags into a configuration; see `read_config`.

    Args:
        flags: Such as ``["--lr", "0.1"]``; the last of a name wins.
        source: Where they come from, for messages; ``None`` for the command line.
    """
    import tyro

    with usage_errors(source):
        return tyro.cli(
            TrainConfig,
            prog=PROGRAM,
            description=f"{TrainConfig.__doc__}\n\n"
            "Further: --config FILE.yaml (the same fields; flags win), --version.\n"
            f"Subcommands: {', '.join(COMMANDS)} (train if none is named).",
            args=flags,
        )


@contextlib.contextmanager
def usage_errors(source: str | None) -> Iterator[None]:
    """Turn a parser's printed words and `SystemExit` into our exceptions."""
    answer, complaint = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(answer),
            contextlib.redirect_stderr(complaint),
        ):
            yield
    except SystemExit as left:
        if left.code in (0, None):
            print(plain(answer.getvalue()).rstrip(), flush=True)
            raise Answered from None
        where = f"{source}:\n" if source else ""
        raise UsageError(where + plain(complaint.getvalue()).rstrip()) from None


def plain(text: str) -> str:
    r"""Take the colours out: a rank's stdout is a terminal even in a batch job.

    >>> plain("\x1b[31mred\x1b[0m")
    'red'
    """
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def flags_from_yaml(file: Path) -> list[str]:
    """Read a YAML file of fields as the flags that say the same.

    Args:
        file: A mapping of field names to values, such as a run's ``config.yaml``.

    Returns:
        Flags with their values.

    Raises:
        UsageError: It cannot be read, or is no mapping of names to simple values.
    """
    import yaml

    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--config {file}: cannot be read: {reason}") from None
    if not isinstance(values, dict):
        raise UsageError(
            f"--config {file}: expected lines like `lr: 0.1`, found "
            f"{type(values).__name__}"
        )
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, str | int | float) or value is None:
            flags += [flag, str(value)]
        else:
            raise UsageError(
                f"--config {file}: {name} is a {type(value).__name__}; "
                "expected a number, a word, true, false or null"
            )
    return flags

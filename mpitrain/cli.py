"""The command line: one function per subcommand, imports inside.

A first word that is a subcommand dispatches; without one it is ``train``. Rank zero
reads the command line and hands what it read to the others, so that a mistake is told
once.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.contradictions import (
    launched_rank,
    launched_size,
    was_launched,
)
from mpitrain.train.config import TrainConfig
from mpitrain.world import place


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
        job = init(
            device=config.launch.device,
            interface=config.launch.interface,
            guard=guard,
        )
        with job:
            start_seconds = time.time() - psutil.Process().create_time()
            from mpitrain.train.run import run_training

            run_training(job, config, run_dir, start_seconds)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": train}
"""Subcommands by name."""


def read_config(argv: Sequence[str]) -> TrainConfig:
    """Read a training's flags.

    Args:
        argv: The words after the subcommand.

    Returns:
        The configuration.

    Raises:
        UsageError: What stands there cannot be used.
        Answered: Help or the version was asked for; it is printed.
    """
    if argv and not argv[0].startswith("-"):
        raise UsageError(
            f"unknown command {argv[0]!r}; expected one of {', '.join(COMMANDS)}, "
            "or flags (see --help)"
        )
    return read_flags(
        TrainConfig,
        argv,
        program=PROGRAM,
        further=f"Subcommands: {', '.join(COMMANDS)} (train if none is named).",
    )

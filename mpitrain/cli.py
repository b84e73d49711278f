"""The command line: one function per command, imports inside; ``train`` is the default.

Rank zero reads the command line for all ranks, so that a mistake is reported once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mpitrain.config import TrainConfig, default_start_timeout
from mpitrain.console import HELP_FLAGS
from mpitrain.errors import UsageError, did_you_mean
from mpitrain.flags import (
    PROGRAM,
    Config,
    HelpShown,
    read_flag_file,
    read_flags,
    words_of,
)
from mpitrain.launch.env_checks import (
    forget_parent,
    is_one_of_several,
    launched_label,
    launched_rank,
    launched_size,
    was_launched,
)
from mpitrain.mpi.collectives import all_or_none, on_rank_zero


def console() -> None:
    """Run the command line of this process and leave with its status."""
    from mpitrain.launch.process_exit import exit_now

    exit_now(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command."""
    from mpitrain.launch.process_exit import error_message, exit_status, write_status

    forget_parent(os.environ)
    name, *words = argv if argv and argv[0] in COMMANDS else ["train", *argv]
    try:
        status = COMMANDS[name](words) or 0
    # Ctrl-C and `sys.exit`, too: the status is written, whatever ends this.
    except BaseException as error:
        if exit_status(error) != 0:
            if isinstance(error, UsageError) and launched_size(os.environ) == 1:
                error.on_all_ranks()  # a world of one: its message has no rank
            text = error_message(error, launched_label(os.environ))
            print(text, file=sys.stderr, flush=True)
        status = exit_status(error)
    # A script ends with all ranks, in `atexit`; a server is no rank.
    if name != "serve" and (status or name not in ("run", "replay")):
        write_status(status)
    return status


def train(argv: Sequence[str]) -> int:
    """Train a model on all ranks that mpirun started; the default command."""
    _answer(argv, lambda: read_config(argv))
    from mpitrain.tools.command import train_command

    return train_command(lambda: read_config(argv), start_timeout(argv))


def sweep(argv: Sequence[str]) -> int:
    """Search hyperparameters: train many models in one job."""
    from mpitrain.plugins import require
    from mpitrain.tools.sweep.config import INSTALL, read_sweep

    words, flags = _split(argv)
    if words[:1] == ["--best"]:
        require("optuna", "sweep", INSTALL)
        from mpitrain.tools.sweep.study import best_command

        print(best_command(words[1:]), flush=True)
        return 0
    _answer(words, lambda: read_sweep(words))
    from mpitrain.tools.command import sweep_command

    return sweep_command(words, flags, start_timeout(flags))


def serve(argv: Sequence[str]) -> NoReturn:
    """Import torch once: ranks that mpirun starts on this machine are forks."""
    from mpitrain.launch.process_exit import exit_now
    from mpitrain.warm.fork_server import ServeConfig, serve

    serve(_read(ServeConfig, "serve", argv))
    exit_now(main(sys.argv[1:]))  # in a fork: a rank, which has words of its own


def hostfile(argv: Sequence[str]) -> None:
    """Write a host file for mpirun from the nodes of a SLURM or PBS job."""
    from mpitrain.tools.jobs import hostfile

    words, mpirun = _split(argv)
    config = _read(hostfile.HostfileConfig, "hostfile", words)
    _write(hostfile.text_of(config, os.environ, mpirun), config.output)


def jobscript(argv: Sequence[str]) -> None:
    """Print a job script for SLURM or PBS."""
    from mpitrain.tools.jobs import jobscript

    typed, words = _split(argv)
    flags = jobscript.with_site(typed)
    config = _read(jobscript.JobscriptConfig, "jobscript", flags)
    if config.show and config.site is not None:
        _write(jobscript.site_file(config.site).read_text(), config.output)
        return
    if config.site is not None and config.account is None:
        text = f"no --account: {config.site} may refuse the job, or take a default"
        print(f"warning: {text}", file=sys.stderr, flush=True)
    command = words[0] if words and words[0] in COMMANDS else "train"
    words = words[words[:1] == [command] :]
    # That of a site's file is for its trainings.
    is_warm = config.warm and "--warm" in {it.partition("=")[0] for it in typed}
    if is_warm and config.jobs == 1 and not jobscript.restarts_of(config, command):
        raise UsageError(
            f"--warm: {command!r} is started once; expected --restarts of at least 1 "
            "beside it"
        )
    # A mistake need not queue first.
    if command == "train" and _is_script(words):
        raise UsageError(f"found a script after --. Type: -- run {shlex.join(words)}")
    if (config.jobs > 1 and command == "run") != (config.run_dir is not None):
        raise UsageError(
            f"found --jobs {config.jobs}, --run-dir {config.run_dir} and {command!r}: "
            "the jobs of a script (`run`) resume --run-dir, such as runs/mine; those "
            "of a training or a sweep resume --name. Expected one of the two"
        )
    if command == "run":
        from mpitrain.launch.run_target import read_script, read_words

        target = read_words(words).target
        if target.kind == "script" and config.container is None:
            read_script(target.name)
    elif config.jobs > 1:
        if command not in ("train", "sweep"):
            raise UsageError(
                f"--jobs {config.jobs}: found {command!r} after --; a chain of jobs "
                "resumes a training, a sweep or a script: expected the flags of one"
            )
        _folder_of([command, "--name", config.name, *words])
    elif command == "sweep":
        _folder_of([command, *words])
    elif command == "train":
        read_config(words)
    _write(jobscript.text_of(config, words, command), config.output)


def _folder_of(words: Sequence[str]) -> Path:
    """Return the folder that all jobs of a chain share: a run's, or a sweep's."""
    from mpitrain.tools.jobs import chain
    from mpitrain.tools.sweep.config import read_sweep, read_training

    if words[:1] != ["sweep"]:
        return chain.run_dir_of(read_config(words[words[:1] == ["train"] :]))
    sweep_words, flags = _split(words[1:])
    config = read_sweep(sweep_words)
    read_training(config, flags)
    return config.path


def new(argv: Sequence[str]) -> None:
    """Write a small project that trains, to begin with."""
    from mpitrain.tools.new.new import NewConfig, new

    print(new(_read(NewConfig, "new", argv)), flush=True)


def watch(argv: Sequence[str]) -> None:
    """Follow the progress of a run from another shell."""
    from mpitrain.tools import watch

    config = _read(watch.WatchConfig, "watch", argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `watch ... | head` ends in silence
    with contextlib.suppress(KeyboardInterrupt):
        watch.watch(config)


def supervise(argv: Sequence[str]) -> int:
    """Used by job scripts: run mpirun, stop it in time, and restart it."""
    from mpitrain.tools.jobs import supervisor

    words, command = _split(argv)
    config = _read(supervisor.SuperviseConfig, "supervise", words)
    return supervisor.supervise(config, command, os.environ, _folder_of)


def fetch(argv: Sequence[str]) -> None:
    """Download data sets and pretrained weights."""
    from mpitrain.tools import fetch

    fetch.fetch(_read(fetch.FetchConfig, "fetch", argv))


def export(argv: Sequence[str]) -> None:
    """Export the model of a run to one file."""
    from mpitrain.tools import export

    print(export.export(_read(export.ExportConfig, "export", argv)), flush=True)


def diff(argv: Sequence[str]) -> int:
    """Find the first step and tensor in which two runs differ."""
    from mpitrain.tools import diff

    words, more = _split(argv)
    config = _read(diff.DiffConfig, "diff", words)
    lines, differs, steps = diff.diff(config)
    print("\n".join(lines), flush=True)
    if config.replay:
        print(diff.replay(config, steps, more), flush=True)
    return int(differs)


def replay(argv: Sequence[str]) -> int:
    """Compute a step of a run again, and look into it."""
    from mpitrain.tools.replay.config import ReplayConfig

    words, more = _split(argv)
    read = functools.partial(_read, ReplayConfig, "replay", words)
    _answer(words, read)
    from mpitrain.tools.replay.replay import run_replay

    return run_replay(read, more, start_timeout(more))


def report(argv: Sequence[str]) -> None:
    """Make an HTML report of a run."""
    from mpitrain.tools.report.report import ReportConfig, report

    print(report(_read(ReportConfig, "report", argv)), flush=True)


def run(argv: Sequence[str]) -> None:
    """Run your own script, with the environment variables that torchrun sets."""
    from mpitrain.launch import run_script
    from mpitrain.launch.job import start_job
    from mpitrain.launch.run_target import read_on_all_ranks, read_words, split

    flags = split(argv)[0]
    _answer(flags, lambda: read_words(argv))
    job = start_job(start_timeout_seconds=start_timeout(flags))
    with job.guard:
        with job.start_step("read the command line"):
            asked = read_on_all_ranks(job.comm, argv)
        run_script.run(job, asked, os.environ)


def stage(argv: Sequence[str]) -> int:
    """Copy Python and torch to each node by MPI, then run a command from there."""
    from mpitrain.launch.job import start_job
    from mpitrain.stage.stage import read_command, read_words, run

    words, command = _split(argv)
    read = functools.partial(read_words, words, command)
    _answer(words, read)
    job = start_job(start_timeout_seconds=start_timeout(words_for_start(command)))
    with job.guard:
        config, first = on_rank_zero(job.comm, read, "read the command line")
        target = all_or_none(
            job.comm, lambda: read_command(command, first), "read the command line"
        )
    return run(job, config, target, main, is_unbuffered=command[1:2] == ["-u"])


def check(argv: Sequence[str]) -> int:
    """Check ranks, network and collectives under mpirun, or this machine without."""
    from mpitrain.tools.check import CheckConfig

    read = functools.partial(_read, CheckConfig, "check", argv)
    if not is_one_of_several(os.environ):
        from mpitrain.tools.check import login

        return login.check_login_node(read(), os.environ)

    from mpitrain.launch.job import start_job
    from mpitrain.tools.check.job import check_job

    job = start_job(start_timeout_seconds=start_timeout(argv), may_spawn=False)
    with job.guard:
        config = on_rank_zero(job.comm, read, "read the command line")
        return check_job(job, config, os.environ)


# Commands by name; the docstring of each is its line in the help.
COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    command.__name__: command
    for command in (
        *(train, run, sweep, new, stage, check, watch, fetch, export, report, diff),
        *(replay, serve, supervise, hostfile, jobscript),
    )
}


def _read(kind: type[Config], command: str, words: Sequence[str]) -> Config:
    return read_flags(kind, words, program=f"{PROGRAM} {command}", files=False)


def _answer(words: Sequence[str], read: Callable[[], object]) -> None:
    """Answer what is asked by flags; on rank zero, and without MPI."""
    if HELP_FLAGS & set(words):
        if not was_launched(os.environ) or launched_rank(os.environ) == 0:
            read()
        raise HelpShown


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _write(text: str, file: Path | None) -> None:
    from mpitrain.files import write_atomic

    if file is None:
        print(text, end="", flush=True)
        return
    try:
        # The file is replaced, which must never happen to /dev/null.
        if file.exists() and not file.is_file():
            raise UsageError(f"--output {file} is no file; expected the name of one")
        write_atomic(file, text)
    except OSError as error:
        reason = error.strerror
        raise UsageError(f"--output {file} cannot be written: {reason}") from None


def _is_script(words: Sequence[str]) -> bool:
    return bool(words) and (words[0] == "-m" or Path(words[0]).suffix == ".py")


def read_config(argv: Sequence[str]) -> TrainConfig:
    """Read a training's flags."""
    if _is_script(argv):
        raise UsageError(f"found a script. Type: {PROGRAM} run {shlex.join(argv)}")
    if argv and not argv[0].startswith("-"):
        raise UsageError(
            f"unknown command {argv[0]!r}.{did_you_mean(argv[0], COMMANDS)} Expected "
            f"one of {', '.join(COMMANDS)}, or flags (see --help)"
        )
    commands = [f"  {name:<11} {run.__doc__}" for name, run in COMMANDS.items()]
    more = "\n".join(["Commands:", *commands, ""])
    from mpitrain.tools.train import prepare

    return prepare.read_config(argv, only_common=True, further=more)


def start_timeout(argv: Sequence[str]) -> float:
    """Return the seconds for a stage of the start, before all flags are read.

    Also those of files that ``--config`` names. A value that cannot be read counts as
    none; the error follows with the other flags.

    >>> start_timeout(["--start-timeout", "30"]), start_timeout(["--lr=1"])
    (30.0, 600.0)
    >>> start_timeout(["--hang_timeout=8"]), start_timeout(["--start-timeout", "none"])
    (120.0, 600.0)
    """
    found: dict[str, float] = {}
    typed = _values_of(argv)
    words = [it for it in typed if it[0] != "--config"]  # they win, so last
    for _, file in reversed([it for it in typed if it[0] == "--config"]):
        # RecursionError: of a file with too many levels.
        with contextlib.suppress(UsageError, RecursionError):
            of_file = read_flag_file(Path(file), "lr: 0.1", as_words=True)
            flags = words_of({str(k): v for k, v in of_file.items()})
            words = [*_values_of(flags), *words]
    for flag, word in words:
        with contextlib.suppress(ValueError):
            if 0 < (seconds := float(word)) < math.inf:
                found[flag] = seconds
    hang, start = found.get("--hang-timeout"), found.get("--start-timeout")
    return default_start_timeout(hang, start)


def _values_of(argv: Sequence[str]) -> list[tuple[str, str]]:
    """Return the flags that concern the start of MPI, with their values."""
    found = []
    for at, word in enumerate(argv):
        name, has_value, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in ("--config", "--start-timeout", "--hang-timeout"):
            if has_value:
                found.append((flag, value))
            elif at + 1 < len(argv):
                found.append((flag, argv[at + 1]))
    return found


def words_for_start(command: Sequence[str]) -> Sequence[str]:
    """Return the flags of mpitrain in a command that `stage` runs.

    >>> words_for_start(["python", "-m", "mpitrain", "--start-timeout", "9"])
    ['--start-timeout', '9']
    >>> words_for_start(["python", "train.py", "--start-timeout", "9"])
    []
    """
    from mpitrain.launch.run_target import split

    target = split(command[1:])[1]
    if target is None or (target.kind, target.name) != ("module", "mpitrain"):
        return []
    words = list(target.args)
    return split(words[1:])[0] if words[:1] == ["run"] else words

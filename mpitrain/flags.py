"""From flags, and YAML files of the same names, to a configuration."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpitrain._version import __version__
from mpitrain.errors import MpitrainError, UsageError, did_you_mean
from mpitrain.help import flags_of, help_text

PROGRAM = "python -m mpitrain"

# Flags that are answered instead of running the command.
HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--version"})

Config = TypeVar("Config")

# Flags of other trainers, and what they are here.
SYNONYMS = {
    **dict.fromkeys(("learning-rate", "base-lr"), "lr"),
    **dict.fromkeys(("batch-size", "batch", "train-batch-size"), "global-batch-size"),
    **dict.fromkeys(("num-epochs", "max-epochs", "num-train-epochs"), "epochs"),
    **dict.fromkeys(("workers", "num-data-workers"), "num-workers"),
    **dict.fromkeys(("max-grad-norm", "gradient-clip-val"), "clip-grad-norm"),
    **dict.fromkeys(("output-dir", "out-dir", "save-dir"), "runs-dir"),
    **dict.fromkeys(("dataset", "data-set"), "data"),
    **dict.fromkeys(("data-path", "data-root"), "data-dir"),
    **dict.fromkeys(("arch", "model-name"), "model"),
    **dict.fromkeys(("opt", "optim"), "optimizer"),
    **dict.fromkeys(("lr-scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("wd", "l2"), "weight-decay"),
    "mpi": "launcher",
    "nproc-per-node": "slots-per-node",
}


TORCHRUN = re.compile("--(nproc|nnodes|node-rank|standalone|rdzv|master-|max-restarts)")


class HelpShown(MpitrainError):
    """Help or the version was asked for, and is printed."""

    exit_status = 0


def read_flags(
    kind: type[Config],
    words: Sequence[str],
    *,
    program: str,
    further: str = "",
    files: bool = True,
    common: Collection[str] | None = None,
) -> Config:
    """Read flags, and the YAML files that they may name, into a configuration.

    Fields of `kind` are flags; a field that is a dataclass itself is a group of flags.
    Flags win over the files of ``--config``, which `files` allows. ``--help`` shows the
    flags in `common`, else all, and then the text `further`.
    """
    if "--version" in words:
        print(f"mpitrain {__version__}")
        raise HelpShown

    if HELP_FLAGS & set(words):
        only = None if "--help-all" in words else common
        config_file = "--config FILE.yaml reads flags from a file; flags win over it."
        show_all = "--help-all shows all flags." * bool(only)
        lines = "\n".join(filter(None, [further, config_file * files, show_all]))
        _answer(help_text(kind, program=program, epilog=lines, only=only))
        raise HelpShown

    if not files:
        return _parse(kind, words, None, program)
    before = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    before.add_argument("--config", type=Path, action="append", default=[])
    try:
        with usage_errors():
            given, left = before.parse_known_args(list(words))
    except UsageError:
        raise UsageError("--config: found no value, expected a YAML file.") from None
    flags: list[str] = []
    for file in given.config:
        from_file = flags_from_yaml(file, kind)
        _parse(kind, from_file, f"--config {file}", program)  # an error names it
        flags += from_file
    return _parse(kind, flags + left, None, program)


def _parse(
    kind: type[Config], flags: Sequence[str], source: str | None, program: str
) -> Config:
    """Parse with tyro; `source` says where the flags come from, for messages."""
    import tyro

    # W&B's agent writes --random_flip=True, which no other flag has as a value.
    flags = [re.sub(r"--(\S+)=True", r"--\1", word) for word in flags]
    flags = [re.sub(r"--(\S+)=False", r"--no-\1", word) for word in flags]
    try:
        with usage_errors():
            merged = (tyro.conf.OmitArgPrefixes,)
            return tyro.cli(kind, prog=program, args=flags, config=merged)
    except UsageError as error:
        where = f"{source}: " if source else ""
        known = [flag.name.partition(",")[0] for flag in flags_of(kind)]
        said = one_line(str(error), flags, known, program)
        raise UsageError(where + said) from None


def one_line(box: str, flags: Sequence[str], known: Sequence[str], program: str) -> str:
    """Say in one line what tyro says in a box.

    >>> one_line("invalid choice 'adamm' for argument '--optimizer'. Expected one of "
    ...     "('sgd', 'adam').", ["--optimizer", "adamm"], ["--optimizer"], "")
    "--optimizer: found 'adamm', expected sgd or adam. Did you mean 'adam'?"
    """
    parts = re.split(r"^ *-+ *$", box, flags=re.MULTILINE)
    said = " ".join(parts[min(1, len(parts) - 1)].split())
    if "Unrecognized options" in box:
        for word in flags:
            flag = word.partition("=")[0].replace("_", "-")
            if flag.startswith("--") and flag.replace("--no-", "--") not in known:
                if TORCHRUN.match(flag) and flag not in known:
                    how = f"mpirun -np N {program} ..., without torchrun's flags"
                    return f"unknown flag {flag}: mpirun starts the ranks. Type: {how}"
                same = "--" + SYNONYMS.get(flag[2:], "")
                meant = did_you_mean(same if same in known else flag, known)
                return f"unknown flag {flag}.{meant} All flags: {program} --help-all"
        word = said.split()[2]
        at = flags.index(word) if word in flags else 0
        if re.fullmatch("-[a-zA-Z]", word):
            how = "options of Python stand before -m mpitrain, code of -c in a script"
            return f"unexpected {word!r}: {how}"
        after = f" after {' '.join(flags[max(0, at - 2) : at])!r}" if at else ""
        return f"unexpected {word!r}{after}. All flags: {program} --help-all"
    if said.startswith("Missing from"):
        missing = re.findall(r"^ {6}(\S.*?) *$", parts[1], re.MULTILINE)
        return f"expected {' and '.join(missing)}. See {program} --help"
    if found := re.match(r"invalid choice '(.*)' for argument '(.+?)'.*\((.*)\)", said):
        return _expected(found[2], found[1], re.findall("'(.*?)'", found[3]))
    if found := re.match(r"Missing value for argument '(.+?)'", said):
        return f"{found[1]}: found no value, expected one."
    value = re.search(r"from \['(.*?)'|: '(.*?)'$", said)
    kinds = re.search(r"^ *(--[\w-]+) (\S+) *$", "".join(parts[2:]), re.MULTILINE)
    if value and kinds:
        choices = kinds[2].replace("{None}|", "")
        for old, new in (("INT", "a whole number"), ("FLOAT", "a number")):
            choices = choices.replace(old, new)
        words = re.split(r"[|,]", re.sub("[{}]", "", choices))
        return _expected(kinds[1], value[1] or value[2], words)
    return re.sub(r"^Error parsing \w+: ", "", said)


def _expected(flag: str, word: str, choices: Sequence[str]) -> str:
    *others, last = choices
    either = f"{', '.join(others)} or {last}" if others else last
    return f"{flag}: found {word!r}, expected {either}.{did_you_mean(word, choices)}"


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested groups, as on the command line, with values for YAML and JSON.

    >>> flat({"lr": 0.1, "log": ("csv",), "launch": {"device": "cpu"}})
    {'lr': 0.1, 'log': ['csv'], 'device': 'cpu'}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value)
        elif isinstance(value, tuple):
            found[name] = list(value)
        else:
            found[name] = str(value) if isinstance(value, Path) else value
    return found


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what a parser prints before `SystemExit` into a UsageError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    except SystemExit:
        # Without colours: a rank's stdout is a terminal even in a batch job.
        text = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
        raise UsageError(text.rstrip()) from None


def _answer(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; Python's end must not write there, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flags_from_yaml(file: Path, kind: Any) -> list[str]:
    """Turn a YAML file, such as a run's ``config.yaml``, into flags of a `kind`."""
    values = read_yaml(file, f"--config {file}", "lr: 0.1")
    simple = {str, int, float}  # types of what a flag can have
    lists = [flag.name for flag in flags_of(kind) if isinstance(flag.default, tuple)]
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, str | int | float) or value is None:
            flags += [flag, str(value)]
        elif flag in lists and type(value) is list and {*map(type, value)} <= simple:
            flags += [flag, *map(str, value)]
        else:
            raise UsageError(
                f"--config {file}: {name} is a {type(value).__name__}; "
                "expected a number, a word, true, false or null"
            )
    return flags


def read_yaml(
    file: Path, where: str, example: str, *, as_words: bool = False
) -> dict[Any, Any]:
    """Read a YAML file of names and values; a UsageError begins with `where`.

    With `as_words` values are words as they stand: YAML takes 2:00:00 for a number.
    """
    import yaml

    try:
        loader = yaml.BaseLoader if as_words else yaml.SafeLoader
        values = yaml.load(file.read_text(), loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{where}: cannot be read: {reason}") from None
    if not isinstance(values, dict):
        found = type(values).__name__
        raise UsageError(f"{where}: expected lines like `{example}`, found {found}")
    return values

"""From flags, and YAML files of the same names, to a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from mpitrain._version import __version__
from mpitrain.console import HELP_FLAGS
from mpitrain.errors import MpitrainError, UsageError, did_you_mean, usage_errors_in
from mpitrain.help import help_text
from mpitrain.settings import (
    Flag,
    check_values,
    flag_name,
    flags_of,
    setting,
    wrong_value,
)

PROGRAM = "python -m mpitrain"

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


@dataclass(frozen=True, kw_only=True)
class ConfigFiles:
    """Files of flags."""

    config: tuple[Path, ...] = setting((), is_repeatable=True)
    """A YAML file of flags; flags win over it."""


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
    only_common: bool = False,
    defaults: Config | None = None,
    of_task: Sequence[Flag] = (),
) -> Config:
    """Read flags, and the YAML files that they may name, into a configuration.

    Fields of `kind` are flags; a field that is a dataclass itself is a group of flags.
    Flags win over the files of ``--config``, which `files` allows, and these over
    ``defaults``. The values of the flags ``of_task`` are in the field `task_arguments`.
    ``--help`` shows all flags, or the common ones only, and then the text `further`.
    """
    if "--version" in words:
        print(f"mpitrain {__version__}")
        raise HelpShown

    if HELP_FLAGS & set(words):
        only_common = only_common and "--help-all" not in words
        config_file = "--config FILE.yaml reads flags from a file; flags win over it."
        show_all = "--help-all shows all flags." * only_common
        lines = "\n".join(filter(None, [further, config_file * files, show_all]))
        _answer(
            help_text(
                defaults or kind,
                program=program,
                epilog=lines,
                only_common=only_common,
                others=of_task,
            )
        )
        raise HelpShown

    flags = [*flags_of(defaults or kind), *of_task]
    of_files = flags_of(ConfigFiles) if files else ()
    values = _parse([*flags, *of_files], words, program)
    from_files: dict[str, Any] = {}
    for file in values.pop("config", ()):
        with usage_errors_in(f"--config {file}"):
            found = _parse(flags, words_of(_read_config_file(file, flags)), program)
            _build(kind, found)
        from_files |= found
    required = [flag for flag in flags if flag.default is MISSING]
    if missing := [flag.values for flag in required if flag.field not in values]:
        raise UsageError(f"expected {' and '.join(missing)}. See {program} --help")
    values = from_files | values
    if of_task:
        values["task_arguments"] = tuple(
            (it.field, values.get(it.field, it.default)) for it in of_task
        )
    return _build(kind, values, defaults)


def _build(
    kind: type[Config], values: Mapping[str, Any], defaults: Config | None = None
) -> Config:
    """Make a configuration, and the groups nested in it."""
    check_values(kind, values)  # first: each field alone, then all of them together
    own: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.default_factory is not MISSING:
            group = getattr(defaults, field.name, None) or field.default_factory()
            names = values.keys() & vars(group).keys()
            changed = {name: values[name] for name in names}
            own[field.name] = dataclasses.replace(group, **changed)
        elif field.name in values:
            own[field.name] = values[field.name]
    if defaults is None:
        return kind(**own)
    return dataclasses.replace(defaults, **own)  # type: ignore[type-var]


def _parse(flags: Sequence[Flag], words: Sequence[str], program: str) -> dict[str, Any]:
    """Return the values of the fields that `words` name; the last one wins."""
    by_name = {flag.name: flag for flag in flags if flag.name}
    positional = (flag for flag in flags if not flag.name)
    values: dict[str, Any] = {}
    rest = list(words)
    if rest[-1:] == ["--"]:  # as before the words of nothing, in a job script
        rest.pop()
    while rest:
        after = words[max(0, len(words) - len(rest) - 2) : len(words) - len(rest)]
        word = rest.pop(0)
        name, is_joined, value = word.partition("=")
        name, given = name.replace("_", "-"), [value] if is_joined else []
        is_on = name in by_name
        if _is_value(word):
            flag, given = next(positional, None), [word]
            if flag is None:
                raise _unexpected(word, after, program)
        else:
            # `--no-` is for switches; a flag's own name may begin so.
            flag = by_name.get(name if is_on else name.replace("--no-", "--", 1))
            if flag is None or not (is_on or flag.hint is bool):
                raise _unknown(word, name, by_name, program)
        if flag.hint is bool:
            # W&B's agent writes --tf32=True, a site's file `warm: true`.
            if is_joined and value.lower() not in ("true", "false"):
                raise UsageError(f"{name}: found {value!r}, expected true or false.")
            values[flag.field] = is_on == (value.lower() != "false")
            continue
        is_tuple = get_origin(flag.hint) is tuple
        takes_many = is_tuple and not flag.facts.is_repeatable
        while rest and _is_value(rest[0]) and (takes_many or not given):
            given.append(rest.pop(0))
        if not given and not takes_many:
            expected = "a YAML file" if flag.group is ConfigFiles else "one"
            raise UsageError(f"{name}: found no value, expected {expected}.")
        read = tuple(_read(flag, word) for word in given)
        before = () if takes_many else values.get(flag.field, ())
        values[flag.field] = (*before, *read) if is_tuple else read[0]
    return values


def _is_value(word: str) -> bool:
    """Whether a word is no flag; a number may be negative."""
    return re.match(r"-(?!\d|\.|inf$|nan$).", word) is None


def _read(flag: Flag, word: str) -> Any:
    """Read one value of a flag.

    >>> from mpitrain.config import TrainConfig
    >>> (flag,) = (it for it in flags_of(TrainConfig) if it.field == "optimizer")
    >>> _read(flag, "adamm")
    Traceback (most recent call last):
    mpitrain.errors.UsageError: --optimizer: found 'adamm', ... Did you mean 'adam'?
    """
    try:
        return _convert(flag.hint, word)
    except ValueError:
        raise wrong_value(flag.name or flag.field, flag.values, word) from None


def _convert(hint: Any, word: str) -> Any:
    """Read a word as a value of a type, or of a tuple's items; else a ValueError."""
    kinds = get_args(hint)
    if not kinds:
        return hint(word)
    if get_origin(hint) is Literal:
        return kinds[[*map(str, kinds)].index(word)]
    if word == "None" and NoneType in kinds:
        return None
    for kind in kinds:
        if kind not in (NoneType, Ellipsis):
            with contextlib.suppress(ValueError):
                return _convert(kind, word)
    raise ValueError


def _unknown(word: str, flag: str, known: Collection[str], program: str) -> UsageError:
    """Return the error of a flag that there is not."""
    if not flag.startswith("--"):
        how = "options of Python stand before -m mpitrain, code of -c in a script"
        return UsageError(f"unexpected {word!r}: {how}")
    if TORCHRUN.match(flag):
        how = f"mpirun -np N {program} ..., without torchrun's flags"
        return UsageError(f"unknown flag {flag}: mpirun starts the ranks. Type: {how}")
    same = "--" + SYNONYMS.get(flag[2:], "")
    meant = did_you_mean(same if same in known else flag, known)
    return UsageError(f"unknown flag {flag}.{meant} All flags: {program} --help-all")


def _unexpected(word: str, after: Sequence[str], program: str) -> UsageError:
    place = f" after {' '.join(after)!r}" if after else ""
    return UsageError(f"unexpected {word!r}{place}. All flags: {program} --help-all")


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return values as flags.

    >>> words_of({"lr": 0.1, "random_flip": True, "clip_grad_norm": None})
    ['--lr', '0.1', '--random-flip', '--clip-grad-norm', 'None']
    """
    words: list[str] = []
    for name, value in values.items():
        flag = flag_name(name)
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def _answer(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`; Python's end must not write there, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_config_file(file: Path, flags: Sequence[Flag]) -> dict[str, Any]:
    """Read values of flags, such as a run's ``config.yaml``."""
    from yaml.constructor import SafeConstructor

    lists = [flag.field for flag in flags if get_origin(flag.hint) is tuple]
    switches = [flag.field for flag in flags if flag.hint is bool]
    found = read_flag_file(file, "lr: 0.1", as_words=True)
    values = {str(name): value for name, value in found.items()}
    for name, value in values.items():
        field = name.replace("-", "_")
        for it in value if isinstance(value, list) and field in lists else [value]:
            if not (it is None or isinstance(it, str)):  # YAML has mappings
                raise UsageError(
                    f"{name} is a {type(it).__name__}; "
                    "expected a number, a word, true, false or null"
                )
        if field in switches and value is not None:
            values[name] = SafeConstructor.bool_values.get(value.lower(), value)
    return values


_NULL = "tag:yaml.org,2002:null"


def read_flag_file(
    file: Path, example: str, *, as_words: bool = False
) -> dict[Any, Any]:
    """Read a YAML file of names and values, or raise a UsageError.

    With `as_words` names and values are words as they stand, or ``None`` for null: YAML
    takes 2:00:00 and 2026_11_30 for numbers, 010 for 8, and off for false.
    """
    import yaml

    class Words(yaml.BaseLoader):
        pass

    null = re.compile(r"(~|null|Null|NULL|)$")
    Words.add_implicit_resolver(_NULL, null, [*"~nN", ""])  # by first letters
    Words.add_constructor(_NULL, lambda *_: None)
    try:
        values = yaml.load(file.read_text(), Words if as_words else yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot be read: {reason}") from None
    if not isinstance(values, dict):
        found = type(values).__name__
        raise UsageError(f"expected lines like `{example}`, found {found}")
    return values

"""What ``run`` is to run: the words of the command line, and what they name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Literal

from mpitrain.config import LaunchConfig
from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, QUESTIONS, read_flags

USAGE = f"""\
  {PROGRAM} run [FLAGS] SCRIPT.py [ARGS]
  {PROGRAM} run [FLAGS] -m PACKAGE.MODULE [ARGS]
  {PROGRAM} run [FLAGS] --no-python PROGRAM [ARGS]"""

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run. Equal on all ranks."""

    kind: Kind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asks for. Equal on all ranks."""

    config: LaunchConfig
    target: Target
    run_id: str
    """A name of this start: rank zero's ``TORCHELASTIC_RUN_ID``, or a new UUID."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(LaunchConfig):
    """Run a script of your own, with all that torchrun would set."""


def split(words: Sequence[str]) -> tuple[list[str], Target | None]:
    """Split the words after ``run`` into its flags and the target with its own words.

    >>> split(["--device", "cpu", "train.py", "--device", "x"])[0]
    ['--device', 'cpu']
    """
    with_value = {"--config"} | {
        "--" + field.name.replace("_", "-")
        for field in fields(RunConfig)
        if field.type != "bool"
    }
    flags: list[str] = []
    kind: Kind = "script"
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "-m":
            kind = "module"
            break
        if word == "--":
            break
        if word == "--no-python":
            kind = "program"
            continue
        flags.append(word)
        if word.replace("_", "-") in with_value and rest:
            flags.append(rest.pop(0))
    if not rest:
        return flags, None
    return flags, Target(kind=kind, name=rest[0], args=tuple(rest[1:]))


def asks_only(words: Sequence[str]) -> bool:
    """Whether ``run`` is asked for help or the version, and not its script."""
    return bool(QUESTIONS & set(split(words)[0]))


def read_words(words: Sequence[str]) -> RunRequest:
    """Read the words after ``run``."""
    flags, target = split(words)
    config = read_flags(
        RunConfig, flags, program=f"{PROGRAM} run", further=f"Usage:\n{USAGE}\n"
    )
    if target is None:
        raise UsageError(f"nothing to run is named; expected one of\n{USAGE}")
    if target.kind == "program" and config.hang_timeout is not None:
        raise UsageError(
            "--hang-timeout counts the optimizer steps of a script; those of a program "
            "(--no-python) cannot be seen. Leave one of them out"
        )
    run_id = os.environ.get("TORCHELASTIC_RUN_ID") or str(uuid.uuid4())
    return RunRequest(config=config, target=target, run_id=run_id)


def read_script(name: str) -> tuple[ModuleType, CodeType]:
    """Read a script as Python would; of a folder or archive its ``__main__.py``."""
    path = str(Path(name).absolute())
    spec = PathFinder.find_spec("__main__", [path])
    if spec is not None and (found := _code_of(spec, name)) is not None:
        return _main(spec), found
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{name!r} cannot be read as a script: {error.strerror}; looked for "
            f"{path}. Expected one of\n{USAGE}"
        ) from None
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{name!r} is no Python:\n{_syntax_error(error)}\n"
            f"A program of another kind: {PROGRAM} run --no-python {name}"
        ) from None
    main = ModuleType("__main__")
    main.__file__ = path
    # Processes that multiprocessing spawns load the script again from its file.
    main.__loader__ = SourceFileLoader("__main__", path)
    return main, code


def find_module(name: str) -> tuple[ModuleType, CodeType]:
    """Find a module, or the ``__main__`` of a package, as ``python -m`` would."""
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    code = _code_of(spec, f"-m {name}")
    if spec is None or code is None:
        raise UsageError(
            f"-m {name}: there is no such module of Python to run; expected one that "
            f"can be imported from {os.getcwd()} or PYTHONPATH, and a package to have "
            "a __main__.py"
        )
    return _main(spec), code


def _code_of(spec: ModuleSpec | None, words: str) -> CodeType | None:
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return None
    try:
        return spec.loader.get_code(spec.name)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{words} is no Python:\n{_syntax_error(error)}") from None


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # their package is there; one that it imports is not
        return None
    except ValueError:  # a module without spec
        return None


def _main(spec: ModuleSpec) -> ModuleType:
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    return main


def _syntax_error(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).rstrip()


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Find a program as a shell would."""
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        raise UsageError(
            f"--no-python {name}: expected a program on PATH, or the path of a file "
            f"that can be executed (chmod +x), from {os.getcwd()}"
        )
    return path

"""What ``run`` is to run: the words of the command line, and what they name."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from mpitrain.config import LaunchConfig
from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.mpi.collectives import all_or_none, on_rank_zero
from mpitrain.settings import flag_name

if TYPE_CHECKING:
    from mpi4py import MPI

USAGE = f"""\
  {PROGRAM} run [FLAGS] SCRIPT.py [ARGS]
  {PROGRAM} run [FLAGS] -m PACKAGE.MODULE [ARGS]
  {PROGRAM} run [FLAGS] --no-python PROGRAM [ARGS]"""

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run: a script's path, a module's name or a program, and its arguments."""

    kind: Kind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asks for. Equal on all ranks, except for the target."""

    config: LaunchConfig
    target: Target
    run_id: str  # rank zero's ``TORCHELASTIC_RUN_ID``, or a new UUID


@dataclass(frozen=True, kw_only=True)
class RunConfig(LaunchConfig):
    """Run a script of your own, with all that torchrun would set."""


def split(words: Sequence[str]) -> tuple[list[str], Target | None]:
    """Split the words after ``run`` into its flags and the target with its arguments.

    >>> split(["-m", "package.module", "-v"])[1]
    Target(kind='module', name='package.module', args=('-v',))
    """
    with_value = {"--config"} | {
        flag_name(field.name) for field in fields(RunConfig) if field.type != "bool"
    }
    flags: list[str] = []
    kind: Kind = "script"
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word in ("-m", "--module"):
            kind = "module"
            break
        if word.startswith("-m"):  # as in python -mpackage.module
            kind, rest = "module", [word[2:], *rest]
            break
        if word == "--":
            break
        if word in ("--no-python", "--no_python"):
            kind = "program"
            continue
        flags.append(word)
        if word.replace("_", "-") in with_value and rest:
            flags.append(rest.pop(0))
    if not rest:
        return flags, None
    return flags, Target(kind=kind, name=rest[0], args=tuple(rest[1:]))


def read_on_all_ranks(comm: MPI.Intracomm, words: Sequence[str]) -> RunRequest:
    """Read each rank's own words after ``run``; they may differ. Collective over comm.

    Other flags than rank zero's are read, too, so that the start compares them.
    """
    mine = split(words)[0]
    flags, request = on_rank_zero(
        comm, lambda: (mine, read_words(words)), "read the command line"
    )
    known = request.config if mine == flags else None
    own = all_or_none(comm, lambda: read_words(words, known), "read the command line")
    return replace(own, run_id=request.run_id)


def read_words(words: Sequence[str], config: LaunchConfig | None = None) -> RunRequest:
    """Read the words after ``run``; ``config`` is what is known of the flags."""
    flags, target = split(words)
    config = config or read_flags(
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
    try:
        if spec is not None and isinstance(spec.loader, InspectLoader):
            code = spec.loader.get_code("__main__")
            if code is not None:
                return _new_main(spec), code
        # dont_inherit: this module's `annotations` would be the script's, too.
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(
            f"{name!r} cannot be read as a script: {error.strerror}; looked for "
            f"{path}. Expected one of\n{USAGE}"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{_syntax_error(repr(name), error)}\n"
            f"A program of another kind: {PROGRAM} run --no-python {name}"
        ) from None
    main = ModuleType("__main__")
    main.__file__ = path
    # Processes that multiprocessing spawns load the script again from its file.
    main.__loader__ = SourceFileLoader("__main__", path)
    return main, code


def find_module(name: str) -> tuple[ModuleType, CodeType]:
    """Find a module, or a package's ``__main__``, as ``python -m`` would."""
    # By what `python -m` itself calls; runpy has no public name for it.
    find: Any = runpy._get_module_details  # type: ignore[attr-defined] # noqa: SLF001
    try:
        _, spec, code = find(name, ModuleCannotRun)
    except ModuleCannotRun as error:
        raise UsageError(
            f"-m {name}: there is no such module of Python to run ({error}); expected "
            f"one that can be imported from {os.getcwd()} or PYTHONPATH, and a package "
            "to have a __main__.py"
        ) from None
    except SyntaxError as error:
        raise UsageError(_syntax_error(f"-m {name}", error)) from None
    return _new_main(spec), code


class ModuleCannotRun(Exception):
    """What `runpy` raises where there is nothing to run."""


def _new_main(spec: ModuleSpec) -> ModuleType:
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    return main


def _syntax_error(name: str, error: Exception) -> str:
    text = "".join(traceback.format_exception_only(error)).rstrip()
    return f"{name} is no Python:\n{text}"


def find_program(name: str) -> str:
    """Find a program as a shell would."""
    path = shutil.which(name)
    if path is None:
        raise UsageError(
            f"--no-python {name}: expected a program on PATH, or the path of a file "
            f"that can be executed (chmod +x), from {os.getcwd()}"
        )
    return path

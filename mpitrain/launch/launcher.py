"""The program that started this process, as ``/proc`` shows it.

mpirun tells its processes neither how it binds them nor how many it was asked to put
on a node (Open MPI 5 sets no variable for either; tried). Its own command line does,
and its affinity mask is the cores that the job was given on this host.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.launch.cores import parse_cores
from mpitrain.watchdog.process import COMMANDS, DAEMONS

_MOST_ANCESTORS = 32
_MPIRUN_VARIABLES = {"OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD"}
_BINDING_FLAGS = ("bind-to", "cpu-set", "cpu-list", "cpus-per-", "rankfile")
_BINDING_VARIABLES = (
    "hwloc_base_binding_policy",
    "hwloc_default_binding_policy",
    "hwloc_base_cpu_list",
    "hwloc_default_cpu_list",
    "rmaps_rank_file_path",
)
_MAPPING_VARIABLES = ("rmaps_base_mapping_policy", "rmaps_default_mapping_policy")
_PER_NODE_FLAGS = ("-N", "--N", "-npernode", "--npernode", "-ppn", "--ppn")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What started this process, as far as it can be seen."""

    name: str = ""
    """The program whose child or grandchild this process is; ``""``: none is seen."""
    cores: frozenset[int] = frozenset()
    """The cores that it may run on itself: what the job was given on this host."""
    words: tuple[str, ...] | None = None
    """What was typed after mpirun's name, up to the user's program; ``None``: mpirun
    runs on another host, or cannot be seen."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """mpirun's environment; empty where `words` is ``None``."""


def find_launcher(
    pid: int, environ: Mapping[str, str], proc: Path = Path("/proc")
) -> Launcher:
    """Look for the mpirun, or for its daemon, among the ancestors of a process.

    Args:
        pid: The process.
        environ: Its environment.
        proc: Where processes are shown.

    Returns:
        What was found; nothing is an answer, too: a shell without mpirun, a container
        with processes of its own.
    """
    name, cores = "", frozenset[int]()
    for _ in range(_MOST_ANCESTORS):
        try:
            pid = int(_status(proc / str(pid))["PPid"])
            found = _name(proc / str(pid))
            if found.startswith(COMMANDS + DAEMONS) and not name:
                name, cores = found, parse_cores(_status_cores(proc / str(pid)))
            if found.startswith(COMMANDS):
                typed = _strings(proc / str(pid) / "cmdline")[1:]
                shown = _strings(proc / str(pid) / "environ")
                return Launcher(
                    name=name,
                    cores=cores,
                    words=_own_words(typed, environ.get("OMPI_COMMAND")),
                    variables=dict(v.partition("=")[::2] for v in shown),
                )
        except (OSError, KeyError, ValueError):
            break  # the first process, or one that hides from us
    return Launcher(name=name, cores=cores)


def binding_asked(launcher: Launcher, environ: Mapping[str, str]) -> bool | None:
    """Tell whether somebody asked for the cores that the ranks are bound to.

    Args:
        launcher: What started this process.
        environ: This process's environment.

    Returns:
        ``True``: yes, or it is nobody's default; ``False``: mpirun was seen, and was
        asked nothing; ``None``: mpirun cannot be seen from here.

    >>> binding_asked(Launcher(name="prterun", words=("-np", "2")), {})
    False
    >>> binding_asked(Launcher(name="prterun", words=("--bind-to", "core")), {})
    True
    >>> binding_asked(Launcher(name="prted"), {}) is None
    True
    """
    if not launcher.name or launcher.name.startswith("hydra"):
        return True  # Hydra binds nobody by itself, nor does a plain shell
    if any(_asks_binding(*item) for item in environ.items()):
        return True  # Open MPI 4.1 tells its processes on every host
    if launcher.words is None:
        return None
    if any(_asks_binding(*item) for item in launcher.variables.items()):
        return True
    return any(
        word.lstrip("-").startswith(_BINDING_FLAGS)
        or word in ("-rf", "--rf", *_BINDING_VARIABLES)
        or _has_cores(word)
        for word in launcher.words
    )


def asked_per_node(launcher: Launcher, environ: Mapping[str, str]) -> int | None:
    """Tell how many processes per node were asked for, where it was said.

    Args:
        launcher: What started this process.
        environ: This process's environment.

    Returns:
        The number; ``None`` where nobody said one, or it cannot be seen from here.

    >>> asked_per_node(Launcher(words=("--map-by", "ppr:4:node:PE=8")), {})
    4
    >>> asked_per_node(Launcher(words=("-N", "2")), {})
    2
    >>> asked_per_node(Launcher(), {"SLURM_NTASKS_PER_NODE": "3"})
    3
    """
    words = launcher.words or ()
    for word, following in itertools.pairwise(words):
        if word in _PER_NODE_FLAGS and following.isdecimal():
            return int(following)
    for source in (environ, launcher.variables):
        for name, value in source.items():
            if name.endswith("_rmaps_ppr_n_pernode") and value.isdecimal():
                return int(value)
    mappings = [*words, *_mappings(environ), *_mappings(launcher.variables)]
    for mapping in mappings:
        if found := re.search(r"\bppr:(\d+):node\b", mapping, re.IGNORECASE):
            return int(found[1])
    by_mpirun = launcher.name or _MPIRUN_VARIABLES & environ.keys()
    if by_mpirun:  # then SLURM's words are those of the allocation
        return None
    given = environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(given) if given.isdecimal() else None


def _asks_binding(name: str, value: str) -> bool:
    if name == "HYDRA_USER_PROVIDED_BINDING":
        return True
    return name.endswith(_BINDING_VARIABLES) or (
        name.endswith(_MAPPING_VARIABLES) and _has_cores(value)
    )


def _has_cores(mapping: str) -> bool:
    """Whether a mapping such as ``ppr:4:node:PE=8`` says cores, too."""
    return re.search(r"\bpe(-list)?=", mapping, re.IGNORECASE) is not None


def _mappings(variables: Mapping[str, str]) -> list[str]:
    return [v for name, v in variables.items() if name.endswith(_MAPPING_VARIABLES)]


def _own_words(typed: tuple[str, ...], command: str | None) -> tuple[str, ...]:
    """Leave out the user's program and its flags, where Open MPI names it."""
    return typed[: typed.index(command)] if command in typed else typed


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (x.partition(":") for x in lines)}


def _status_cores(process: Path) -> str:
    return _status(process)["Cpus_allowed_list"]


def _name(process: Path) -> str:
    return (process / "comm").read_text().strip()


def _strings(file: Path) -> tuple[str, ...]:
    return tuple(file.read_text(errors="replace").rstrip("\0").split("\0"))

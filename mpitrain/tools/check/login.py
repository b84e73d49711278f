"""The check without mpirun, on a login node: what is known before MPI starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mpitrain import schedulers
from mpitrain.launch.consistency import old_packages, upgrade_command, version_numbers
from mpitrain.mpi.launchers import (
    INSTALL,
    LAUNCHERS,
    LIBRARIES,
    TELL_VERSION,
    by_command,
    family_of,
    version_of,
)
from mpitrain.record.environment import NOT_INSTALLED, versions
from mpitrain.schedulers.allocation import query
from mpitrain.tools.check import CheckConfig
from mpitrain.tools.check.report import Finding, Report

LIBRARY_SECONDS = 30.0  # how long the library may take to load, on a slow file system
PROGRAM_SECONDS = 10.0

# Loads the library and asks for its version without initializing it. It runs in another
# process, since a library that does not fit may abort.
LOAD_LIBRARY = """
import json
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps([MPI.Get_library_version(), sorted(files)]))
"""


class Mpi(NamedTuple):
    """An MPI, as its library or its mpirun names itself. ``""``: unknown."""

    family: str
    version: str

    def __str__(self) -> str:
        return f"{self.family or 'an unknown MPI'} {self.version}".strip()


def library_of(text: str) -> Mpi:
    r"""Read the answer of ``MPI_Get_library_version``.

    >>> str(library_of("Open MPI v5.0.11, package: Open MPI x@y Distribution"))
    'Open MPI 5.0.11'
    >>> str(library_of("MPICH Version:      5.0.2\nMPICH Release date: ..."))
    'MPICH 5.0.2'
    """
    family = family_of(text)
    found = re.match(LIBRARIES[family], text) if family else None
    return Mpi(family, found[1] if found else "")


def fits(launcher: str, answer: str, library: Mpi) -> bool | None:
    """Return whether a launcher starts ranks of a library; ``None``: unknown.

    ``answer`` is what it says to ``--version``. Versions count to the second number,
    and only within a family.
    """
    known = LAUNCHERS.get(launcher)
    if known is None or not known.libraries or not library.family:
        return None
    if not known.wants_its_version or library.family not in known.libraries:
        return library.family in known.libraries
    mine = version_numbers(version_of(launcher, answer))
    return mine[:2] == version_numbers(library.version)[:2]


class Library(NamedTuple):
    """The MPI library that mpi4py loads here: its version, its files, or an error."""

    text: str = ""
    files: tuple[str, ...] = ()
    error: str = ""


def check_login_node(config: CheckConfig, environ: Mapping[str, str]) -> int:
    """Check this machine, without starting MPI."""
    report = Report(prints=True, as_json=config.json)
    library = load_library()
    names = dict.fromkeys(it.command.split()[0] for it in LAUNCHERS.values())
    programs = {
        name: shutil.which(name, path=environ.get("PATH")) or ""
        for name in (*names, "sbatch", "qsub")
    }
    scheduler = asdict(schedulers.detect(environ))
    if scheduler["name"] == "none":  # outside of a job
        found = {"slurm": programs["sbatch"], "pbs": programs["qsub"]}
        scheduler["name"] = next(filter(found.get, found), "none")
    report.add(
        mpi_library=library._asdict(),
        **programs,
        versions=versions(),
        scheduler=scheduler,
    )
    # mpirun first; sites without it have another.
    program, answer = next(filter(None, (programs[name] for name in names)), ""), ""
    if Path(program).name in TELL_VERSION:
        words = (program, "--version")
        answer = query(*words, timeout=PROGRAM_SECONDS, with_stderr=True).strip()
    findings = [*mpi_findings(library, program, answer), *package_findings()]
    return report.finish(findings)


def load_library() -> Library:
    """Load the MPI library in another process, and read its version."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_LIBRARY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIBRARY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Library(error=f"it did not load within {LIBRARY_SECONDS:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        text, files = json.loads(lines[-1])
        # Open MPI ends its text with a zero byte.
        first = text.strip("\0 \n").splitlines()[0]
        return Library(text=" ".join(first.split()), files=tuple(files))
    if done.returncode < 0:
        return Library(error=f"loading it was ended by signal {-done.returncode}")
    last = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    return Library(error=" ".join(last).strip() or f"status {done.returncode}")


def mpi_findings(library: Library, program: str, answer: str) -> Iterator[Finding]:
    """Check that there is a library, and a launcher that belongs to it.

    `program` is its path, or ``""``, and `answer` what it says to ``--version``.
    """
    if library.error:
        text = f"mpi4py loads no MPI library: {library.error}"
        remedy = f"{INSTALL}; or name one: export MPI4PY_LIBMPI=/path/libmpi.so"
        yield Finding("error", "no-mpi-library", text, remedy)
        return
    ours, launcher = library_of(library.text), by_command(program, answer)
    beside = [Path(file).parent.parent / "bin" / "mpirun" for file in library.files]
    there = next((str(path) for path in beside if path.exists()), "")
    remedy = f"put the folder of {there or 'the mpirun of that library'} first on the "
    remedy += "PATH"
    is_right = fits(launcher, answer, ours)
    if not program:
        text = f"there is no mpirun on the PATH; mpi4py loads {ours}"
        yield Finding("error", "no-mpirun", text, f"module load the MPI, or {remedy}")
    elif is_right is None and Path(program).name == "mpirun":
        first = answer.partition("\n")[0][:60]
        text = f"{program} ({first!r}) and the library ({library.text[:60]}) cannot "
        trial = "try it: mpirun -np 2 python -m mpitrain check --quick; if that fails, "
        yield Finding("warning", "unknown-mpirun", text + "be compared", trial + remedy)
    elif is_right is None:
        text = (
            f"no mpirun on the PATH, which scripts take by default; {program} is there"
        )
        remedy = (
            f"jobscript --launcher {launcher or 'NAME'}, or --site NAME; then check "
        )
        remedy += "two nodes, where an MPI that does not fit leaves each rank alone"
        yield Finding("warning", "other-launcher", text, remedy)
    elif not is_right:
        version = version_of(launcher, answer)
        theirs = f"{LAUNCHERS[launcher].title} {version}".strip()
        text = f"{program} is {theirs}, but mpi4py loads {ours}: each rank would "
        remedy += "; or export MPI4PY_LIBMPI=/path/to/libmpi.so, the other library"
        text += "be alone, or not start"
        yield Finding("error", "other-mpirun", text, remedy)


def package_findings() -> Iterator[Finding]:
    """Check the packages."""
    if versions()["torch"] == NOT_INSTALLED:
        remedy = "activate the environment of your training, or pip install torch"
        yield Finding("error", "no-torch", "this Python has no torch", remedy)
    for name, version, minimum in old_packages():
        text = f"{name} {version} is older than {minimum}, the minimum"
        remedy = upgrade_command([(name, version, minimum)])
        yield Finding("error", "too-old", text, remedy)

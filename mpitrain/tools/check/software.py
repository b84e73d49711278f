"""Versions of packages, and which MPI a text names. Imports neither torch nor MPI."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import NamedTuple

from mpitrain import __version__
from mpitrain.launch.consistency import version_numbers

PACKAGES = ("torch", "mpi4py", "numpy")

LIBRARIES = (
    ("Open MPI", r"Open MPI v(\S+?),"),
    ("Intel MPI", r"Intel\(R\) MPI Library (\S+)"),
    ("MVAPICH", r"MVAPICH\d* Version\s*:\s*(\S+)"),
    ("Cray MPICH", r"CRAY MPICH version (\S+)"),
    ("MPICH", r"MPICH Version:\s*(\S+)"),
)
"""Families, and how their MPI_Get_library_version begins."""

LAUNCHERS = (
    ("Open MPI", r"\(Open MPI\) (\S+)"),
    ("Open MPI", r"\(PRRTE\) (\S+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library[^\n]*Version (\S+)"),
    ("MPICH", r"HYDRA build details:\s*Version:\s*(\S+)"),
    ("SLURM", r"mpiexec\.slurm()"),
)
"""Families, and what their mpirun answers to ``--version``."""

MPICH_FAMILIES = ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")
"""Families whose ranks MPICH's mpirun can start."""


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
    return _read(LIBRARIES, text)


def launcher_of(text: str) -> Mpi:
    r"""Read what an mpirun answers to ``--version``.

    >>> str(launcher_of("mpirun (Open MPI) 4.1.8\n"))
    'Open MPI 4.1.8'
    >>> str(launcher_of("HYDRA build details:\n    Version:    5.0.2\n"))
    'MPICH 5.0.2'
    """
    return _read(LAUNCHERS, text)


def is_launcher_of(launcher: Mpi, library: Mpi) -> bool | None:
    """Return whether an mpirun starts ranks of a library; ``None``: unknown.

    Versions count to the second number, and only within a family.

    >>> ompi5, ompi4 = Mpi("Open MPI", "5.0.1"), Mpi("Open MPI", "4.1.8")
    >>> is_launcher_of(ompi5, ompi4), is_launcher_of(ompi5, Mpi("Open MPI", "5.0.9"))
    (False, True)
    >>> is_launcher_of(Mpi("MPICH", "4.2"), Mpi("MVAPICH", "3"))
    True
    """
    if not launcher.family or not library.family or launcher.family == "SLURM":
        return None
    if launcher.family != library.family:
        return launcher.family == "MPICH" and library.family in MPICH_FAMILIES
    return version_numbers(launcher.version)[:2] == version_numbers(library.version)[:2]


def versions() -> dict[str, str]:
    """Return the versions of mpitrain, Python and the main packages, from metadata."""
    found = {"mpitrain": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _read(table: tuple[tuple[str, str], ...], text: str) -> Mpi:
    for family, pattern in table:
        found = re.search(pattern, text)
        if found is not None:
            return Mpi(family, found[1])
    return Mpi("", "")

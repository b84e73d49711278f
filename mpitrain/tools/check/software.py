"""Versions, and which MPI a text speaks of. Imports neither torch nor MPI."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata

from mpitrain import __version__
from mpitrain.launch.consistency import version_numbers

PACKAGES = ("torch", "mpi4py", "numpy")

_LIBRARIES = (
    ("Open MPI", r"Open MPI v(\S+?),"),
    ("Intel MPI", r"Intel\(R\) MPI Library (\S+)"),
    ("MVAPICH", r"MVAPICH\d* Version\s*:\s*(\S+)"),
    ("Cray MPICH", r"CRAY MPICH version (\S+)"),
    ("MPICH", r"MPICH Version:\s*(\S+)"),
)
"""Families, and what their MPI_Get_library_version begins with."""

_LAUNCHERS = (
    ("Open MPI", r"\(Open MPI\) (\S+)"),
    ("Open MPI", r"\(PRRTE\) (\S+)"),
    ("Intel MPI", r"Intel\(R\) MPI Library[^\n]*Version (\S+)"),
    ("MPICH", r"HYDRA build details:\s*Version:\s*(\S+)"),
    ("SLURM", r"mpiexec\.slurm()"),
)
"""Families, and what their mpirun answers to ``--version``."""

HYDRA = ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")
"""Families whose ranks MPICH's mpirun starts as well."""


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An MPI, as its library or its mpirun names itself."""

    family: str
    """Such as ``"Open MPI"``; ``""``: not known to us."""
    version: str
    """Such as ``"5.0.11"``; ``""``: not told."""

    def __str__(self) -> str:
        return f"{self.family or 'an MPI unknown to us'} {self.version}".strip()


def library_of(text: str) -> Mpi:
    r"""Read what a library says of itself (``MPI_Get_library_version``).

    >>> str(library_of("Open MPI v5.0.11, package: Open MPI x@y Distribution"))
    'Open MPI 5.0.11'
    >>> str(library_of("MPICH Version:      5.0.2\nMPICH Release date: ..."))
    'MPICH 5.0.2'
    """
    return _read(_LIBRARIES, text)


def launcher_of(text: str) -> Mpi:
    r"""Read what an mpirun answers to ``--version``.

    >>> str(launcher_of("mpirun (Open MPI) 4.1.8\n"))
    'Open MPI 4.1.8'
    >>> str(launcher_of("HYDRA build details:\n    Version:    5.0.2\n"))
    'MPICH 5.0.2'
    >>> launcher_of("Usage:\n    mpiexec.slurm args executable").family
    'SLURM'
    """
    return _read(_LAUNCHERS, text)


def belongs(launcher: Mpi, library: Mpi) -> bool | None:
    """Tell whether an mpirun starts ranks of a library.

    Args:
        launcher: What mpirun says.
        library: What the library says.

    Returns:
        ``None``: it cannot be told. Versions count to the second number, and only
        within a family.

    >>> ompi5, ompi4 = (Mpi(family="Open MPI", version=v) for v in ("5.0.1", "4.1.8"))
    >>> belongs(ompi5, ompi4), belongs(ompi5, Mpi(family="Open MPI", version="5.0.9"))
    (False, True)
    >>> belongs(Mpi(family="MPICH", version="4.2"), Mpi(family="MVAPICH", version="3"))
    True
    """
    if not launcher.family or not library.family or launcher.family == "SLURM":
        return None
    if launcher.family != library.family:
        return launcher.family == "MPICH" and library.family in HYDRA
    return version_numbers(launcher.version)[:2] == version_numbers(library.version)[:2]


def versions() -> dict[str, str]:
    """Return the versions of what we stand on, by pip's records."""
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
            return Mpi(family=family, version=found[1])
    return Mpi(family="", version="")

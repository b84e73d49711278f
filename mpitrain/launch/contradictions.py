"""What the launcher says against what MPI says.

The variables of launchers are read here only: to notice a contradiction, and to tell
one message from N before MPI has started.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.errors import TopologyError

SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec (or srun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
}
"""Variables that tell each process how many were started, and who sets them."""

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")


def was_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI started this process.

    >>> was_launched({"OMPI_COMM_WORLD_SIZE": "4"}), was_launched({"HOME": "/"})
    (True, False)
    """
    return any(name in environ for name in SIZE_VARIABLES)


def speaks_before_mpi(environ: Mapping[str, str]) -> bool:
    """Whether this process says what goes wrong before MPI can tell ranks apart.

    >>> speaks_before_mpi({"OMPI_COMM_WORLD_RANK": "2"}), speaks_before_mpi({})
    (False, True)
    """
    return all(environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def check_size(world_size: int, environ: Mapping[str, str]) -> None:
    """Refuse to train N times alone when N processes were meant to train together.

    Args:
        world_size: Number of ranks according to MPI.
        environ: This process's environment.

    Raises:
        TopologyError: The launcher started several processes; raised in each of them.

    >>> check_size(1, {})
    >>> check_size(4, {"OMPI_COMM_WORLD_SIZE": "4"})
    """
    if world_size > 1:
        return  # other sizes are several programs in one job; MPI knows better
    for name, launcher in SIZE_VARIABLES.items():
        said = environ.get(name, "")
        if said.isdecimal() and int(said) > 1:
            raise TopologyError(
                f"{launcher} started {said} processes ({name}={said}), but MPI in this "
                f"process sees a world of 1: they would train {said} times alone.\n"
                "Usual cause: mpirun is of another MPI than the library that mpi4py "
                "loaded. Compare `mpirun --version` with\n"
                '  python -c "from mpi4py import MPI; print(MPI.Get_library_version())"'
                "\nand call the mpirun that belongs to that library, or point mpi4py "
                "to the other: export MPI4PY_LIBMPI=/path/to/libmpi.so"
            )

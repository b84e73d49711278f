"""The launcher's variables against what MPI says.

They are read only to notice a contradiction, and for what must be decided before MPI
has started: which rank prints, and whether Open MPI's TCP is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from mpitrain.errors import TopologyError
from mpitrain.watchdog.process import RANK_VARIABLES

SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec (or srun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
}
"""Variables that tell each process how many were started, and who sets them."""

MPICH_FAMILY = ("MPICH", "MVAPICH", "Intel(R) MPI", "CRAY MPICH")
"""How MPICH, and those that descend from it, begin to name themselves."""

_REMEDY = (
    "Compare `mpirun --version` with\n"
    '  python -c "from mpi4py import MPI; print(MPI.Get_library_version())"\n'
    "and call the mpirun that belongs to that library, or point mpi4py to the other: "
    "export MPI4PY_LIBMPI=/path/to/libmpi.so"
)


def was_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI started this process."""
    return any(name in environ for name in SIZE_VARIABLES)


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave, for messages before MPI has started."""
    # The last two are inherited by whatever is started: not of MPI's launchers.
    names = (*RANK_VARIABLES, "SLURM_PROCID", "RANK")
    given = next((environ[name] for name in names if name in environ), "0")
    return int(given) if given.isdecimal() else 0


def launched_size(environ: Mapping[str, str]) -> int:
    """Return how many processes the launcher started, as far as it tells."""
    given = next((environ[name] for name in SIZE_VARIABLES if name in environ), "1")
    return int(given) if given.isdecimal() else 1


def is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's launcher, or none, started this job on this node alone."""
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    if size is None:
        return not any(name in environ for name in RANK_VARIABLES)
    return size == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")


def launcher_sockets(environ: Mapping[str, str]) -> list[int]:
    """Return the descriptors by which MPICH's launcher and this process talk."""
    given = (environ.get(name, "") for name in ("PMI_FD", "HYDI_CONTROL_FD"))
    return [int(number) for number in given if number.isdecimal()]


def foreign_library(library: str, environ: Mapping[str, str]) -> str | None:
    """Return a warning, before MPI starts, of a library not of the launcher's family.

    MPICH ends a process of Open MPI's mpirun inside MPI_Init. It is only a warning,
    since an MPICH that was built with PMIx runs there. The other way round Open MPI
    starts a world of one, which `check_size` refuses.
    """
    number = environ.get("OMPI_COMM_WORLD_SIZE")
    if number is None or not library.startswith(MPICH_FAMILY):
        return None
    name = " ".join(library.partition("\n")[0].split())
    return (
        f"Open MPI's mpirun started {number} processes, but mpi4py loads {name}. If "
        f"MPI does not start: {_REMEDY[0].lower()}{_REMEDY[1:]}"
    )


def lone_in_allocation(environ: Mapping[str, str]) -> str | None:
    """Return a warning for a single process in a larger allocation, else ``None``."""
    number, source = environ.get("SLURM_NTASKS", ""), "SLURM_NTASKS"
    if not number and "PBS_JOBID" in environ and "PBS_NODEFILE" in environ:
        with contextlib.suppress(OSError):  # a host that does not have it
            lines = Path(environ["PBS_NODEFILE"]).read_text().split()
            number, source = str(len(lines)), "PBS_NODEFILE"
    if not _is_several(number):
        return None
    return (
        f"1 process in an allocation of {number} ({source}): `mpirun` without -np "
        "starts all"
    )


def part_of_het_job(environ: Mapping[str, str], num_nodes: int) -> str | None:
    """Return a warning where a heterogeneous SLURM job is used in part only."""
    size = environ.get("SLURM_HET_SIZE", "")
    if not _is_several(size):
        return None
    names = [f"SLURM_JOB_NUM_NODES_HET_GROUP_{i}" for i in range(int(size))]
    total = sum(int(environ.get(name, "1")) for name in names)
    if num_nodes >= total:
        return None
    return (
        f"a heterogeneous job of {size} components and {total} nodes (SLURM_HET_SIZE), "
        f"but the ranks are on {num_nodes}: mpirun asks SLURM for component 0 alone. "
        "Expected a job of one component; or give mpirun a host file with all nodes"
    )


def check_size(world_size: int, environ: Mapping[str, str]) -> None:
    """Refuse to train N times alone when N processes were meant to train together."""
    if world_size > 1:
        return  # other sizes are several programs in one job; MPI knows better
    for name, launcher in SIZE_VARIABLES.items():
        number = environ.get(name)
        if _is_several(number):
            raise _alone(
                f"{launcher} started {number} processes ({name}={number})",
                "Usual cause: mpirun is of another MPI than the library that mpi4py "
                f"loaded. {_REMEDY}",
            )
    if was_launched(environ):
        return  # an mpirun of one process inside a larger step of SLURM
    if _is_several(environ.get("SLURM_STEP_NUM_TASKS")):
        number = environ["SLURM_STEP_NUM_TASKS"]
        raise _alone(
            f"srun started {number} processes (SLURM_STEP_NUM_TASKS={number})",
            "Usual cause: this srun does not speak PMIx with this MPI. Start it with "
            "mpirun instead, which asks SLURM for nodes and slots by itself; or, in a "
            "shell that srun opened, `unset SLURM_STEP_NUM_TASKS` to train alone.",
        )
    rank = environ.get("PMIX_RANK", "")
    if rank.isdecimal() and int(rank) > 0:
        error = _alone(
            f"a launcher with PMIx started {int(rank) + 1} processes or more "
            f"(PMIX_RANK={rank})",
            "Usual cause: the MPI library that mpi4py loaded does not speak PMIx, or "
            f"another one. {_REMEDY}",
        )
        error.reporting_rank = 1  # rank 0 cannot know: it looks like a lone process
        raise error
    if _is_by_torchrun(environ):
        number = environ["WORLD_SIZE"]
        raise _alone(
            f"torchrun started {number} processes (WORLD_SIZE={number})",
            f"Start it with mpirun instead: mpirun -np {number} python -m mpitrain",
        )


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether any launcher started this process, MPI's or not: it is no login shell."""
    return (
        was_launched(environ)
        or _is_several(environ.get("SLURM_STEP_NUM_TASKS"))
        or _is_by_torchrun(environ)
    )


def _is_by_torchrun(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and _is_several(environ.get("WORLD_SIZE"))


def _is_several(number: str | None) -> bool:
    return number is not None and number.isdecimal() and int(number) > 1


def _alone(started: str, remedy: str) -> TopologyError:
    return TopologyError(
        f"{started}, but MPI in this process sees a world of 1: each would train "
        f"alone.\n{remedy}"
    ).on_all_ranks()

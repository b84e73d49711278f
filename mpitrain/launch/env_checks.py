"""The launcher's variables against what MPI says.

They are read only to notice a contradiction, and for what must be decided before MPI
has started: which rank prints, and whether Open MPI's TCP is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from mpitrain.errors import TopologyError
from mpitrain.mpi.launchers import (
    ALONE_UNDER_SRUN,
    CONNECTED,
    CONNECTIONS,
    JOB_OF_SRUN,
    JOB_VARIABLE,
    LAUNCHERS,
    LOCAL_SIZE_VARIABLES,
    NO_PMIX,
    PMIX_RANK,
    RANK_VARIABLES,
    SIZE_VARIABLES,
    SOCKETS,
    by_process,
    family_of,
)
from mpitrain.mpi.world import rank_label

# Variable that names the file of `supervise` into which rank zero writes the status.
STATUS_FILE = "MPITRAIN_STATUS_FILE"


def beside_status(environ: Mapping[str, str], name: str) -> Path | None:
    """Return a file of `supervise` beside the status file; ``None`` without it."""
    file = environ.get(STATUS_FILE)
    return None if file is None else Path(f"{file}.{name}")


def may_restart(environ: Mapping[str, str]) -> bool:
    """Whether a `supervise` will start this job again after a fault."""
    file = beside_status(environ, "restarts")
    return file is not None and file.exists()


_REMEDY = (
    "Compare `mpirun --version` with\n"
    '  python -c "from mpi4py import MPI; print(MPI.Get_library_version())"\n'
    "and call the mpirun that belongs to that library, or point mpi4py to the other: "
    "export MPI4PY_LIBMPI=/path/to/libmpi.so"
)


RANK_PID = "MPITRAIN_RANK_PID"  # the process id of a rank, for what it starts
_OF_A_RANK = (
    *(*SIZE_VARIABLES, *RANK_VARIABLES, *LOCAL_SIZE_VARIABLES, "SLURM_STEP_NUM_TASKS"),
    *("SLURM_PROCID", "RANK", "WORLD_SIZE", STATUS_FILE),
)


def hide_from_children(environ: MutableMapping[str, str]) -> None:
    """Let programs that this rank starts be alone: else they would wait in MPI_Init."""
    for name in filter(CONNECTIONS.match, list(environ)):
        del environ[name]
    environ[RANK_PID] = str(os.getpid())


def forget_parent(environ: MutableMapping[str, str]) -> bool:
    """Forget the job of the rank that has started this program; return if one has."""
    is_other = environ.get(RANK_PID, str(os.getpid())) != str(os.getpid())
    # An mpirun that the rank has started gives its own ranks a connection again.
    is_child = is_other and CONNECTED.isdisjoint(environ)
    for name in _OF_A_RANK if is_child else ():
        environ.pop(name, None)
    return is_child


def was_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI started this process.

    A `PMIX_RANK` of 0 alone proves nothing: shells that srun opened have it, too, with
    srun's name of a job. With that of another launcher it does, and is all that
    PRRTE's prterun and prun set.
    """
    names = {*SIZE_VARIABLES, *RANK_VARIABLES} - {PMIX_RANK}
    is_slurm = environ.get(JOB_VARIABLE, "").startswith(JOB_OF_SRUN)
    is_named = {PMIX_RANK, JOB_VARIABLE} <= environ.keys() and not is_slurm
    return is_named or not names.isdisjoint(environ) or launched_size(environ) > 1


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave, for messages before MPI has started."""
    # The last two are inherited by whatever is started: not of MPI's launchers.
    return _first(environ, (*RANK_VARIABLES, "SLURM_PROCID", "RANK"), 0)


def launched_size(environ: Mapping[str, str]) -> int:
    """Return how many processes the launcher started, at least, as far as it tells."""
    if {*SIZE_VARIABLES, *RANK_VARIABLES}.isdisjoint(environ):
        return 1
    if size := _first(environ, SIZE_VARIABLES, 0):
        return size
    # Some tell the rank, and how many are on this node, but not the size.
    names = (*LOCAL_SIZE_VARIABLES, "SLURM_STEP_NUM_TASKS")
    sizes = [_first(environ, [name], 1) for name in names]
    return max(*sizes, _first(environ, RANK_VARIABLES, 0) + 1)


def launched_label(environ: Mapping[str, str]) -> str:
    """Name this process, for messages before MPI has started."""
    size = launched_size(environ)
    return rank_label(launched_rank(environ), size, socket.gethostname())


def launched_local_size(environ: Mapping[str, str]) -> int:
    """Return how many processes the launcher started on this node; 1: not known."""
    return _first(environ, LOCAL_SIZE_VARIABLES, 1)


def is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether this job is on this node alone, as far as the launcher tells."""
    if not was_launched(environ):
        return True
    # The defaults differ: what is not told is not equal.
    size = _first(environ, SIZE_VARIABLES, 0)
    return size == _first(environ, LOCAL_SIZE_VARIABLES, -1)


def launcher_sockets(environ: Mapping[str, str]) -> list[int]:
    """Return the descriptors by which the launcher and this process talk."""
    numbers = (environ.get(name, "") for name in SOCKETS)
    return [int(number) for number in numbers if number.isdecimal()]


def foreign_library(library: str, environ: Mapping[str, str]) -> str | None:
    """Return a warning, before MPI starts, of a library not of the launcher's family.

    Some libraries end a process of another's launcher inside MPI_Init. It is only a
    warning, since one that was built with PMIx runs there. The other way round there
    are worlds of one, which `check_size` refuses.
    """
    launcher, family = LAUNCHERS.get(by_process("", environ)), family_of(library)
    if launcher is None or not launcher.wants_its_version or not family:
        return None
    if family in launcher.libraries:
        return None
    name = " ".join(library.partition("\n")[0].split())
    return (
        f"{launcher.title} started {launched_size(environ)} processes, but mpi4py "
        f"loads {name}. If MPI does not start: {_REMEDY[0].lower()}{_REMEDY[1:]}"
    )


def _first(environ: Mapping[str, str], names: Iterable[str], default: int) -> int:
    number = next((environ[name] for name in names if name in environ), "")
    return int(number) if number.isdecimal() else default


def lone_in_allocation(environ: Mapping[str, str]) -> str | None:
    """Return a warning for a single process where several are likely meant."""
    if STATUS_FILE in environ:
        return None  # a job script says how many; it leaves out nodes that fail
    number, source = environ.get("SLURM_NTASKS", ""), "SLURM_NTASKS"
    if not number and "PBS_JOBID" in environ and "PBS_NODEFILE" in environ:
        with contextlib.suppress(OSError):  # a host that does not have it
            lines = Path(environ["PBS_NODEFILE"]).read_text().split()
            number, source = str(len(lines)), "PBS_NODEFILE"
    if not _is_several(number):
        size = environ.get("WORLD_SIZE")
        found = f"WORLD_SIZE={size} is set, but MPI sees 1 process, which is alone"
        how = f"start with `mpirun -np {size}`, or `unset WORLD_SIZE`"
        return f"{found}: {how}" if _is_several(size) else None
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
    if any(name in environ for name in SIZE_VARIABLES):
        return  # an mpirun of one process inside a larger step of SLURM
    if _is_several(environ.get("SLURM_STEP_NUM_TASKS")):
        number = environ["SLURM_STEP_NUM_TASKS"]
        raise _alone(
            f"srun started {number} processes (SLURM_STEP_NUM_TASKS={number})",
            ALONE_UNDER_SRUN,
        )
    remedy = f"Usual cause: the MPI library that mpi4py loaded {NO_PMIX}. {_REMEDY}"
    for name in LOCAL_SIZE_VARIABLES:
        number = environ.get(name)
        if _is_several(number):
            found = f"a launcher started {number} processes on this node"
            raise _alone(f"{found} ({name}={number})", remedy)
    rank = environ.get(PMIX_RANK, "")
    if rank.isdecimal() and int(rank) > 0:
        found = f"a launcher started {int(rank) + 1} processes or more"
        error = _alone(f"{found} ({PMIX_RANK}={rank})", remedy)
        error.reporting_rank = 1  # rank 0 cannot know: it looks like a lone process
        raise error
    if _is_by_another(environ):
        number = environ["WORLD_SIZE"]
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "another launcher"
        error = _alone(
            f"{name} started {number} processes (RANK and WORLD_SIZE={number} are set)",
            f"Start it with mpirun instead: mpirun -np {number} python -m mpitrain; "
            "or, to train alone, `unset RANK WORLD_SIZE`",
        )
        if name != "torchrun":  # each may have a log of its own, as in Kubeflow's pods
            error.reporting_rank = launched_rank(environ)
        raise error


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether any launcher started this process, MPI's or not: it is no login shell."""
    return (
        was_launched(environ)
        or _is_several(environ.get("SLURM_STEP_NUM_TASKS"))
        or _is_by_another(environ)
    )


def may_be_alone(environ: Mapping[str, str]) -> bool:
    """Whether nothing says that a launcher started this process.

    Stricter than after MPI_Init, which tells how many there are.
    """
    return not is_one_of_several(environ) and CONNECTED.isdisjoint(environ)


def _is_by_another(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, or one of Kubeflow, DeepSpeed or Ray, started this process."""
    return bool(environ.get("RANK")) and _is_several(environ.get("WORLD_SIZE"))


def _is_several(number: str | None) -> bool:
    return number is not None and number.isdecimal() and int(number) > 1


def _alone(started: str, remedy: str) -> TopologyError:
    return TopologyError(
        f"{started}, but MPI in this process sees a world of 1: each would train "
        f"alone.\n{remedy}"
    ).on_all_ranks()

"""Starts that contradict themselves end at once, with one message for both sides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Done, Mpi, environment, find, mpirun

INIT = "import mpitrain\nwith mpitrain.init(device='cpu') as world: print(world)"


def said(done: Done, words: str) -> int:
    return (done.out + done.err).count(words)


def script(folder: Path, before: str, call: str = "mpitrain.init(device='cpu')") -> str:
    """A user's script that does something on the last of its ranks before it starts."""
    file = folder / "script.py"
    file.write_text(
        "import os, mpitrain\n"
        "found = [os.environ.get(f'{x}_RANK') for x in ('OMPI_COMM_WORLD', 'PMI')]\n"
        f"last = '2' in found\n{before}\n"
        f"with {call} as world: print('trained', world)\n"
    )
    return str(file)


def other(name: str, mpirun_of: str, library_of: str) -> Mpi:
    """One MPI's mpirun with the library of another."""
    launcher, library = find(mpirun_of), find(library_of)
    for needed in (launcher.mpirun, library.mpirun):
        if not needed.exists():
            assert os.environ.get("CI") != "true", f"{needed} is missing"
            pytest.skip(f"{needed} is not there; `make test-jobs` installs it")
    return Mpi(
        name=name, mpirun=launcher.mpirun, libmpi=library.libmpi, flags=launcher.flags
    )


def test_an_mpich_under_open_mpis_mpirun_is_named_before_it_fails(
    tmp_path: Path,
) -> None:
    """MPICH ends the process inside MPI_Init: nothing can be said after that."""
    mixed = other("mixed", "openmpi-5", "mpich")
    done = mpirun(mixed, 3, "-c", INIT, cwd=tmp_path)
    assert done.status != 0
    assert said(done, "started 3 processes, but mpi4py loads MPICH Version: ") == 1
    assert said(done, "export MPI4PY_LIBMPI=") == 1


def test_open_mpis_library_under_mpichs_mpirun_is_refused_once(tmp_path: Path) -> None:
    mixed = other("mixed", "mpich", "openmpi-5")
    done = mpirun(mixed, 3, "-c", INIT, cwd=tmp_path)
    assert done.status != 0
    assert (
        said(done, "TopologyError: MPICH's mpiexec (or srun) started 3 processes") == 1
    )
    assert "(PMI_SIZE=3)" in done.out + done.err
    assert "world of 1" in done.out + done.err
    assert said(done, "suspicious MPI execution environment") == 0


def test_another_version_on_one_rank_is_named(mpi: Mpi, tmp_path: Path) -> None:
    """As on a node whose PATH leads to an older environment."""
    older = tmp_path / "older" / "torch-2.0.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n"
    )
    before = f"import sys\nif last: sys.path.insert(0, {str(older.parent)!r})"
    done = mpirun(mpi, 3, script(tmp_path, before), cwd=tmp_path)
    assert done.status == 1
    assert said(done, "TopologyError: the ranks do not run the same software") == 1
    assert said(done, "2.0.0 on ") == 1
    assert "(rank 2)" in done.err
    assert "(ranks 0-1)" in done.err
    assert "trained" not in done.out


def test_another_version_of_ours_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    before = "if last: mpitrain._version.__version__ = '0.0.9'"
    done = mpirun(openmpi, 3, script(tmp_path, before), cwd=tmp_path)
    assert done.status == 1
    assert said(done, "mpitrain: ") == said(done, "0.0.9 on ") == 1


def test_ranks_that_ask_for_different_things_are_named(
    openmpi: Mpi, tmp_path: Path
) -> None:
    call = "mpitrain.init(device='cuda' if last else 'cpu')"
    done = mpirun(openmpi, 3, script(tmp_path, "", call), cwd=tmp_path)
    assert done.status == 1
    assert said(done, "TopologyError: the ranks ask for different things") == 1
    assert said(done, "device: 'cpu' on ranks 0-1; 'cuda' on") == 1


def test_an_argument_that_is_wrong_on_one_rank_ends_all(
    openmpi: Mpi, tmp_path: Path
) -> None:
    call = "mpitrain.init(interface='' if last else None)"
    done = mpirun(openmpi, 3, script(tmp_path, "", call), cwd=tmp_path)
    assert done.status == 2
    assert said(done, "mpitrain.init(): interface is empty") == 1


@pytest.mark.parametrize("with_mpirun", [True, False])
def test_one_process_in_a_larger_allocation_trains_and_says_so_once(
    openmpi: Mpi, with_mpirun: bool, tmp_path: Path
) -> None:
    """A baseline is no mistake: in an allocation of eight slots one is enough."""
    words = [sys.executable, "-m", "mpitrain", "--name", "r", "--dry-run"]
    if with_mpirun:
        words = [str(openmpi.mpirun), "-np", "1", *openmpi.flags, *words]
    done = subprocess.run(
        ["timeout", "-k", "10", "120", *words],
        cwd=tmp_path,
        env=environment(openmpi, SLURM_NTASKS="8", SLURM_CPUS_ON_NODE="8"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: 1 process in an allocation of 8") == 1

"""`check` under mpirun and on a login node: what it prints, and must not miss."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import MPIS, Done, Mpi, environment, find, mpirun

CHECK = ("-m", "mpitrain", "check")

HEAD = """
import sys
import torch, torch.distributed as dist
from mpitrain.cli import main
from mpitrain.launch.env_checks import launched_rank
from mpitrain.launch.process_exit import exit_now
import os

is_faulty = launched_rank(os.environ) == 1
"""

TAIL = """
exit_now(main(["check", *sys.argv[1:]]))
"""


def run_falsified(mpi: Mpi, fault: str, folder: Path, *flags: str) -> Done:
    """Run the check in a process whose torch is broken on rank 1."""
    (folder / "script.py").write_text(HEAD + fault + TAIL)
    return mpirun(mpi, 2, "script.py", *flags, cwd=folder)


def errors(answer: dict[str, Any]) -> list[dict[str, str]]:
    return [found for found in answer["findings"] if found["severity"] == "error"]


def test_one_object_is_all_that_comes_out(mpi: Mpi, tmp_path: Path) -> None:
    num_ranks = 2
    done = mpirun(mpi, num_ranks, *CHECK, "--quick", "--json", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    answer = json.loads(done.out)
    assert answer["status"] == "passed"
    assert answer["num_errors"] == 0
    assert answer["world_size"] == num_ranks
    assert [rank["rank"] for rank in answer["ranks"]] == list(range(num_ranks))
    assert [rank["device"] for rank in answer["ranks"]] == ["cpu"] * num_ranks
    (node,) = answer["nodes"]
    assert node["address"] == answer["master_addr"] == "127.0.0.1"
    assert node["interface"] == "lo"
    assert node["sees_runs"]
    (tried,) = answer["all_reduce"]
    assert tried["is_right"]
    assert answer["gradients"]["ddp"]["largest_difference"] <= 1e-12
    assert answer["gradients"]["fsdp"]["largest_difference"] <= 1e-4
    assert "bandwidth" not in answer
    stages = answer["start"]["seconds_by_stage"]
    own = [
        s for name, s in stages.items() if name not in ("starting MPI", "import torch")
    ]
    assert answer["start"]["seconds_without_imports"] == pytest.approx(sum(own))
    assert next(iter(stages)) == "starting MPI"
    assert list(stages)[-1] == "process group"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_screen_says_it_all_in_lines(openmpi: Mpi, tmp_path: Path) -> None:
    """In a job of PBS, of which qstat tells the end and that it has no ompthreads."""
    (tmp_path / "qstat").write_text(
        "#!/bin/sh\n"
        "echo ' Resource_List.select = 1:ncpus=8:mpiprocs=2'\n"
        "echo ' Resource_List.walltime = 00:10:00'\n"
        "echo ' resources_used.walltime = 00:00:10'\n"
    )
    (tmp_path / "qstat").chmod(0o755)
    pbs = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "/var/spool/pbs/aux/7.head"}
    pbs |= {"NCPUS": "8", "OMP_NUM_THREADS": "8"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = mpirun(openmpi, 2, *CHECK, cwd=tmp_path, PATH=path, **pbs)
    assert done.status == 0, done.out + done.err
    out = done.out.replace("\r", "")
    for pattern in (
        r"^ +0 +\S+ +0-1 +\d+ +\d+ +cpu +127\.0\.0\.1 +lo +loopback",
        r"^backend +mpi4py$",
        r"^address reason +lo, loopback; one node",
        r"^versions +mpitrain .*, torch [\d.]+.*, mpi4py",
        r"MPI library +Open MPI|Open MPI \d",
        r"MPI ABI +openmpi",
        r"^start +seconds without imports [\d.]+, seconds by stage \(starting MPI",
        r"^all reduce +device cpu, backend mpi4py, is right True",
        r"^gradients +ddp \(largest difference",
        r"^bandwidth +num bytes +mpi4py ms +gloo ms +MPI ms +mpi4py bus",
        r"^ +1024( +[\d.e-]+){6}$",
        r"^errors: 0, warnings: \d+, notes: \d+; [\d.]+ s$",
    ):
        assert re.search(pattern, out, re.MULTILINE), f"{pattern}\n{out}"
    assert len(out.splitlines()) < 60
    assert done.err.count("OMP_NUM_THREADS=8, set by PBS, is more than the cores") == 1
    assert "omp-num-threads" not in out
    assert "no-deadline" not in out


@pytest.mark.slow
def test_gradients_that_one_rank_gets_wrong_are_named(
    openmpi: Mpi, tmp_path: Path
) -> None:
    fault = """
from torch.nn import parallel

class Broken(parallel.DistributedDataParallel):
    def __init__(self, module, **options):
        super().__init__(module, **options)
        if is_faulty:
            for weight in module.parameters():
                weight.register_hook(lambda gradient: gradient * (1 + 1e-9))

parallel.DistributedDataParallel = Broken
"""
    done = run_falsified(openmpi, fault, tmp_path, "--quick", "--json")
    assert done.status == 1, done.err
    (entry,) = errors(json.loads(done.out))
    assert entry["name"] == "wrong-gradients"
    assert re.search(r"differ .* by \d\.\de-\d+ on rank \d", entry["found"])


def test_a_collective_that_is_stuck_ends_with_76_and_names(
    openmpi: Mpi, tmp_path: Path
) -> None:
    fault = """
import time
right = dist.all_reduce

def all_reduce(*words, **flags):
    if is_faulty:
        time.sleep(1000)
    return right(*words, **flags)

dist.all_reduce = all_reduce
"""
    done = run_falsified(openmpi, fault, tmp_path, "--json", "--hang-timeout", "5")
    assert done.status == 76, done.err
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "check: all-reduce on cpu" in done.err
    answer = json.loads(done.out)
    (entry,) = errors(answer)
    assert "hang: no rank has made progress" in entry["found"]


@pytest.mark.slow
def test_a_start_that_fails_is_one_object_too(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("--json", "--device", "cuda")
    done = mpirun(openmpi, 2, *CHECK, *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.status == 1
    (entry,) = errors(json.loads(done.out))
    assert "--device cuda" in entry["found"]


def test_a_folder_that_cannot_be_written_is_an_error(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(
        openmpi, 1, *CHECK, "--quick", "--json", "--runs-dir", "/proc", cwd=tmp_path
    )
    assert done.status == 1, done.err
    (entry,) = errors(json.loads(done.out))
    assert entry["name"] == "unwritable"
    assert "/proc" in entry["found"]


# --- without mpirun -------------------------------------------------------------------


def login(
    folder: Path, path: Path, mpi: Mpi, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run the check as on a login node, with a folder of programs first on the PATH."""
    variables = environment(mpi, PATH=f"{path}:{os.environ['PATH']}")
    return subprocess.run(
        ["timeout", "-k", "5", "60", sys.executable, *CHECK, *flags],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_the_mpirun_of_the_library_is_fine(mpi: Mpi, tmp_path: Path) -> None:
    done = login(tmp_path, mpi.mpirun.parent, mpi, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    name = "MPICH" if mpi.name == "mpich" else "Open MPI"
    assert answer["mpi_library"]["text"].startswith(name)
    assert answer["mpirun"] == str(mpi.mpirun)
    assert errors(answer) == []


@pytest.mark.parametrize("other", MPIS[1:])
def test_the_mpirun_of_another_library_is_an_error(
    mpi: Mpi, other: str, tmp_path: Path
) -> None:
    theirs = find(other if other != mpi.name else MPIS[0])
    if not theirs.mpirun.exists():
        return
    done = login(tmp_path, theirs.mpirun.parent, mpi, "--json")
    assert done.returncode == 1
    (entry,) = errors(json.loads(done.stdout))
    assert entry["name"] == "other-mpirun"
    assert str(theirs.mpirun) in entry["found"]


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("echo 'Unknown option: version'; echo 'mpiexec.slurm args'", "unknown-mpirun"),
        ("sleep 1000", "unknown-mpirun"),
    ],
)
def test_an_mpirun_is_judged_by_what_it_says(
    openmpi: Mpi, answer: str, name: str, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "mpirun"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    done = login(tmp_path, program.parent, openmpi, "--json")
    found = {entry["name"]: entry for entry in json.loads(done.stdout)["findings"]}
    assert name in found, done.stdout
    assert done.returncode == (found[name]["severity"] == "error")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("/nowhere/libmpi.so", "cannot load MPI library"),
        ("sleeps", "did not load within"),
        ("aborts", "was ended by signal 6"),
    ],
)
def test_a_library_that_does_not_load_is_an_error(
    openmpi: Mpi, library: str, words: str, tmp_path: Path
) -> None:
    shadow = tmp_path / "shadow"
    if library in ("sleeps", "aborts"):
        act = "time.sleep(1000)" if library == "sleeps" else "os.abort()"
        (shadow / "mpi4py").mkdir(parents=True)
        (shadow / "mpi4py/__init__.py").write_text(f"import os, time\n{act}\n")
    variables = environment(openmpi, MPI4PY_LIBMPI=library)
    variables["PYTHONPATH"] = f"{shadow}:{variables['PYTHONPATH']}"
    code = (
        "import sys; from mpitrain.tools.check import login; from mpitrain import cli; "
        "login.LIBRARY_SECONDS = 2.0; sys.exit(cli.main(['check']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "ERROR no-mpi-library" in said
    assert words in said


def test_a_login_node_names_its_scheduler(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/true\n")
    (tmp_path / "sbatch").chmod(0o755)
    answer = json.loads(login(tmp_path, tmp_path, openmpi, "--json").stdout)
    assert answer["scheduler"] == {"name": "slurm", "job_id": None}

"""The scripts of `jobscript --site` on two hosts, under the launchers of those sites.

Launchers that cannot be had are fakes, which take documented words only; docs/howto/
sites.md says which. Sites with the same scheduler and launcher differ in lines that
`tests/unit/test_launchers.py` reads: in CI one of them runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import slow

from mpitrain.cli import main
from mpitrain.mpi.launchers import LAUNCHERS
from mpitrain.tools.jobs.jobscript import SITES, read_site

from .hosts import LOGIN, VirtualHosts
from .slurm import Slurm

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).with_name("fake_launchers.py")
MPICH = ROOT / ".venv-mpich/bin"
NAMES = sorted(path.stem for path in SITES.glob("*.yaml"))
WORDS = ["--name", "cut", "--data", "slow_training:data", "--model"]
WORDS += ["slow_training:model", "--device", "cpu", "--epochs", "100"]
WORDS += ["--global-batch-size", "8", "--num-workers", "0"]

MODULES = "module() { :; }\nconda() { :; }\n"


def launcher_of(site: str) -> str:
    return str(read_site(site)["launcher"])


def sites() -> list[object]:
    """All sites but oscer; those with a scheduler and launcher seen before are slow.

    So are those with Open MPI, whose scripts test_slurm.py and test_pbs.py start.
    """
    seen: set[tuple[object, object]] = {("pbs", "openmpi")}
    found: list[object] = []
    for name in NAMES:
        kind = read_site(name)["scheduler"], read_site(name)["launcher"]
        if name != "oscer":
            found.append(slow(name) if kind in seen else name)
            seen.add(kind)
    return found


class Place:
    """A folder from which a user starts jobs, with the launchers of a site."""

    def __init__(self, hosts: VirtualHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "slow_training.py").write_text(
            FAKES.with_name("slow_training.py").read_text()
        )
        (folder / "pause").write_text("0.02")
        (folder / "nodes").write_text("".join(f"{it}\n" for it in hosts.names[:2]))
        (folder / "modules.sh").write_text(MODULES)
        self.bin = folder / "env/bin"
        self.bin.mkdir(parents=True)
        self.environ = {
            "BASH_ENV": f"{folder}/modules.sh",
            "FAKE_HOSTS": "node1,node2",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def take(self, launcher: str, *, open_mpi: bool = False) -> None:
        """Put a launcher on the PATH, a fake if need be, and its Python."""
        library = "" if open_mpi else f"MPI4PY_LIBMPI={MPICH.parent}/lib/libmpi.so.12 "
        self.write("python", f'{library}exec {sys.executable} "$@"')
        under = (
            Path(sys.executable).with_name("mpirun") if open_mpi else MPICH / "mpiexec"
        )
        if launcher == "openmpi":
            self.bin = Path(sys.prefix) / "bin"
            return
        program = LAUNCHERS[launcher].command.split()[0]
        fake = f"{sys.executable} {FAKES} {launcher} {self.folder}/state-$$ {under}"
        self.write(program, f'exec {fake} "$@"')

    def write(self, name: str, line: str) -> None:
        """Put a program on the PATH: a line of shell."""
        (self.bin / name).write_text(f"#!/bin/bash\nunset BASH_ENV\n{line}\n")
        (self.bin / name).chmod(0o755)

    def start(
        self, host: str, words: list[str], scheduler: str
    ) -> subprocess.Popen[str]:
        """Start a command of a job on a host."""
        environ = {**self.hosts.environ, **self.environ}
        environ["PATH"] = f"{self.bin}:{environ['PATH']}"
        if scheduler == "pbs":
            environ |= {"PBS_NODEFILE": f"{self.folder}/nodes", "PBS_JOBID": "7.head"}
            environ |= {"PBS_O_WORKDIR": str(self.folder), "PBS_JOBNAME": "cut"}
        else:
            environ |= {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(self.folder)}
            environ |= {"SLURM_NTASKS_PER_NODE": "1"}
        return subprocess.Popen(
            ["timeout", "-k", "5", "150", *self.hosts._on(host), *words],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/cut"

    def wait_for_steps(self, job: subprocess.Popen[str]) -> None:
        """Wait until the training has done some steps."""
        end = time.monotonic() + 90
        record = self.run_dir / "metrics.jsonl"
        while job.poll() is None and time.monotonic() < end:
            if record.exists() and record.read_text().count('"step"') >= 5:
                return
            time.sleep(0.2)
        job.terminate()
        pytest.fail(f"no steps: {job.communicate()[0]}")

    def supervisors(self) -> list[int]:
        """Return the processes of `supervise` that work in this folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                here = (entry / "cwd").readlink() == self.folder
            except OSError:
                continue
            if here and b"supervise" in words and b"mpitrain" in words:
                found.append(int(entry.name))
        return found

    def stop(self, job: subprocess.Popen[str], launcher: str) -> None:
        """Stop the job as its scheduler, or a user, would."""
        if LAUNCHERS[launcher].forwards_usr2:
            for pid in self.supervisors():
                os.kill(pid, signal.SIGTERM)
        else:
            (self.run_dir / "stop").touch()


@pytest.fixture
def place(hosts: VirtualHosts, tmp_path: Path) -> Place:
    return Place(hosts, tmp_path)


def check_stopped(place: Place, job: subprocess.Popen[str], asked: float) -> None:
    output = job.communicate(timeout=100)[0]
    assert job.returncode == 75, output
    assert time.monotonic() - asked < 30, output
    result = json.loads((place.run_dir / "result.json").read_text())
    assert result["status"] == "stopped", output
    assert (result["world_size"], result["num_nodes"]) == (2, 2)
    assert list((place.run_dir / "checkpoints").glob("step-*")), output


@pytest.mark.parametrize("site", sites())
def test_the_script_of_a_site_trains_and_stops_under_its_launcher(
    site: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, scheduler = launcher_of(site), read_site(site)["scheduler"]
    place.take(launcher, open_mpi=launcher == "openmpi")
    monkeypatch.chdir(place.folder)
    flags = ["--site", site, "--slots-per-node", "1"]
    flags += ["--venv", str(place.bin.parent)]
    assert main(["jobscript", *flags, "--output", "job.sh", "--", *WORDS]) == 0
    job = place.start("node1", ["bash", "job.sh"], scheduler)
    place.wait_for_steps(job)
    asked = time.monotonic()
    place.stop(job, launcher)
    check_stopped(place, job, asked)


# In CI launchers are those of the sites, and of the test below.
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["pals", "jsrun", "flux", "intel"])
def test_a_launcher_with_pmix_or_without_a_script_trains_and_stops(
    launcher: str, place: Place
) -> None:
    is_pmix = launcher in ("pals", "jsrun")
    place.take(launcher, open_mpi=is_pmix)
    command = LAUNCHERS[launcher].command.format(ranks=2, slots=1, nodes=2, cpus=1)
    more = ["--pmi=pmix"] if launcher == "pals" else []
    words = [*command.split(), *more, "python", "-m", "mpitrain", *WORDS]
    supervise = ["python", "-m", "mpitrain", "supervise", "--launcher", launcher, "--"]
    (place.folder / "nodes").write_text("node1\nnode2\n")
    job = place.start("node1", [*supervise, *words], "slurm")
    place.wait_for_steps(job)
    asked = time.monotonic()
    place.stop(job, launcher)
    check_stopped(place, job, asked)


@pytest.mark.parametrize(
    ("launcher", "open_mpi"),
    [
        ("pals", True),
        slow("pals", False),
        ("srun", False),
        slow("jsrun", True),
        slow("flux", False),
    ],
)
def test_a_killed_rank_ends_the_job_under_every_launcher(
    launcher: str, open_mpi: bool, place: Place
) -> None:
    place.take(launcher, open_mpi=open_mpi)
    command = LAUNCHERS[launcher].command.format(ranks=2, slots=1, nodes=2, cpus=1)
    words = [*command.split(), "python", "-m", "mpitrain", *WORDS]
    job = place.start("node1", words, "slurm")
    place.wait_for_steps(job)
    (state,) = place.folder.glob("state-*")
    killed = time.monotonic()
    os.kill(int((state / "pid-1").read_text()), signal.SIGKILL)
    output = job.communicate(timeout=60)[0]
    assert time.monotonic() - killed < 30
    assert job.returncode != 0
    # prterun ends rank 0's wrapper before the watchdog's word is there.
    assert open_mpi or "rank 1/2 node2" in output


@pytest.mark.parametrize("pmi", [slow("pmi2"), "pmix"])
def test_srun_itself_starts_the_ranks(pmi: str, slurm: Slurm, place: Place) -> None:
    """MPICH by PMI-2, Open MPI by PMIx, whose library SLURM loads by its bare name."""
    place.take("srun", open_mpi=pmi == "pmix")
    (place.bin / "srun").unlink()
    script = place.folder / "job.sh"
    flags = ["slurm", "--launcher", "srun", f"--launcher-flag=--mpi={pmi}"]
    flags += ["--slots-per-node", "1", "--gpus-per-node", "0", "--mem", "None"]
    flags += ["--cpus-per-slot", "1", "--venv", str(place.bin.parent)]
    words = ["--", "--name", "by-srun", "--epochs", "1", "--device", "cpu"]
    assert main(["jobscript", *flags, "--output", str(script), *words]) == 0
    job = slurm.sbatch("job.sh", cwd=place.folder, timeout_seconds=120)
    assert job.exit_code == "0:0", job.output
    result = json.loads((place.folder / "runs/by-srun/result.json").read_text())
    assert (result["status"], result["world_size"]) == ("finished", 2)
    assert result["num_nodes"] == 2


@pytest.mark.parametrize("words", [[], *map(slow, (["--full"], ["-b", "-s", "USR1"]))])
def test_ranks_that_srun_started_save_a_checkpoint_when_the_job_is_cancelled(
    words: list[str], slurm: Slurm, place: Place
) -> None:
    """srun says that it kills the step; the step gets TERM, and time (KillWait)."""
    place.take("srun")
    (place.bin / "srun").unlink()
    flags = ["slurm", "--launcher", "srun", "--launcher-flag=--mpi=pmi2"]
    flags += ["--slots-per-node", "1", "--gpus-per-node", "0", "--mem", "None"]
    flags += ["--cpus-per-slot", "1", "--venv", str(place.bin.parent)]
    script = ["--output", str(place.folder / "job.sh"), "--", *WORDS]
    assert main(["jobscript", *flags, *script]) == 0
    sent = slurm.hosts.run(
        LOGIN,
        ["sbatch", "job.sh"],
        cwd=place.folder,
        environ={"PYTHONPATH": f"{place.folder}:{ROOT}"},
    )
    number = sent.stdout.split()[-1]
    record, end = place.run_dir / "metrics.jsonl", time.monotonic() + 60
    while not (record.exists() and record.read_text().count('"step"') >= 5):
        assert time.monotonic() < end, sent.stdout
        time.sleep(0.2)
    slurm.hosts.run(LOGIN, ["scancel", *words, number])
    while slurm.state_of(number) in ("RUNNING", "COMPLETING"):
        assert time.monotonic() < end + 60
        time.sleep(0.3)
    result = json.loads((place.run_dir / "result.json").read_text())
    assert result["status"] == "stopped"
    assert list((place.run_dir / "checkpoints").glob("step-*"))


def test_mpich_s_own_mpirun_starts_the_ranks_of_a_slurm_job(
    slurm: Slurm, place: Place
) -> None:
    place.take("srun")
    (place.bin / "srun").unlink()
    place.write("mpirun", f'exec {MPICH}/mpirun "$@"')
    flags = ["slurm", "--launcher", "mpich", "--slots-per-node", "1"]
    flags += ["--gpus-per-node", "0", "--cpus-per-slot", "1"]
    flags += ["--venv", str(place.bin.parent)]
    words = ["--", "--name", "by-mpich", "--epochs", "1", "--device", "cpu"]
    script = ["--output", str(place.folder / "job.sh"), *words]
    assert main(["jobscript", *flags, *script]) == 0
    job = slurm.sbatch("job.sh", cwd=place.folder, timeout_seconds=120)
    assert job.exit_code == "0:0", job.output
    result = json.loads((place.folder / "runs/by-mpich/result.json").read_text())
    assert (result["status"], result["world_size"]) == ("finished", 2)
    assert result["num_nodes"] == 2


@pytest.mark.slow  # in CI that of test_slurm.py, which has its scheduler and launcher
def test_the_script_of_oscer_starts_under_slurm(
    slurm: Slurm, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its container of an operating system, and on our partition."""
    monkeypatch.chdir(place.folder)
    flags = ["--site", "oscer", "--partition", "all", "--venv", sys.prefix]
    words = ["--", "--name", "by-oscer", "--epochs", "2", "--device", "cpu"]
    assert main(["jobscript", *flags, "--output", "job.sh", *words]) == 0
    script = (place.folder / "job.sh").read_text()
    line = "#SBATCH --container=el9hw\n"
    assert line in script
    (place.folder / "job.sh").write_text(script.replace(line, ""))
    job = slurm.sbatch("job.sh", cwd=place.folder, timeout_seconds=120)
    assert job.exit_code == "0:0", job.output
    result = json.loads((place.folder / "runs/by-oscer/result.json").read_text())
    assert (result["status"], result["world_size"]) == ("finished", 4)

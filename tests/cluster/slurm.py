"""A real SLURM on virtual hosts, and qsub's face over it.

One slurmctld on the login node, one slurmd on each node, munge of our own: none
touches what the machine may have in `/etc/slurm` or `/etc/munge`.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from .hosts import LOGIN, VirtualHosts

SLURM_CONF = """\
ClusterName=virtual
SlurmctldHost=login(10.99.0.254)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmpfs-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MpiDefault=none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed_jobs
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60
"""

NODE = "NodeName={name} NodeAddr={address} CPUs=64 RealMemory=65536 Gres=gpu:4"

CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"  # never used: proctrack and task do without

# What PBS tells a job, for jobs that qsub brought; and nothing of SLURM, so that
# mpirun believes it. SLURM runs this before the script and obeys what it prints.
# A job that a job has submitted has ARGS, and as under PBS nothing of its environment
# but what -v names: mpirun's leave to run as root is then the site's to give. Ids
# are bare numbers: the face of `qsub -W depend` knows no others.
# PBS would set OMP_NUM_THREADS too, to its ompthreads: not here, where the cores
# that it counts are not there.
TASK_PROLOG = """\
#!/bin/bash
[[ ${FACE:-} == pbs || -n ${ARGS+x} ]] || exit 0
echo "export OMPI_ALLOW_RUN_AS_ROOT=1"
echo "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
echo "export TMPDIR=${SLURM_CONF%/*}/tmp"
echo "export PBS_NODEFILE=$(TMPDIR=${SLURM_CONF%/*} generate_pbs_nodefile)"
echo "export PBS_O_WORKDIR=$SLURM_SUBMIT_DIR"
echo "export PBS_JOBID=$SLURM_JOB_ID"
echo "export PBS_JOBNAME=$SLURM_JOB_NAME"
echo "export PBS_ENVIRONMENT=PBS_BATCH"
for name in ${!SLURM_@}; do  # but what qsub and qstat, the faces, must know
    if [[ $name != SLURM_CONF ]]; then echo "unset $name"; fi
done
"""

UNENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that has ended."""

    exit_code: str
    """As SLURM writes it: the status, a colon, the signal; `0:0` is well."""
    output: str
    """What it printed."""


class Slurm:
    """SLURM on all hosts but the login node, where one submits."""

    def __init__(self, hosts: VirtualHosts) -> None:
        self.hosts = hosts
        # PMIx would take munge, of which there is none in its place.
        self.environ = {"SLURM_CONF": str(hosts.folder / "slurm.conf")}
        self.environ["PMIX_MCA_psec"] = "native"

    def start(self) -> None:
        """Start the daemons, and wait until every node is idle."""
        self._write_files()
        self.hosts.environ |= self.environ
        self.hosts.start(LOGIN, ["munged", "--foreground", *self._munge_files()])
        socket = str(self.hosts.folder / "munge.socket")
        self.hosts.wait_for(LOGIN, ["munge", "-n", "-S", socket], "munged")
        self.hosts.start(LOGIN, ["slurmctld", "-D"])
        for name in self.hosts.names:
            self.hosts.start(name, ["slurmd", "-D", "-N", name])
        idle = f'[ "$(sinfo -h -N -t idle -o %N | wc -l)" = {len(self.hosts.names)} ]'
        self.hosts.wait_for(LOGIN, ["sh", "-c", idle], "SLURM with all nodes idle")

    def sbatch(self, *words: str, cwd: Path, timeout_seconds: int) -> Job:
        """Submit with sbatch from a folder, and wait for the end."""
        return self._submit(["sbatch", *words], cwd, timeout_seconds, {})

    def qsub(
        self, script: str, *, cwd: Path, timeout_seconds: int, **environ: str
    ) -> Job:
        """Submit with qsub, the face; the job sees what a PBS job sees.

        The face reads `qsub -v NAME=value` in a way of its own; variables for the
        job come as `environ`.
        """
        environ["FACE"] = "pbs"
        return self._submit(["qsub", script], cwd, timeout_seconds, environ)

    def _submit(
        self,
        command: list[str],
        cwd: Path,
        timeout_seconds: int,
        environ: dict[str, str],
    ) -> Job:
        sent = self.hosts.run(LOGIN, command, cwd=cwd, environ=environ)
        if sent.returncode:
            raise RuntimeError(f"{command}: {sent.stdout}\n{self.hosts.logs()}")
        number = sent.stdout.split()[-1].partition(".")[0]
        end = time.monotonic() + timeout_seconds
        while (job := self._show(number))["JobState"] in UNENDED:
            if time.monotonic() > end:
                self.hosts.run(LOGIN, ["scancel", number])
                raise TimeoutError(f"{job}\n{_output(job)}\n{self.hosts.logs()}")
            time.sleep(0.5)
        return Job(exit_code=job["ExitCode"], output=_output(job))

    def state_of(self, number: str) -> str:
        """Return the state of a job, such as ``RUNNING``."""
        return self._show(number)["JobState"]

    def _show(self, number: str) -> dict[str, str]:
        shown = self.hosts.run(LOGIN, ["scontrol", "-o", "show", "job", number])
        if shown.returncode:
            raise RuntimeError(f"job {number}: {shown.stdout}\n{self.hosts.logs()}")
        pairs = (word.partition("=") for word in shown.stdout.split())
        return {name: value for name, _, value in pairs}

    def _write_files(self) -> None:
        folder = self.hosts.folder
        of_nodes = (
            f"{kind}-{it}" for kind in ("spool", "tmpfs") for it in self.hosts.names
        )
        for name in ["state", *of_nodes]:
            (folder / name).mkdir()
        nodes = "\n".join(
            NODE.format(name=name, address=self.hosts.addresses[name])
            for name in self.hosts.names
        )
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(folder=folder, nodes=nodes)
        )
        (folder / "cgroup.conf").write_text(CGROUP_CONF)
        # What stands for GPUs is /dev/null by other names: the script may ask for
        # four, and torch sees none.
        for i in range(4):
            os.mknod(folder / f"gpu{i}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu Count=4 File={folder}/gpu[0-3]\n")
        prolog = folder / "task_prolog"
        prolog.write_text(TASK_PROLOG)
        prolog.chmod(0o755)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        folder.chmod(0o755)  # munge wants others to reach its socket

    def _munge_files(self) -> list[str]:
        folder = self.hosts.folder
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "seed-file": "munged.seed",
            "log-file": "munged.log",
        }
        return [f"--{option}={folder}/{name}" for option, name in files.items()]


def _output(job: dict[str, str]) -> str:
    """Return what a job printed; qsub's face does not join errors to the rest."""
    paths = dict.fromkeys([job["StdOut"], job["StdErr"]])
    texts = [p.read_text(errors="replace") for p in map(Path, paths) if p.exists()]
    return "".join(texts)

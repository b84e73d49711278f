"""`qsub pbs/demo.sh`, with fewer ranks, over qsub's face of SLURM.

SLURM's reader of `#PBS -l select=` wants `mem` last, and passes over `place`,
`ompthreads` and `ngpus`; PBS minds neither.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .hosts import VirtualHosts
from .runs import assert_finished
from .slurm import Slurm

TIMEOUT_SECONDS = 240

# PBS's program of that name takes what follows the host as words, not as a line
# for a shell there. The real one was tried on a real OpenPBS.
PBS_TMRSH = """\
#!/bin/bash
host=$1; shift
exec ssh -F {ssh_config} "$host" "${{*@Q}}"
"""


def test_qsub_of_the_demo_script_trains_on_two_nodes(
    slurm: Slurm, folder: Path
) -> None:
    script = (folder / "pbs/demo.sh").read_text()
    assert "\n#PBS -l select=2:ncpus=16:mpiprocs=4:" in script
    (folder / "demo.sh").write_text(script.replace(":mpiprocs=4:", ":mpiprocs=1:"))
    job = slurm.qsub(
        "demo.sh",
        cwd=folder,
        timeout_seconds=TIMEOUT_SECONDS,
        ARGS="--epochs 1 --name demo",
    )
    assert job.exit_code == "0:0", job.output
    assert (folder / "runs/demo").is_dir()
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=2)


@pytest.mark.slow
def test_where_no_ssh_leads_from_node_to_node_the_job_takes_pbs_tmrsh(
    hosts: VirtualHosts, slurm: Slurm, folder: Path
) -> None:
    tmrsh = folder / "pbs-exec" / "bin" / "pbs_tmrsh"
    tmrsh.parent.mkdir(parents=True)
    tmrsh.write_text(PBS_TMRSH.format(ssh_config=hosts.folder / "ssh" / "ssh_config"))
    tmrsh.chmod(0o755)
    (folder / "pbs.conf").write_text(f"PBS_EXEC={folder}/pbs-exec\n")
    with hosts.without_ssh():
        job = slurm.qsub(
            "pbs/demo.sh",
            cwd=folder,
            timeout_seconds=TIMEOUT_SECONDS,
            PBS_CONF_FILE=f"{folder}/pbs.conf",
            ARGS="--epochs 1 --name by-tmrsh",
        )
    assert job.exit_code == "0:0", job.output
    assert f"mpirun takes {tmrsh} instead" in job.output
    assert (folder / "runs" / "by-tmrsh").is_dir()
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=8)

#!/bin/bash -l
# {{title}}, under SLURM:
#
#     sbatch THIS_SCRIPT                   {{from}}
#     sbatch THIS_SCRIPT --epochs 20       what follows goes to mpitrain
{{another}}
#
# `-l` above makes this a login shell, so that `module` is known. This text is
# made by `python -m mpitrain jobscript slurm{{jobs_flag}}`: {{help}}

{{account}}

# The name in the queue.
#SBATCH --job-name={{name}}
# What is printed goes here: %x is the name, %j the number of the job.
#SBATCH --output=%x-%j.log
{{partition}}
# The job is ended after this time (hours:minutes:seconds).
#SBATCH --time={{time}}
{{chain_lines}}
# So many nodes ...
#SBATCH --nodes={{nodes}}
# ... with so many processes (ranks) on each{{per_gpu}}.
#SBATCH --ntasks-per-node={{slots}}
# Cores for each process: it computes with as many threads.
#SBATCH --cpus-per-task={{cpus}}
{{mem}}
{{gpus}}

set -eo pipefail

{{modules}}
set -u  # only now: some sites' modules use variables that are not set
# ... then the virtual environment.
cd "$SLURM_SUBMIT_DIR"
venv={{venv}}
if [[ ! -x $venv/bin/python ]]; then
    echo "no virtual environment in $venv: make it, or submit from its folder" >&2
    exit 1
fi
export PATH="$venv/bin:$PATH"

# Now `mpirun` is the one in .venv if there is one, else the module's. The one
# in .venv has to be told where it lives on the other nodes: in the same place.
options=(--bind-to none)  # threads may use all cores; mpitrain shares them out
if [[ -x $venv/bin/mpirun ]]; then
    options+=(--prefix "$venv")
    # Its daemons on the other nodes shall not end at TERM (see below).
    export PRTE_MCA_prte_launch_agent="python -m mpitrain.schedulers.block_sigterm prted"
fi
{{train}}
#!/bin/bash -l
# Train on 2 nodes, 4 processes on each, under SLURM:
#
#     sbatch THIS_SCRIPT                   from the folder that holds .venv
#     sbatch THIS_SCRIPT --epochs 20       more flags for mpitrain
#
# Made by `python -m mpitrain jobscript slurm`; its --help lists the flags.

# The account to charge. EDIT: remove one # and put your own. On a cluster without
# accounts leave the line as it is: with two # it is a comment.
##SBATCH --account=my_project

# The name in the queue, and the output file: %x is the name, %j the job's number.
#SBATCH --job-name=mpitrain
#SBATCH --output=%x-%j.log
# Time limit (hours:minutes:seconds).
#SBATCH --time=00:10:00
# Nodes, processes (ranks) on each (one for each GPU), and cores of each process.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
# Memory of each node.
#SBATCH --mem=16G
# GPUs of each node. On a CPU partition DELETE this line.
#SBATCH --gres=gpu:4

set -eo pipefail

# EDIT: the site's modules with Python and MPI, if you need them.
# module load python/3.11
# module load openmpi
set -u  # after the modules: some use variables that are not set

# The virtual environment.
cd "$SLURM_SUBMIT_DIR"
venv=$PWD/.venv
if [[ ! -x $venv/bin/python ]]; then
    echo "no virtual environment in $venv: make it, or submit from its folder" >&2
    exit 1
fi
export PATH="$venv/bin:$PATH"

# sbatch --export=NONE, or a list of variables, sets this one, too: the ranks of other
# nodes would then have no PATH.
export SLURM_EXPORT_ENV=ALL

# mpirun is the one in .venv if there is one, else the module's. The one in .venv needs
# to know where it is on the other nodes.
options=(--bind-to none)  # mpitrain gives each rank its cores
if [[ -x $venv/bin/mpirun ]]; then
    options+=(--prefix "$venv")
fi
# The daemons on the other nodes must not end at TERM. (Open MPI 5, then 4.)
agent="python -m mpitrain.tools.jobs.block_sigterm"
export PRTE_MCA_prte_launch_agent="$agent prted"
export OMPI_MCA_orte_launch_agent="$agent orted"

# This script runs once, on the first node. mpirun gets nodes and slots from SLURM.
#
# `supervise` lets the ranks stop with a checkpoint at TERM (scancel, preemption). Then
# the job's status is 75.
# After a fault it starts them again, up to 3 times.
export SLURM_OVERLAP=1  # srun does not wait for what is left of a lost node
exec python -m mpitrain supervise --restarts 3 -- \
    mpirun "${options[@]}" python -m mpitrain "$@"

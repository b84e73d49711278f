#!/bin/bash -l
# Train on 2 nodes, 4 processes on each, under SLURM:
#
#     sbatch THIS_SCRIPT                   from the folder that holds .venv
#     sbatch THIS_SCRIPT --epochs 20       what follows goes to mpitrain
#
# `-l` above makes this a login shell, so that `module` is known. This text is
# made by `python -m mpitrain jobscript slurm`: its --help tells what can differ.

# The project that pays. EDIT: take one # away and put your own. On a cluster
# without accounts leave the line as it is: with two # it is only a comment.
##SBATCH --account=my_project

# The name in the queue.
#SBATCH --job-name=mpitrain
# What is printed goes here: %x is the name, %j the number of the job.
#SBATCH --output=%x-%j.log
# The job is ended after this time (hours:minutes:seconds).
#SBATCH --time=00:10:00
# So many nodes ...
#SBATCH --nodes=2
# ... with so many processes (ranks) on each: one for each GPU.
#SBATCH --ntasks-per-node=4
# Cores for each process: it computes with as many threads.
#SBATCH --cpus-per-task=4
# Memory of each node.
#SBATCH --mem=16G
# GPUs of each node. On a CPU partition DELETE this line.
#SBATCH --gres=gpu:4

set -eo pipefail

# Where Python comes from: the site's modules, if you need them ...
# module load python/3.11
# module load openmpi
set -u  # only now: some sites' modules use variables that are not set
# ... then the virtual environment.
cd "$SLURM_SUBMIT_DIR"
venv=$PWD/.venv
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

# A job that is cancelled or preempted gets TERM, and is killed some seconds later
# (SLURM: KillWait; PBS: kill_delay). mpirun would end the ranks at once: so TERM is
# blocked for it. The ranks hear TERM, or USR2, which mpirun passes on to them: they
# save where they are, and stop. If they hang, mpirun is killed, and they with it.
# (MPICH's mpirun dies of USR2. With it, write trap '' USR1 TERM for the two lines
# that begin with trap: the ranks ask the scheduler for their time, too.)
out_of_time= terminated= child=
stop() {
    out_of_time=--out-of-time
    if [[ -n $child ]]; then kill -USR2 "$child" || true; fi
}
trap stop USR1
trap 'terminated=yes; stop' TERM

# bash hears of a signal only while it waits, and the signal breaks that `wait`.
run() {
    python -m mpitrain.schedulers.block_sigterm "$@" &
    child=$!
    wait "$child" && status=0 || status=$?
    if [[ -n $out_of_time && $status -gt 128 ]]; then
        for ((i = 0; i < 105; i++)); do
            kill -0 "$child" 2>/dev/null || break
            sleep 1 || true
        done
        kill -KILL "$child" 2>/dev/null || true
        wait "$child" && status=0 || status=$?
    fi
    child=
}

export MPITRAIN_STATUS_FILE
MPITRAIN_STATUS_FILE=$(mktemp)

# This script runs once, on the first node. So does mpirun: it asks SLURM for
# nodes and slots, and has srun start the others, with this environment. No
# number of processes, no host, no port: the ranks find each other over MPI.
# (With MPICH's mpirun leave --prefix out; the rest is the same.)
run mpirun "${options[@]}" python -m mpitrain "$@"
# 75: stopped, and the same training with its --name resumes. mpirun of Open MPI 5 ends
# with 0 where it has lost a node: the job's status is then that of rank zero, or 1.
if [[ $status == 0 ]]; then status=$(cat "$MPITRAIN_STATUS_FILE"); fi
rm -f "$MPITRAIN_STATUS_FILE"
exit "${status:-1}"

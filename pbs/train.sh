#!/bin/bash -l
# Train on 2 nodes, 4 processes on each, in as many jobs as it takes, under PBS:
#
#     qsub THIS_SCRIPT                           from the folder that holds .venv
#     qsub -v ARGS="--epochs 20" THIS_SCRIPT     more flags for mpitrain
#     qsub -N OTHER THIS_SCRIPT                  another training: its run has this name
#
# Made by `python -m mpitrain jobscript pbs --jobs 20`; its --help lists the flags.

# The account to charge. EDIT: remove one # and put your own. On a cluster without
# accounts leave the line as it is: with two # it is a comment.
##PBS -A my_project

# The name in the queue. One output file, normal and error alike: training.o<number>.
#PBS -N training
#PBS -j oe
# Time limit (hours:minutes:seconds).
#PBS -l walltime=01:00:00
# PBS may run the job again if a node fails.
#PBS -r y
# Chunks, each on a node of its own, with cores, GPUs and memory. mpiprocs is the number
# of processes (ranks), ompthreads the number of threads of each. Without mpiprocs there
# is one slot; without ompthreads each process would take all cores.
#PBS -l place=scatter
#PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4:ngpus=4:mem=16gb
# On a CPU queue, or if PBS says "Unknown resource: ngpus", DELETE the line above and
# remove one # here:
##PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4:mem=16gb

set -eo pipefail

# EDIT: the site's modules with Python and MPI, if you need them.
# module load python/3.11
# module load openmpi
set -u  # after the modules: some use variables that are not set

# The virtual environment. PBS starts the script in $HOME.
cd "$PBS_O_WORKDIR"
venv=$PWD/.venv
if [[ ! -x $venv/bin/python ]]; then
    echo "no virtual environment in $venv: make it, or submit from its folder" >&2
    exit 1
fi
export PATH="$venv/bin:$PATH"

# mpirun is the one in .venv if there is one, else the module's. The one in .venv needs
# to know where it is on the other nodes.
options=(--bind-to none)  # mpitrain gives each rank its cores
if [[ -x $venv/bin/mpirun ]]; then
    options+=(--prefix "$venv")
fi

# An Open MPI that was built for PBS ("tm") gets the nodes from PBS. Any other reads them
# from a file, which `supervise` gives it, and reaches them by ssh, with the variables of -x.
launchers=$(prte_info 2>/dev/null || ompi_info 2>/dev/null || true)
if [[ $launchers != *"MCA plm: tm "* ]]; then
    for name in PATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if [[ -n ${!name:-} ]]; then options+=(-x "$name"); fi
    done
    # Without ssh between the nodes PBS's own pbs_tmrsh takes its place.
    remote_shell=ssh
    here=$(head -n 1 "$PBS_NODEFILE")
    other=$(grep -Fxvm 1 "$here" "$PBS_NODEFILE" || true)
    if [[ -n $other ]] && ! timeout 20 ssh -n -o BatchMode=yes "$other" true; then
        home=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" || true)
        export PATH="$PATH:$home/bin"
        if ! remote_shell=$(command -v pbs_tmrsh); then
            echo "cannot reach $other: no ssh, and no pbs_tmrsh either" >&2
            exit 1
        fi
        echo "no ssh to $other: mpirun takes $remote_shell instead"
        remote_shell=pbs_tmrsh
    fi
    # PBS sends TERM to these, too; mpirun would lose the node. (Open MPI 5, then 4.)
    agent="python -m mpitrain.tools.jobs.block_sigterm $remote_shell"
    export PRTE_MCA_plm_ssh_agent=$agent OMPI_MCA_plm_rsh_agent=$agent
    export PRTE_MCA_plm_ssh_no_tree_spawn=1 OMPI_MCA_plm_rsh_no_tree_spawn=1
fi

# This script runs once, on the first node. ARGS is several words.
#
# `supervise` lets the ranks stop with a checkpoint at TERM (qdel, preemption). It ends
# with 75; qstat says 271 after qdel.
#
# It leaves out nodes that do not answer, and submits this script again until the
# training is finished, up to 20 jobs. The run, or sweep, has the job's name.
# The next job gets only ARGS and -N of qsub's command line (ARGS encoded, where qsub
# would change it): write other options for PBS into this script.
export ARGS="${ARGS:-$(base64 -d <<<"${MPITRAIN_ARGS:-}")}"
# shellcheck disable=SC2086
exec python -m mpitrain supervise --jobs 20 --script "$0" -- \
    mpirun "${options[@]}" python -m mpitrain --name "$PBS_JOBNAME" ${ARGS:-}

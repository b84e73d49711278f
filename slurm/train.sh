#!/bin/bash -l
# Train on 2 nodes, 4 processes on each, in as many jobs as it takes, under SLURM:
#
#     sbatch THIS_SCRIPT                   from the folder that holds .venv
#     sbatch THIS_SCRIPT --epochs 20       what follows goes to mpitrain
#     sbatch --job-name OTHER THIS_SCRIPT  another training: its run is named so
#
# `-l` above makes this a login shell, so that `module` is known. This text is
# made by `python -m mpitrain jobscript slurm --jobs 20`: see its --help.

# The project that pays. EDIT: take one # away and put your own. On a cluster
# without accounts leave the line as it is: with two # it is only a comment.
##SBATCH --account=my_project

# The name in the queue.
#SBATCH --job-name=training
# What is printed goes here: %x is the name, %j the number of the job.
#SBATCH --output=%x-%j.log
# The job is ended after this time (hours:minutes:seconds).
#SBATCH --time=01:00:00
# What lets it come back to the queue (below), go on with the same log, and hear
# of its end in time.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
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

# A job may end before the training does: this one is then put into the queue
# again, up to 20 jobs in all, and goes on from the training's last checkpoint.
# The run in runs/ has the job's name.
training=(--name "$SLURM_JOB_NAME" "$@")

# One job for one training: this ends here if another one has it, waiting or
# running, and also after 20 jobs.
python -m mpitrain chain begin --jobs 20 -- "${training[@]}"

# 120 s before its end SLURM sends USR1 to this script (--signal, above).
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

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
export SLURM_OVERLAP=1  # what is left of a lost node must not keep srun waiting

next=later
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    run python -m mpitrain hostfile --gpus ignore --probe \
        --output "$hosts" -- mpirun "${options[@]}"
    # This script runs once, on the first node. So does mpirun: it has srun start
    # the others, with this environment. No host and no port: the ranks find each
    # other over MPI. (MPICH: `hostfile --format mpich`, -f in place of --hostfile,
    # and no --prefix.)
    if [[ -n $out_of_time ]]; then
        status=75  # nothing was started, and nothing has failed
    elif [[ $status == 0 ]]; then
        run mpirun "${options[@]}" --hostfile "$hosts" \
            python -m mpitrain "${training[@]}"
    fi
    # Finished? Stopped, and can go on? Failed, for the second time without progress?
    # `next` is here (start it again, in this job), later (in another) or end.
    # shellcheck disable=SC2086  # it may be nothing
    next=$(python -m mpitrain chain next --jobs 20 --status "$status" \
        $out_of_time -- "${training[@]}") || next=later
    if [[ $next != here ]]; then break; fi
done

# After scancel, or a preemption that requeues it by itself, the job does not run.
if [[ -n $terminated && $next != end ]]; then
    state=$(squeue -h -j "$SLURM_JOB_ID" -o %T || true)
    if [[ $state != RUNNING ]]; then next=end; fi
fi
if [[ $next != end ]]; then
    for pause in 5 10 20 0; do
        scontrol requeue "$SLURM_JOB_ID" && break  # the same job, its number, too
        sleep "$pause"
    done
fi
exit "$status"

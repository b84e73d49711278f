#!/bin/bash -l
# Train on 2 nodes, 4 processes on each, in as many jobs as it takes, under PBS:
#
#     qsub THIS_SCRIPT                           from the folder that holds .venv
#     qsub -v ARGS="--epochs 20" THIS_SCRIPT     ARGS goes to mpitrain
#     qsub -N OTHER THIS_SCRIPT                  another training: its run is named so
#
# `-l` above makes this a login shell, so that `module` is known. This text is
# made by `python -m mpitrain jobscript pbs --jobs 20`: see its --help.

# The project that pays. EDIT: take one # away and put your own. On a cluster
# without accounts leave the line as it is: with two # it is only a comment.
##PBS -A my_project

# The name in the queue.
#PBS -N training
# One file for what is printed, normal and error alike: training.o<number>.
#PBS -j oe
# The job is ended after this time (hours:minutes:seconds).
#PBS -l walltime=01:00:00
# Should a node fail, PBS may run it again.
#PBS -r y
# So many pieces (chunks), each on a node of its own ...
#PBS -l place=scatter
# ... with cores, GPUs and memory. mpiprocs is the number of processes (ranks),
# ompthreads that of the threads of each. Without mpiprocs there is room for one
# process, and mpirun wants --oversubscribe; without ompthreads each process would
# take all cores.
#PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4:ngpus=4:mem=16gb
# On a CPU queue, or where PBS says "Unknown resource: ngpus", DELETE the line
# above and take one # away here:
##PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4:mem=16gb

set -eo pipefail

# Where Python comes from: the site's modules, if you need them ...
# module load python/3.11
# module load openmpi
set -u  # only now: some sites' modules use variables that are not set
# ... then the virtual environment. PBS starts in $HOME, hence `cd`.
cd "$PBS_O_WORKDIR"
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
fi

# How does mpirun reach the other nodes? An Open MPI built for PBS ("tm") asks
# PBS for nodes and slots, and has PBS start the others.
launchers=$(prte_info 2>/dev/null || ompi_info 2>/dev/null || true)
if [[ $launchers != *"MCA plm: tm "* ]]; then
    # Any other reads the nodes from a file, one line for each slot, and sends
    # itself by ssh. Of our environment only what -x names goes along.
    for name in PATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if [[ -n ${!name:-} ]]; then options+=(-x "$name"); fi
    done
    # No ssh between the nodes? Then PBS's own pbs_tmrsh in its place. It wants
    # the command as separate words, and mpirun gives it as one: hence `sh -c`.
    here=$(head -n 1 "$PBS_NODEFILE")
    other=$(grep -Fxvm 1 "$here" "$PBS_NODEFILE" || true)
    if [[ -n $other ]]; then
        reach=ssh shell=
        if ! timeout 20 ssh -n -o BatchMode=yes "$other" true; then
            home=$(sed -n 's/^PBS_EXEC=//p' "${PBS_CONF_FILE:-/etc/pbs.conf}" || true)
            reach=$(command -v pbs_tmrsh || echo "$home/bin/pbs_tmrsh")
            shell='/bin/sh -c '
            if [[ ! -x $reach ]]; then
                echo "cannot reach $other: no ssh, and no pbs_tmrsh either" >&2
                exit 1
            fi
            echo "no ssh to $other: mpirun takes $reach instead"
        fi
        # PBS sends TERM to ssh and pbs_tmrsh, too. mpirun would lose the node: so TERM
        # is blocked for them.
        agent=$(mktemp "${TMPDIR:-/tmp}/agent.XXXXXX")
        trap 'rm -f "$agent"' EXIT
        cat >"$agent" <<EOF
#!/bin/sh
host=\$1; shift
exec $(printf %q "$venv")/bin/python -m mpitrain.schedulers.block_sigterm \\
    $(printf %q "$reach") "\$host" $shell"\$*"
EOF
        chmod +x "$agent"
        # One name for Open MPI 5, one for 4; all nodes started from this one.
        export PRTE_MCA_plm_ssh_agent=$agent OMPI_MCA_plm_rsh_agent=$agent
        export PRTE_MCA_plm_ssh_no_tree_spawn=1 OMPI_MCA_plm_rsh_no_tree_spawn=1
    fi
fi

# A job may end before the training does: it then submits this script again, and
# that job goes on from the training's last checkpoint; 20 jobs at most. The
# run in runs/ has the job's name.
# shellcheck disable=SC2206  # ARGS is several words
training=(--name "$PBS_JOBNAME" ${ARGS:-})

# One job for one training: this ends here if another one has it, waiting or
# running, and also after 20 jobs.
python -m mpitrain chain begin --jobs 20 -- "${training[@]}"

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

# Of the time limit PBS says nothing before. So this script watches the clock, and
# sends USR1 to itself 120 s before.
limit=3600  # walltime, above: EDIT both
{ sleep $((limit - 120 - SECONDS)) && kill -USR1 $$; } &>/dev/null &
clock=$!

hosts=$(mktemp)
trap 'kill "$clock" 2>/dev/null || true; rm -f "$hosts" "${agent:-}"' EXIT

next=later
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    run python -m mpitrain hostfile --gpus ignore --probe \
        --output "$hosts" -- mpirun "${options[@]}"
    # This script runs once, on the first node. So does mpirun. No port: the ranks
    # find each other over MPI. (MPICH: `hostfile --format mpich`, -f in place of
    # --hostfile, and none of the options above.)
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

# After qdel this is the end; a job that is preempted PBS itself runs again.
if [[ $next != end && -z $terminated ]]; then
    # What stands on qsub's command line but ARGS and -N is not known here: write
    # into this script what the next job shall ask for, too.
    export ARGS=${ARGS:-}
    for pause in 5 10 20 0; do
        if id=$(qsub -N "$PBS_JOBNAME" -W "depend=afterany:$PBS_JOBID" \
            -v ARGS "$0"); then
            python -m mpitrain chain handed --to "$id" -- "${training[@]}"
            break
        fi
        sleep "$pause"
    done
fi
exit "$status"

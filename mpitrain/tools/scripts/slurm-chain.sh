
# A job may end before the training does: this one is then put into the queue
# again, up to {{jobs}} jobs in all, and goes on from the training's last checkpoint.
# The run in runs/ has the job's name.
training=(--name "$SLURM_JOB_NAME"{{words}} "$@")

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs.
python -m mpitrain chain begin --jobs {{jobs}} -- "${training[@]}"

# {{early}} s before its end SLURM sends USR1 to this script (--signal, above). mpirun
# passes USR2 on to the ranks: they save where they are, and stop. If they hang,
# mpirun is killed, and they with it. (MPICH's mpirun dies of USR2. With it, write
# trap '' USR1 for the line trap stop USR1: the ranks ask SLURM for their time, too.)
out_of_time= child=
stop() {
    out_of_time=--out-of-time
    if [[ -n $child ]]; then kill -USR2 "$child" || true; fi
}
trap stop USR1

# bash hears of a signal only while it waits, and the signal breaks that `wait`.
run() {
    "$@" &
    child=$!
    wait "$child" && status=0 || status=$?
    if [[ -n $out_of_time && $status == 138 ]]; then
        timeout {{patience}} tail --pid="$child" -f /dev/null ||
            kill -KILL "$child" || true  # or it has just ended
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
    run python -m mpitrain hostfile --gpus ignore --probe{{at_most}} \
        --output "$hosts" -- mpirun "${options[@]}"
    # This script runs once, on the first node. So does mpirun: it has srun start
    # the others, with this environment. No host and no port: the ranks find each
    # other over MPI. (MPICH: `hostfile --format mpich`, -f in place of --hostfile,
    # and no --prefix.)
    if [[ $status == 0 && -z $out_of_time ]]; then
        run mpirun "${options[@]}" --hostfile "$hosts" \
            python -m mpitrain "${training[@]}"
    fi
    # Finished? Stopped, and can go on? Failed, for the second time without progress?
    # `next` is here (start it again, in this job), later (in another) or end.
    # shellcheck disable=SC2086  # it may be nothing
    next=$(python -m mpitrain chain next --jobs {{jobs}} --status "$status" \
        $out_of_time -- "${training[@]}") || next=later
    if [[ $next != here ]]; then break; fi
done

if [[ $next != end ]]; then
    for pause in 5 10 20 0; do
        scontrol requeue "$SLURM_JOB_ID" && break  # the same job, its number, too
        sleep "$pause"
    done
fi
exit "$status"

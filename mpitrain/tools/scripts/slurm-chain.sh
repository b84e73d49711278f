
# A job may end before the training does: this one is then put into the queue
# again, as {{jobs}} jobs in all at most, and goes on from the training's last checkpoint.
# The run in runs/ has the job's name.
training=(--name "$SLURM_JOB_NAME"{{words}} "$@")

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs.
python -m mpitrain chain begin --jobs {{jobs}} -- "${training[@]}"

# {{early}} s before its end SLURM sends USR1 to this script (--signal, above). mpirun
# passes USR2 on to the ranks: they save where they are, and stop. If they hang,
# mpirun is killed, and they with it. (MPICH's mpirun dies of USR2. With it, write
# trap '' USR1 for the line trap stop USR1: the ranks ask SLURM for their time, too.)
mpirun= out_of_time=
stop() {
    out_of_time=--out-of-time
    if [[ -n $mpirun ]]; then kill -USR2 "$mpirun" || true; fi
}
trap stop USR1

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT

next=later status=1
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    # shellcheck disable=SC2086
    if python -m mpitrain hostfile --gpus ignore --probe{{at_most}} \
        --output "$hosts" -- mpirun "${options[@]}" && [[ -z $out_of_time ]]; then
        # This script runs once, on the first node. So does mpirun: it has srun
        # start the others, with this environment. No host and no port: the ranks
        # find each other over MPI. (MPICH: `hostfile --format mpich`, -f in place of
        # --hostfile, and no --prefix.)
        mpirun "${options[@]}" --hostfile "$hosts" \
            python -m mpitrain "${training[@]}" &
        mpirun=$!
        wait "$mpirun" && status=0 || status=$?
        if [[ -n $out_of_time && $status == 138 ]]; then  # USR1 broke this `wait`
            timeout {{patience}} tail --pid="$mpirun" -f /dev/null ||
                kill -KILL "$mpirun" || true  # or it has just ended
            wait "$mpirun" && status=0 || status=$?
        fi
        mpirun=
    fi
    # Finished? Stopped, and can go on? Failed, for the second time without progress?
    # `next` is here (start it again, in this job), later (in another) or end.
    # shellcheck disable=SC2086
    next=$(python -m mpitrain chain next --jobs {{jobs}} --status "$status" \
        $out_of_time -- "${training[@]}")
    if [[ $next != here ]]; then break; fi
done

if [[ $next == later ]]; then
    scontrol requeue "$SLURM_JOB_ID"  # the same job, under the same number
fi
exit "$status"


# A job may end before the training does: it then submits this script again, and
# that job goes on from the training's last checkpoint; {{jobs}} jobs at most. The
# run in runs/ has the job's name.
# shellcheck disable=SC2206  # ARGS is several words
training=(--name "$PBS_JOBNAME"{{words}} ${ARGS:-})

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs.
python -m mpitrain chain begin --jobs {{jobs}} -- "${training[@]}"

# PBS ends a job without a word before. So this script watches the clock and says
# it to itself, {{early}} s before. mpirun passes USR2 on to the ranks: they save where
# they are, and stop. If they hang, mpirun is killed, and they with it. (MPICH's
# mpirun dies of USR2. With it, write trap '' USR1 for the line trap stop USR1: the
# ranks ask PBS for their time, too.)
limit={{seconds}}  # walltime, above: EDIT both
out_of_time= child=
stop() {
    out_of_time=--out-of-time
    if [[ -n $child ]]; then kill -USR2 "$child" || true; fi
}
trap stop USR1
{ sleep $((limit - {{early}} - SECONDS)) && kill -USR1 $$; } &>/dev/null &
clock=$!

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
trap 'kill "$clock" 2>/dev/null || true; rm -f "$hosts" "${agent:-}"' EXIT

next=later
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    run python -m mpitrain hostfile --gpus ignore --probe{{at_most}} \
        --output "$hosts" -- mpirun "${options[@]}"
    # This script runs once, on the first node. So does mpirun. No port: the ranks
    # find each other over MPI. (MPICH: `hostfile --format mpich`, -f in place of
    # --hostfile, and none of the options above.)
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

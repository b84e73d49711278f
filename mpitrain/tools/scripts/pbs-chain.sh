
# A job may end before the training does: it then submits this script again, and
# that job goes on from the training's last checkpoint; {{jobs}} jobs at most. The
# run in runs/ has the job's name.
# shellcheck disable=SC2206  # ARGS is several words
training=(--name "$PBS_JOBNAME"{{words}} ${ARGS:-})

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs. AFTER is the job that submitted this one.
python -m mpitrain chain begin --jobs {{jobs}} --after "${AFTER:-}" -- "${training[@]}"

# PBS keeps what it runs in a file of its own, which goes with the job.
script=runs/.$PBS_JOBNAME.pbs
if [[ -z ${AFTER:-} ]]; then
    mkdir -p runs
    cp "$0" "$script"
fi

# PBS ends a job without a word before. So this script watches the clock and says
# it to itself, {{early}} s before. mpirun passes USR2 on to the ranks: they save where
# they are, and stop. If they hang, mpirun is killed, and they with it. (MPICH's
# mpirun dies of USR2. With it, write trap '' USR1 for the line trap stop USR1: the
# ranks ask PBS for their time, too.)
limit={{seconds}}  # walltime, above: EDIT both
mpirun= out_of_time=
stop() {
    out_of_time=--out-of-time
    if [[ -n $mpirun ]]; then kill -USR2 "$mpirun" || true; fi
}
trap stop USR1
{ sleep $((limit - {{early}} - SECONDS)) && kill -USR1 $$; } &>/dev/null &
clock=$!

hosts=$(mktemp)
trap 'kill "$clock" 2>/dev/null; rm -f "$hosts" "${agent:-}"' EXIT

next=later status=1
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    # shellcheck disable=SC2086
    if python -m mpitrain hostfile --gpus ignore --probe{{at_most}} \
        --output "$hosts" -- mpirun "${options[@]}" && [[ -z $out_of_time ]]; then
        # This script runs once, on the first node. So does mpirun. No port: the
        # ranks find each other over MPI. (MPICH: `hostfile --format mpich`, -f in
        # place of --hostfile, and none of the options above.)
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
    # What stands on qsub's command line but ARGS and -N is not known here: write
    # into this script what the next job shall ask for, too.
    export ARGS=${ARGS:-} AFTER=$PBS_JOBID
    qsub -N "$PBS_JOBNAME" -W "depend=afterany:$PBS_JOBID" -v ARGS,AFTER "$script" ||
        echo "no further job: submit $script yourself, with -N $PBS_JOBNAME" >&2
fi
exit "$status"

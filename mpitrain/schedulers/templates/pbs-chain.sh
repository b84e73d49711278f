
# A job may end before the training does: it then submits this script again, and
# that job goes on from the training's last checkpoint; {{jobs}} jobs at most. The
# run in runs/ has the job's name.
# shellcheck disable=SC2206  # ARGS is several words
training=(--name "$PBS_JOBNAME"{{words}} ${ARGS:-})

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs.
python -m mpitrain chain begin --jobs {{jobs}} -- "${training[@]}"

{{run}}

# Of the time limit PBS says nothing before. So this script watches the clock, and
# sends USR1 to itself {{early}} s before.
limit={{seconds}}  # walltime, above: EDIT both
{ sleep $((limit - {{early}} - SECONDS)) && kill -USR1 $$; } &>/dev/null &
clock=$!

hosts=$(mktemp)
trap 'kill "$clock" 2>/dev/null || true; rm -f "$hosts" "${agent:-}"' EXIT

{{loop}}

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

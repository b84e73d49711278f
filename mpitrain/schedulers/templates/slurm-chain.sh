
# A job may end before the training does: this one is then put into the queue
# again, up to {{jobs}} jobs in all, and goes on from the training's last checkpoint.
# The run in runs/ has the job's name.
training=(--name "$SLURM_JOB_NAME"{{words}} "$@")

# One job for one training: this ends here if another one has it, waiting or
# running, and also after {{jobs}} jobs.
python -m mpitrain chain begin --jobs {{jobs}} -- "${training[@]}"

# {{early}} s before its end SLURM sends USR1 to this script (--signal, above).
{{run}}

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
export SLURM_OVERLAP=1  # what is left of a lost node must not keep srun waiting

{{loop}}

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

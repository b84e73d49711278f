next=later
while [[ -z $out_of_time ]]; do
    # A node that does not answer, or whose GPU is broken, is left out.
    run python -m mpitrain hostfile --gpus ignore --probe{{at_most}} \
        --output "$hosts" -- mpirun "${options[@]}"
{{mpirun}}
    if [[ -n $out_of_time ]]; then
        status=75  # nothing was started, and nothing has failed
    elif [[ $status == 0 ]]; then
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

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

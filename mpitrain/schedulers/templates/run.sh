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
        for ((i = 0; i < {{patience}}; i++)); do
            kill -0 "$child" 2>/dev/null || break
            sleep 1 || true
        done
        kill -KILL "$child" 2>/dev/null || true
        wait "$child" && status=0 || status=$?
    fi
    child=
}

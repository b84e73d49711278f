
{{run}}

# This script runs once, on the first node. So does mpirun. No number of
# processes, no port: the ranks find each other over MPI. (MPICH's mpirun reads
# $PBS_NODEFILE by itself and goes by ssh: with it, leave out all the options.)
# shellcheck disable=SC2086  # ARGS is several words
{{launch}}mpirun "${options[@]}" python -m mpitrain{{words}} ${ARGS:-}
{{end}}

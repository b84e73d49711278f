
{{run}}

# This script runs once, on the first node. So does mpirun: it asks SLURM for
# nodes and slots, and has srun start the others, with this environment. No
# number of processes, no host, no port: the ranks find each other over MPI.
# (With MPICH's mpirun leave --prefix out; the rest is the same.)
{{launch}}mpirun "${options[@]}" python -m mpitrain{{words}} "$@"
{{end}}

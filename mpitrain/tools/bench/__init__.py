"""`python -m mpitrain bench WHAT`: how fast this machine does parts of a training.

`data` times the loader alone, without MPI. `scaling` times whole trainings on 1, 2, 4
and more ranks, each started by its own mpirun.
"""

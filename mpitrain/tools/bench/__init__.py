"""`python -m mpitrain bench data` and `bench scaling`: how fast a training is here.

`data` times data loading alone, without MPI. `scaling` times whole trainings on 1, 2, 4
and more ranks, each started by its own mpirun.
"""

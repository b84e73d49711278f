"""`python -m mpitrain bench WHAT`: how fast this machine does parts of a training.

`data` times the loader alone, without MPI.
"""

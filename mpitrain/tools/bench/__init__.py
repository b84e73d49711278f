"""`python -m mpitrain bench WHAT`: how fast this machine does parts of a training.

`data` times the loader alone, without MPI. `scaling` times steps on 1, 2, 4 ... ranks:

    cells       what is timed -> trial: one round of it, on a part of the ranks
    prediction  what was to be expected
    figures     rows of both, and the table; plot: the picture
"""

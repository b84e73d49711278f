"""`python -m mpitrain check`: look before you queue.

Under mpirun `ranks` goes through it in the order of the screen: the start, which nodes
reach each other (`pairs`), what each rank and node is like (`facts`), collectives,
gradients, bandwidth, and what is to be said of all that (`findings`). Without mpirun
`login` says what can be known where MPI does not start.
"""

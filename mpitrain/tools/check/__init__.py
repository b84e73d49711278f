"""`python -m mpitrain check`: checks to run before a job waits in a queue.

Under mpirun `job` checks the ranks and nodes (`environment`) and torch's collectives
(`communication`). Without mpirun `login` checks what can be known where MPI does not
start. Both fill a `report.Report`: one dictionary, printed as JSON or as text.
"""

"""Who still makes progress: hangs get a name, and no rank outlives its job.

Beside every rank runs a small process, its *sidecar* (`sidecar`), started before MPI.
It needs neither the rank's interpreter nor its lock: it reads where the rank is from a
page of shared memory (`page`), and has its stacks written by a signal. The sidecars
report to rank zero's, the *center* (`center`), which sees that all stand still, asks
for the stacks, says who did not arrive (`words`), and has the job ended. `watched` is
the rank's own side.

Imports little from outside the standard library: a sidecar starts in some 30 ms.
"""

"""Detects ranks that hang or die, names them, and ends the job.

A *sidecar* process runs beside every rank, started before MPI. It needs neither the
rank's interpreter nor its lock: it reads the rank's progress from shared memory
(`heartbeat`), and a signal makes the rank write its stacks. The sidecars report to rank
zero's, the *coordinator*, which detects that all ranks stand still, collects their
stacks, says who did not arrive (`report`) and has the job ended. `client` is the rank's
side, `links` the connections, `process` what /proc says.

Imports little but the standard library: a sidecar starts in some 30 ms.
"""

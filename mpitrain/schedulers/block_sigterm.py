"""`python -m mpitrain.schedulers.block_sigterm PROGRAM WORDS`: a program without TERM.

For job scripts. At the end of a job the scheduler sends TERM to all of its processes;
mpirun's daemons, or the ssh to another node, would end the ranks at once. With TERM
blocked they live on; the ranks, for which mpirun unblocks it, stop with a checkpoint.
Tried with Open MPI 5.0.11.
"""

import os
import signal
import sys

if __name__ == "__main__":
    program, *words = sys.argv[1:]
    if program.endswith("pbs_tmrsh"):  # it takes no command line, but words
        host, *command = words
        words = [host, "/bin/sh", "-c", " ".join(command)]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execvp(program, [program, *words])

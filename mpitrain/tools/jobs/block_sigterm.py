"""`python -m mpitrain.tools.jobs.block_sigterm PROGRAM WORDS`: a program without TERM.

USR1 and USR2 are blocked, too: with `scancel --signal` users send those to all.

For job scripts. At the end of a job the scheduler sends TERM to all of its processes;
mpirun's daemons, or the ssh to another node, would end the ranks at once. With TERM
blocked they live on; the ranks, for which mpirun unblocks it, stop with a checkpoint.
Tried with Open MPI 5.0.11.
"""

import os
import shlex
import signal
import sys

if __name__ == "__main__":
    program, *words = sys.argv[1:]
    # Open MPI's line for the remote shell has its --prefix, and where that leads to,
    # without quotes.
    for prefix in dict.fromkeys((sys.prefix, os.path.realpath(sys.prefix))):
        words = [word.replace(prefix, shlex.quote(prefix)) for word in words]
    if program.endswith("pbs_tmrsh"):  # it takes no command line, but words
        host, *command = words
        words = [host, "/bin/sh", "-c", " ".join(command)]
    blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    # What is blocked stays so after exec; a handler would not.
    os.execvp(program, [program, *words])

"""`python -m mpitrain.schedulers.block_sigterm PROGRAM WORDS`: become a program without TERM.

For job scripts. A scheduler sends TERM to all processes of a job, and kills them some
seconds later. mpirun and its daemons would end the ranks at once. Blocked, the signal
does nothing to them (they unblock it for the ranks), and the ranks stop with a
checkpoint. Tried with Open MPI 5.0.11.
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execvp(sys.argv[1], sys.argv[1:])

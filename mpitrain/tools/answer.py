"""What `hostfile --probe` starts on each node: it answers with the GPUs that compute.

Started as ``python -m mpitrain.tools.answer``, by mpirun, once on each node; no
MPI. What is broken here raises, or never ends: either way the node is left out.
"""

from __future__ import annotations

import socket

SIGN = "mpitrain answers:"
"""Before the answer, on the line: launchers and modules print, too."""


def main() -> None:
    """Compute on every GPU that torch sees, and say where and how many there are."""
    import torch

    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        ones = torch.ones(64, device=f"cuda:{index}")
        assert (ones @ ones).item() == 64, f"cuda:{index} cannot add up"
    print(f"{SIGN} {socket.gethostname()} {num_gpus} GPUs", flush=True)


if __name__ == "__main__":
    main()

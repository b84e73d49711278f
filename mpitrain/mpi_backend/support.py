"""Whether the torch that is here takes backends written in Python. Starts no MPI."""

from __future__ import annotations


def why_not_ours() -> str:
    """Say why the mpi4py backend cannot run here; ``""``: it can.

    Torch before 2.14 has the class that a backend derives from, but no constructor of
    it for Python (tried: 2.11 and 2.13).
    """
    import torch
    from torch._C._distributed_c10d import Backend

    class Probe(Backend):
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return f"torch {torch.__version__} takes no backend written in Python"
    return ""

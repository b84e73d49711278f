"""The torch.distributed backend ``mpi4py``, written in Python.

    import torch.distributed as dist

    dist.init_process_group("mpi4py")

Torch finds the backend by its name where mpitrain is installed. Importing this module
registers it, too. docs/explanation/architecture.md lists the modules.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch.distributed as dist

from mpitrain.torch_compat import patch_work

if TYPE_CHECKING:
    from mpitrain.backend.backend import MpiBackend
    from mpitrain.torch_compat import DistributedBackendOptions


@functools.cache
def register() -> None:
    """Register the backend with torch. A second call does nothing."""
    patch_work()
    dist.Backend.register_backend(
        "mpi4py", _create, extended_api=True, devices=["cpu", "cuda", "xpu"]
    )


def _create(given: DistributedBackendOptions, options: object) -> MpiBackend:
    from mpitrain.backend.backend import create  # it starts MPI

    return create(given, options)


register()

"""The torch.distributed backend ``mpi4py``, written in Python.

    import torch.distributed as dist

    dist.init_process_group("mpi4py")

Torch finds the backend by its name where mpitrain is installed. Importing this module
registers it, too.

    backend        the methods that torch calls; group: state of one process group
    op_queue       runs operations in order; the Work objects that torch returns
    on_node        collectives in shared memory; shared_buffer: its layout and barrier;
                   shared_memory: creates it
    inter_node     collectives through MPI; p2p: send and recv
    reductions     how tensors are combined; tensors: contiguous tensors on the host
    desync_report  which ranks are missing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mpitrain.mpi_backend.errors import NAME
from mpitrain.torch_compat import is_backend_registered, patch_work

if TYPE_CHECKING:
    from mpitrain.mpi_backend.backend import MpiBackend
    from mpitrain.torch_compat import DistributedBackendOptions


def register() -> None:
    """Register the backend with torch. A second call does nothing."""
    if not is_backend_registered(NAME):
        patch_work()
        dist.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(
    distributed_options: DistributedBackendOptions, options: object
) -> MpiBackend:
    from mpitrain.mpi_backend.backend import create  # it starts MPI

    return create(distributed_options, options)


register()

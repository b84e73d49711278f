"""torch.distributed over MPI, with the torch that everybody has.

    import torch.distributed as dist

    dist.init_process_group("mpi4py")

Torch finds it by its name where mpitrain is installed, and loads it when it is asked
for; importing this module does the same.

    backend     made by torch for each group, of `members`; `support`: which torch can
    operations  what torch calls; `group` has what the ranks of a group share
    line        the order of operations; `works`: what is handed out for one
    on_node     collectives through shared memory: `board`; `sharing` makes one
    over_mpi    collectives through MPI; `points`: messages
    reductions  how tensors become one; `tensors`: in host memory, without gaps
    failures    what goes wrong; `whereabouts`: who is missing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpitrain.mpi_backend.works import teach_work

if TYPE_CHECKING:
    from mpitrain.mpi_backend.backend import MpiBackend

NAME = "mpi4py"
"""Under which torch knows it; the name ``mpi`` is torch's own."""


def register() -> None:
    """Tell torch of the backend. A second call does nothing."""
    if NAME.upper() in dist.Backend._plugins:  # noqa: SLF001 - there is no question for it
        return
    teach_work()
    dist.Backend.register_backend(
        NAME, _create, extended_api=True, devices=["cpu", "cuda"]
    )


def _create(opts: Any, options: object) -> MpiBackend:
    from mpitrain.mpi_backend.backend import create

    return create(opts, options)


register()

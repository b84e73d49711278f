"""The variables that torchrun's scripts expect, from what MPI knows."""

from __future__ import annotations

from mpitrain.world import World


def torchrun_variables(world: World) -> dict[str, str]:
    """Return what libraries that ask for ``RANK`` and its like shall find.

    Args:
        world: Where this process stands, with the store's address.

    Returns:
        Variables and values, as torchrun words them
        (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
    """
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }

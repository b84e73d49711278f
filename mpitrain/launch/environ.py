"""The variables that torchrun's scripts expect, from what MPI knows."""

from __future__ import annotations

from collections.abc import Mapping

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


def script_variables(
    world: World, run_id: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return all that a script written for torchrun may look for.

    ``LOCAL_RANK`` is what scripts hand to ``torch.cuda.set_device``, so on GPUs it is
    the index of this rank's own one. That is the rank on its node, except where ranks
    share GPUs or each sees but one; there torchrun's ``--virtual-local-rank`` says 0 to
    several ranks of a node, too.

    Args:
        world: Where this process stands, with the store's address.
        run_id: A name of this start, equal on all ranks.
        environ: The environment, for what the user has set.

    Returns:
        Variables and values. The list is that of torch 2.15,
        ``torch/distributed/elastic/agent/server/local_elastic_agent.py``; there is no
        agent, so what only an agent reads is left out.
    """
    own_gpu = world.device.partition(":")[2]
    return torchrun_variables(world) | {
        "LOCAL_RANK": own_gpu or str(world.local_rank),
        "GROUP_RANK": str(world.node_rank),
        "GROUP_WORLD_SIZE": str(world.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.world_size),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # With it env:// makes every rank, zero too, a client of the store that stands.
        # A world of one has none: the script, or what it starts, opens its own.
        "TORCHELASTIC_USE_AGENT_STORE": str(world.world_size > 1),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
        ),
    }

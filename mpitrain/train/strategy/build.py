"""Which strategy a configuration asks for, if this job can do it."""

from __future__ import annotations

from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.train.strategy.base import Strategy
from mpitrain.train.strategy.bitwise import (
    BitwiseDDPStrategy,
    BitwiseFSDPStrategy,
    BitwiseSingleStrategy,
)
from mpitrain.train.strategy.ddp import DDPStrategy
from mpitrain.train.strategy.dp import DPStrategy
from mpitrain.train.strategy.fsdp import FSDPStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    it.name: it for it in (Strategy, DDPStrategy, FSDPStrategy, DPStrategy)
}

BITWISE: dict[str, type[Strategy]] = {
    it.name: it
    for it in (BitwiseSingleStrategy, BitwiseDDPStrategy, BitwiseFSDPStrategy)
}


def choose_strategy(
    config: TrainConfig, world: World, custom: type[Strategy] | None = None
) -> type[Strategy]:
    """Return the class of the configured strategy, or a custom one.

    Raises:
        UsageError: This job cannot do it; on every rank.
    """
    if custom is not None:
        if not (isinstance(custom, type) and issubclass(custom, Strategy)):
            raise UsageError(
                f"strategy={custom!r}; expected a class of mpitrain.Strategy, not an "
                "object. A name is TrainConfig(strategy=...)"
            ).on_all_ranks()
        if config.bitwise or config.strategy != "auto":
            raise UsageError(
                f"strategy={custom.__name__} does not go with bitwise or strategy of "
                "the configuration; expected one of both"
            ).on_all_ranks()
        return custom
    name = config.strategy
    if name == "auto":
        name = "ddp" if world.world_size > 1 else "single"
    # Of facts that are equal on all ranks: each finds the same error.
    error = _find_error(name, config, world)
    if error:
        raise UsageError(error).on_all_ranks()
    return (BITWISE if config.bitwise else STRATEGIES)[name]


def _find_error(strategy: str, config: TrainConfig, world: World) -> str:
    if strategy in ("dp", "single") and world.world_size > 1:
        return (
            f"--strategy {strategy} is for one process, found {world.world_size} "
            "ranks; start one (without mpirun), or take ddp"
        )
    on_cpu = world.device == "cpu"
    if strategy == "dp" and on_cpu:
        return (
            "--strategy dp spreads a batch over the GPUs of one process, found none; "
            "expected GPUs, or ddp, which is faster there, too"
        )
    if config.sync_batchnorm and on_cpu:
        return (
            "--sync-batchnorm: torch has it for GPUs alone (SyncBatchNorm expects "
            "input tensor to be on GPU), found device cpu; leave it out, or use a norm "
            "that does not mix samples, such as group norm"
        )
    if strategy == "dp" and (config.compile or config.activation_checkpointing):
        return (
            "--strategy dp copies the model in each step, which --compile and "
            "--activation-checkpointing do not survive; expected ddp"
        )
    if strategy == "fsdp" and world.backend == "gloo" and not on_cpu:
        # Its all-gather of several tensors takes a GPU's address for one of the host.
        return (
            "--strategy fsdp: gloo has no collectives of FSDP for GPUs; expected nccl "
            "(one rank per GPU, no --backend gloo), mpi4py (torch 2.14 or newer), or "
            "--strategy ddp"
        )
    if config.cpu_offload and on_cpu:
        return "--cpu-offload: weights are in host memory already"
    return ""

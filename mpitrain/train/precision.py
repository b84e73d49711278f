"""Precision: dtypes by name, autocast, and torch's settings of the process."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mpitrain.config import StrategyConfig
from mpitrain.launch.job import Job

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def is_16_bit(config: StrategyConfig) -> bool:
    """Return whether the passes compute in 16 bits."""
    return DTYPES[config.precision].itemsize == 2


def autocast(config: StrategyConfig, device: str) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` for a 16-bit precision, or a context without effect."""
    if is_16_bit(config):
        return torch.autocast(torch.device(device).type, DTYPES[config.precision])
    return nullcontext()


def configure_torch(
    *, tf32: bool, is_deterministic: bool, num_threads: int | None = None
) -> None:
    """Set what the bits of a pass depend on, before the device is used.

    For the whole process. A training without determinism, or without a number of
    threads, takes back what one before it has set.
    """
    # The job's: a `Trainer` after this one is another object in the same process.
    previous = Job.current.torch_settings if Job.current else {}
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # True by default
    if is_deterministic:
        # cuBLAS reads it when it starts, and torch raises an error without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.are_deterministic_algorithms_enabled():
            previous["deterministic"] = False
        torch.use_deterministic_algorithms(True)
        # It chooses kernels by their time, which differs from run to run.
        torch.backends.cudnn.benchmark = False
    elif "deterministic" in previous:
        torch.use_deterministic_algorithms(previous.pop("deterministic"))
    if num_threads is not None:
        if (before := torch.get_num_threads()) != num_threads:
            previous["num_threads"] = before
        torch.set_num_threads(num_threads)
    elif "num_threads" in previous:
        torch.set_num_threads(previous.pop("num_threads"))

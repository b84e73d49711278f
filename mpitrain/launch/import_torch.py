"""Import torch, without what this machine has no use for."""

from __future__ import annotations

import ctypes
import sys

# Of the process, as `sys.modules` is; forks of a fork server inherit both.
WITH_TORCH: set[str] = set()
"""Top-level names in `sys.modules` right after the import of torch; empty before."""


def import_torch() -> None:
    """Import torch; without the package ``cuda.bindings`` if there is no CUDA driver.

    It takes 7 % of the CPU time of the import (torch 2.14.1). Torch does without where
    it is not installed, as beside torch's builds for CPUs.
    """
    name = "cuda.bindings"
    is_hidden = not {"torch", name} & sys.modules.keys() and not _has_cuda_driver()
    if is_hidden:
        sys.modules[name] = None  # type: ignore[assignment] # as if not installed
    try:
        import torch.distributed  # noqa: F401
    finally:
        # Torch's import alone does without: a script may want the package itself.
        if is_hidden:
            del sys.modules[name]
    if not WITH_TORCH:
        WITH_TORCH.update(it.partition(".")[0] for it in sys.modules)


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

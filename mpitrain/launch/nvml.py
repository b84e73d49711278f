"""The NVIDIA driver's own list of GPUs, which starts no CUDA.

NVML is a C library that comes with every NVIDIA driver, with an interface that does
not change (https://docs.nvidia.com/deploy/nvml-api/), so it is called as it is: a
package for it would be one more thing to install, and torch's own calls are private.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"

EXCLUSIVE_MODES = {1, 3}
"""Compute modes in which one process at a time may use the GPU."""

PROHIBITED_MODE = 2
"""The compute mode in which no process may use the GPU."""

_TEXT_BYTES = 96


class _Refused(Exception):
    """A call that did not succeed."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One physical GPU."""

    uuid: str
    """Such as ``"GPU-6fb6..."``."""
    name: str
    """Its model, such as ``"NVIDIA H200"``."""
    compute_mode: int = 0
    """Who may use it: 0 for everybody, see `EXCLUSIVE_MODES`, `PROHIBITED_MODE`."""
    mig: bool = False
    """Whether it is cut into MIG slices, which are the devices then."""


def cards(library: str = LIBRARY) -> tuple[Card, ...] | None:
    """List this host's GPUs in the order of their PCI buses.

    Args:
        library: The library's name or path.

    Returns:
        The GPUs that this process may ask for; ``None`` where NVML does not tell: no
        driver, another vendor's, or a GPU that a container hides.
    """
    try:
        with _opened(library) as nvml:
            count = ctypes.c_uint()
            _call(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
            return tuple(_card(nvml, index) for index in range(count.value))
    except (OSError, AttributeError, _Refused):
        return None


def parent_of(mig_uuid: str, library: str = LIBRARY) -> str | None:
    """Return the UUID of the GPU that a MIG slice is cut from.

    Args:
        mig_uuid: Such as ``"MIG-..."``.
        library: The library's name or path.

    Returns:
        The UUID; ``None`` where NVML does not tell.
    """
    try:
        with _opened(library) as nvml:
            slice_, parent = ctypes.c_void_p(), ctypes.c_void_p()
            asked = ctypes.c_char_p(mig_uuid.encode())
            _call(nvml.nvmlDeviceGetHandleByUUID, asked, ctypes.byref(slice_))
            up = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
            _call(up, slice_, ctypes.byref(parent))
            return _text(nvml.nvmlDeviceGetUUID, parent)
    except (OSError, AttributeError, _Refused):
        return None


@contextlib.contextmanager
def _opened(library: str) -> Iterator[ctypes.CDLL]:
    nvml = ctypes.CDLL(library)
    _call(nvml.nvmlInit_v2)
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _card(nvml: ctypes.CDLL, index: int) -> Card:
    handle = ctypes.c_void_p()
    number = ctypes.c_uint(index)
    _call(nvml.nvmlDeviceGetHandleByIndex_v2, number, ctypes.byref(handle))
    mode, mig, pending = ctypes.c_uint(0), ctypes.c_uint(0), ctypes.c_uint(0)
    with contextlib.suppress(_Refused):  # old GPUs know neither
        _call(nvml.nvmlDeviceGetComputeMode, handle, ctypes.byref(mode))
    with contextlib.suppress(_Refused, AttributeError):  # nor old drivers
        asked = (ctypes.byref(mig), ctypes.byref(pending))
        _call(nvml.nvmlDeviceGetMigMode, handle, *asked)
    return Card(
        uuid=_text(nvml.nvmlDeviceGetUUID, handle),
        name=_text(nvml.nvmlDeviceGetName, handle),
        compute_mode=mode.value,
        mig=bool(mig.value),
    )


def _text(function: ctypes._NamedFuncPointer, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(function, handle, buffer, ctypes.c_uint(_TEXT_BYTES))
    return buffer.value.decode(errors="replace")


def _call(function: ctypes._NamedFuncPointer, *arguments: object) -> None:
    if function(*arguments) != 0:
        raise _Refused

"""How the tensors of several ranks are combined: by torch, for all its types.

MPI has no bfloat16 and no float16. They are widened to float32, exactly, and rounded
once at the end. Booleans are combined as torch does: SUM and MAX are `or`, PRODUCT and
MIN are `and`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

_BITWISE = {"BAND", "BOR", "BXOR"}
_WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

_MPI_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.bool: "UINT8_T",  # 0 and 1
}

_MPI_OPS = {"AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD"}  # else torch's name
_MPI_OPS_OF_BOOL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}


@dataclass(frozen=True)
class Reduction:
    """One way to combine tensors of one type."""

    name: str  # torch's
    dtype: torch.dtype
    world_size: int  # for AVG
    factor: float | Tensor | None = None  # of PREMUL_SUM, each rank's own

    @property
    def wide(self) -> torch.dtype:
        """The type in which it is computed."""
        return _WIDENED.get(self.dtype, self.dtype)

    def scaled(self, tensor: Tensor) -> Tensor:
        """Return what a rank contributes: its tensor, times the factor if any."""
        return tensor if self.factor is None else tensor.clone().mul_(self.factor)

    def combine(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Combine tensors of `dtype` in the order of the ranks into one of `wide`.

        `out` may be the first of `parts`.
        """
        function = _COMBINE[self.name]
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        first = parts[0] if self.wide is self.dtype else parts[0].to(self.wide)
        function(first, parts[1], out=out)
        for part in parts[2:]:
            function(out, part, out=out)

    def finish(self, out: Tensor) -> None:
        """Divide by the number of ranks for AVG, in place."""
        if self.name == "AVG":
            is_integer = not (out.dtype.is_floating_point or out.dtype.is_complex)
            out.div_(self.world_size, rounding_mode="trunc" if is_integer else None)

    def mpi_handles(self) -> tuple[MPI.Datatype, MPI.Op]:
        """Return MPI's type and operation for tensors of `wide`."""
        from mpi4py import MPI

        name = _MPI_OPS.get(self.name, self.name)
        if self.dtype is torch.bool:
            name = _MPI_OPS_OF_BOOL.get(self.name, name)
        datatype: MPI.Datatype = getattr(MPI, _MPI_TYPES[self.wide])
        operation: MPI.Op = getattr(MPI, name)
        return datatype, operation


def reduction_of(op: Any, dtype: torch.dtype, world_size: int) -> Reduction:
    """Return the reduction of a ``ReduceOp``; a ValueError: not for this type."""
    kind = getattr(op, "op", op)
    reduction = _reduction_of(kind.name, dtype, world_size)
    if reduction.name == "PREMUL_SUM":
        return replace(reduction, factor=op.factor)
    return reduction


@functools.cache
def _reduction_of(name: str, dtype: torch.dtype, world_size: int) -> Reduction:
    if name not in _COMBINE:
        raise ValueError(f"mpi4py: no reduction {name!r}; there are {list(_COMBINE)}")
    has_fractions = dtype.is_floating_point or dtype.is_complex
    types: dict[torch.dtype, object] = {**_MPI_TYPES, **_WIDENED}
    if dtype not in types or (
        (name in _BITWISE and has_fractions)
        or (name in ("MIN", "MAX") and dtype.is_complex)
        or (name == "AVG" and dtype is torch.bool)
        or (name == "PREMUL_SUM" and not has_fractions)
    ):
        raise ValueError(f"mpi4py: {name} is not defined for {dtype}")
    return Reduction(name, dtype, world_size)

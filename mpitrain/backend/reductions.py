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

_MPI_OPS = {"AVG": "SUM", "PREMUL_SUM": "SUM", "PRODUCT": "PROD"}
"""The others have torch's name."""

_MPI_OPS_OF_BOOL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}


@dataclass(frozen=True)
class Reduction:
    """One way to combine tensors of one type."""

    name: str
    """Torch's, such as ``"SUM"``."""
    dtype: torch.dtype
    world_size: int
    """Ranks of the group, for AVG."""
    factor: float | Tensor | None = None
    """Of PREMUL_SUM: every rank multiplies its tensor by its own factor first."""

    @property
    def wide(self) -> torch.dtype:
        """The type in which it is computed."""
        return _WIDENED.get(self.dtype, self.dtype)

    def prepare(self, tensor: Tensor) -> None:
        """Multiply a rank's own tensor, in place, before it is combined."""
        if self.factor is not None:
            tensor.mul_(self.factor)

    def combine(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Combine the ranks' tensors in the order of the ranks.

        Args:
            parts: One of each rank, of `dtype` and one shape.
            out: The result, of `wide` and that shape; may be the first of `parts`.
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
    """Return the reduction of torch's ``ReduceOp`` for a type.

    Raises:
        ValueError: It is not defined for that type.
    """
    kind = getattr(op, "op", op)
    reduction = _reduction_of(kind.name, dtype, world_size)
    if reduction.name == "PREMUL_SUM":
        return replace(reduction, factor=op.factor)
    return reduction


@functools.cache
def _reduction_of(name: str, dtype: torch.dtype, world_size: int) -> Reduction:
    if name not in _COMBINE:
        raise ValueError(f"mpi4py: no reduction {name!r}; there are {list(_COMBINE)}")
    if _WIDENED.get(dtype, dtype) not in _MPI_TYPES:
        raise ValueError(
            f"mpi4py: {name} of {dtype} cannot be computed; expected one of "
            f"{', '.join(str(t) for t in (*_MPI_TYPES, *_WIDENED))}"
        )
    if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"mpi4py: {name} is for integers and booleans, found {dtype}")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ValueError(f"mpi4py: complex numbers have no {name}, found {dtype}")
    if name == "AVG" and dtype is torch.bool:
        raise ValueError("mpi4py: booleans have no AVG")
    if name == "PREMUL_SUM" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"mpi4py: PREMUL_SUM is for floating point, found {dtype}")
    return Reduction(name, dtype, world_size)

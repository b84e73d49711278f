"""How tensors of several ranks become one: by torch itself, so for all its types.

MPI has no bfloat16 and no half floats. Those are widened to float32, exactly, and
rounded once, at the end. Booleans are combined as torch combines them: sum and max are
`or`, product and min are `and`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[str, Combine] = {
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

_MPI_OPS = {
    "SUM": "SUM",
    "AVG": "SUM",
    "PREMUL_SUM": "SUM",
    "PRODUCT": "PROD",
    "MIN": "MIN",
    "MAX": "MAX",
    "BAND": "BAND",
    "BOR": "BOR",
    "BXOR": "BXOR",
}

_MPI_OPS_OF_BOOL = {"SUM": "LOR", "MAX": "LOR", "PRODUCT": "LAND", "MIN": "LAND"}


@dataclass(frozen=True)
class Reduction:
    """One way to combine tensors of one type."""

    name: str
    """As torch has it: ``"SUM"``."""
    dtype: torch.dtype
    """Of the tensors."""
    factor: float | torch.Tensor | None = None
    """Of PREMUL_SUM: every rank's tensor is multiplied by its own before."""

    @property
    def wide(self) -> torch.dtype:
        """The type in which it is computed."""
        return _WIDENED.get(self.dtype, self.dtype)

    def prepare(self, tensor: torch.Tensor) -> None:
        """Change a rank's own tensor, in place, before it is combined."""
        if self.factor is not None:
            tensor.mul_(self.factor)

    def combine(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine the ranks' tensors in the order of the ranks.

        Args:
            parts: One of each rank, of `dtype` and of one shape.
            out: Where the result goes, of `wide` and of that shape; may be one of
                `parts` if that is the first.
        """
        function = _COMBINE[self.name]
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        first = parts[0] if self.wide is self.dtype else parts[0].to(self.wide)
        function(first, parts[1], out=out)
        for part in parts[2:]:
            function(out, part, out=out)

    def finish(self, out: torch.Tensor, world_size: int) -> None:
        """Do what is left once all parts are combined, in place."""
        if self.name != "AVG":
            return
        if out.dtype.is_floating_point or out.dtype.is_complex:
            out.div_(world_size)
        else:
            out.div_(world_size, rounding_mode="trunc")

    def of_mpi(self) -> tuple[MPI.Datatype, MPI.Op]:
        """Return MPI's type and operation for tensors of `wide`."""
        from mpi4py import MPI

        names = _MPI_OPS_OF_BOOL if self.dtype is torch.bool else _MPI_OPS
        name = names.get(self.name, _MPI_OPS[self.name])
        datatype: MPI.Datatype = getattr(MPI, _MPI_TYPES[self.wide])
        operation: MPI.Op = getattr(MPI, name)
        return datatype, operation


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """Understand what torch asks for.

    Args:
        op: Torch's operation, a ``ReduceOp`` or one of its kinds.
        dtype: Of the tensors.

    Raises:
        ValueError: It cannot be done for that type.
    """
    kind = getattr(op, "op", op)
    name: str = kind.name
    if name == "PREMUL_SUM":
        return replace(_reduction_of(name, dtype), factor=op.factor)
    return _reduction_of(name, dtype)


@functools.cache
def _reduction_of(name: str, dtype: torch.dtype) -> Reduction:
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
    return Reduction(name, dtype)

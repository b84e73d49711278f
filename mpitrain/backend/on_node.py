"""Collectives of ranks on one node, through the memory that they share.

Each has three steps: write what others need into the shared buffer, wait in its
barrier, read. Tensors larger than a slot go in chunks, in the two halves of the buffer
in turn, so that one barrier per chunk is enough; large reductions take one more.

All methods are collective over the node. `deadline` is on the monotonic clock. They
raise what `SharedBuffer.barrier` raises, and a GroupError if one rank's own tensors do
not fit. Data that is not reduced is ``uint8 (N,)``.
"""

# ruff: noqa: D102 - the collectives are torch.distributed's

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpitrain.backend.op_queue import GroupError
from mpitrain.backend.reductions import Reduction
from mpitrain.backend.shared_buffer import OpSignature, SharedBuffer, op_signature
from mpitrain.backend.tensors import Tensors
from mpitrain.torch_compat import foreach_copy

DIRECT_BYTES = 256 << 10  # up to this size every rank reads all tensors: one barrier
DIRECT_BYTES_OF_ALL = 2 << 20  # the same limit for the tensors of all ranks together
INTER_NODE_EXTRA_SECONDS = 5.0  # how much longer to wait for a reduction over nodes
_ALIGNMENT = 64  # pieces begin on a cache line, in bytes

# All-reduces a tensor with those of other nodes, in place, until a deadline.
InterNodeReduce = Callable[[Tensor, Reduction, float], None]


class NodeCollectives:
    """The collectives of one group whose ranks share memory.

    With several nodes the first `num_reducers` ranks of each reduce a piece, and then
    combine it with those of other nodes by `inter_node_reduce`. With one all ranks do.
    """

    def __init__(
        self,
        buffer: SharedBuffer,
        *,
        num_reducers: int = 0,
        inter_node_reduce: InterNodeReduce | None = None,
    ) -> None:
        self.buffer = buffer
        self.rank = buffer.local_rank
        self.size = buffer.size
        self._is_one_node = num_reducers == 0
        self._num_reducers = num_reducers or buffer.size
        self._inter_node_reduce = inter_node_reduce
        fair_bytes = DIRECT_BYTES_OF_ALL // self.size
        self._direct_bytes = min(DIRECT_BYTES, fair_bytes, buffer.slot_bytes)

    def barrier(self, deadline: float) -> None:
        self.buffer.barrier(op_signature("barrier"), deadline)

    # --- reductions -------------------------------------------------------------------

    def all_reduce(self, data: Tensor, reduction: Reduction, deadline: float) -> None:
        """Combine a contiguous tensor ``(N,)`` of every rank, in place."""
        count = data.numel()
        signature = op_signature("all_reduce", reduction.name, data.dtype, count)
        if self._is_one_node and count * data.itemsize <= self._direct_bytes:
            slots = self.buffer.next_typed_slots(data.dtype, count)
            slots[self.rank].copy_(data)
            self.buffer.barrier(signature, deadline)
            self._combine(slots[:-1], reduction, data, deadline)
            return
        self._reduce_in_pieces(data, data, reduction, signature, deadline)

    def reduce(
        self, data: Tensor, root: int, reduction: Reduction, deadline: float
    ) -> None:
        """Combine a tensor of every rank into that of `root`; the others are kept."""
        details = (reduction.name, data.dtype, data.numel(), root)
        signature = op_signature("reduce", *details)
        out = data if self.rank == root else None
        self._reduce_in_pieces(data, out, reduction, signature, deadline)

    def _reduce_in_pieces(
        self,
        data: Tensor,
        out: Tensor | None,
        reduction: Reduction,
        signature: OpSignature,
        deadline: float,
    ) -> None:
        """Let each rank combine a piece of every chunk, and all read the results.

        Between two barriers a rank reads the result of one chunk, combines its piece of
        the next, and writes what others need of the one after it.
        """
        seconds = deadline - time.monotonic()
        step = self.buffer.slot_bytes // data.itemsize
        # Empty tensors pass the barriers, too, which all ranks count.
        chunks = list(torch.split(data, step)) if data.numel() else [data]
        slots = self._write_for_others(chunks[0])
        self.buffer.barrier(signature, deadline)
        result_deadline = deadline
        if not self._is_one_node:
            # Those that reduce over the nodes may have started later, and so give up
            # later; they know more of who is missing, and must be the first to say it.
            result_deadline = time.monotonic() + seconds + INTER_NODE_EXTRA_SECONDS
        for number, chunk in enumerate(chunks):
            piece = self._piece(chunk)
            # Empty on the same ranks of all nodes, which combine it with each other.
            if piece.start < piece.stop:
                parts = [slot[piece] for slot in slots[:-1]]
                parts[self.rank] = chunk[piece]
                self._combine(parts, reduction, slots[-1][piece], deadline)
            # Of this half: the next line may turn to the other one. It can be read
            # after the barrier.
            result = slots[-1]
            if number + 1 < len(chunks):
                slots = self._write_for_others(chunks[number + 1])
            self.buffer.barrier(signature, result_deadline)
            if out is not None:
                out[number * step : number * step + chunk.numel()].copy_(result)

    def _write_for_others(self, chunk: Tensor) -> list[Tensor]:
        """Write a chunk into this rank's slot, but not the piece that it combines."""
        slots = self.buffer.next_typed_slots(chunk.dtype, chunk.numel())
        slot, piece = slots[self.rank], self._piece(chunk)
        for part in (slice(0, piece.start), slice(piece.stop, chunk.numel())):
            if part.start < part.stop:
                slot[part].copy_(chunk[part])
        return slots

    def _piece(self, chunk: Tensor) -> slice:
        """Return what this rank combines of a chunk; empty on some ranks."""
        unit = max(1, _ALIGNMENT // chunk.itemsize)
        count = chunk.numel()
        length = -(-count // (self._num_reducers * unit)) * unit
        begin = min(self.rank * length, count)
        is_reducer = self.rank < self._num_reducers
        return slice(begin, min(begin + length, count) if is_reducer else begin)

    def _combine(
        self, parts: Tensors, reduction: Reduction, out: Tensor, deadline: float
    ) -> None:
        wide = out
        if reduction.wide is not out.dtype:
            wide = torch.empty(out.shape, dtype=reduction.wide)
        reduction.combine(parts, wide)
        if self._inter_node_reduce is not None:
            self._inter_node_reduce(wide, reduction, deadline)
        reduction.finish(wide)
        if wide is not out:
            out.copy_(wide)

    def reduce_scatter(
        self, out: Tensor, inputs: Tensors, reduction: Reduction, deadline: float
    ) -> None:
        """Combine, for every rank, the tensors that all ranks have for it."""
        sizes = [part.numel() for part in inputs]
        signature = op_signature(
            "reduce_scatter", reduction.name, out.dtype, *_abbreviate(sizes)
        )
        item = out.element_size()
        step = self._section_bytes() // item
        for begin in range(0, max(sizes), step):
            slots = self.buffer.next_slots()
            self._write_sections(slots, inputs, begin, step)
            self.buffer.barrier(signature, deadline)
            result = out[begin : begin + step]
            if result.numel():
                at = self.rank * self._section_bytes()
                length = result.numel() * item
                parts = [slot[at : at + length].view(out.dtype) for slot in slots[:-1]]
                own = inputs[self.rank][begin : begin + step]
                # In place, the parts of the ranks before would overwrite it.
                parts[self.rank] = own.clone() if _share_storage(own, out) else own
                self._combine(parts, reduction, result, deadline)

    # --- bytes ------------------------------------------------------------------------

    def broadcast(self, data: Tensor, root: int, deadline: float) -> None:
        signature = op_signature("broadcast", data.numel(), "bytes from rank", root)
        step = self.buffer.slot_bytes * self.size
        for begin in range(0, data.numel(), step):
            chunk = data[begin : begin + step]
            shared = self.buffer.next_whole()[: chunk.numel()]
            if self.rank == root:
                shared.copy_(chunk)
            self.buffer.barrier(signature, deadline)
            if self.rank != root:
                chunk.copy_(shared)

    def all_gather(self, outputs: Tensors, data: Tensor, deadline: float) -> None:
        """Give every rank the data of all; lengths may differ between ranks."""
        sizes = [out.numel() for out in outputs]
        signature = op_signature("all_gather", *_abbreviate(sizes), "bytes")
        _check_size(data, sizes[self.rank], "all_gather")
        step = self.buffer.slot_bytes
        if sizes[0] <= step and sizes.count(sizes[0]) == self.size:
            slots = self.buffer.next_typed_slots(torch.uint8, sizes[0])
            slots[self.rank].copy_(data)
            self.buffer.barrier(signature, deadline)
            foreach_copy(list(outputs), slots[:-1])  # all in one call
            return
        # FSDP gathers in place: its input is a part of the output.
        if data.data_ptr() != outputs[self.rank].data_ptr():
            outputs[self.rank].copy_(data)
        for begin in range(0, max(sizes), step):
            rows = self.buffer.next_slots()
            own = data[begin : begin + step]
            rows[self.rank][: own.numel()].copy_(own)
            self.buffer.barrier(signature, deadline)
            for rank, out in enumerate(outputs):
                if rank != self.rank:
                    chunk = out[begin : begin + step]
                    chunk.copy_(rows[rank][: chunk.numel()])

    def gather(
        self, outputs: Tensors | None, data: Tensor, root: int, deadline: float
    ) -> None:
        signature = op_signature("gather", data.numel(), "bytes to rank", root)
        step = self.buffer.slot_bytes
        for begin in range(0, data.numel(), step):
            slots = self.buffer.next_slots()
            own = data[begin : begin + step]
            slots[self.rank][: own.numel()].copy_(own)
            self.buffer.barrier(signature, deadline)
            for rank, out in enumerate(outputs or ()):
                _check_size(out, data.numel(), "gather")
                out[begin : begin + step].copy_(slots[rank][: own.numel()])

    def scatter(
        self, out: Tensor, inputs: Tensors | None, root: int, deadline: float
    ) -> None:
        signature = op_signature("scatter", out.numel(), "bytes from rank", root)
        step = self.buffer.slot_bytes
        for begin in range(0, out.numel(), step):
            slots = self.buffer.next_slots()
            own = out[begin : begin + step]
            for rank, given in enumerate(inputs or ()):
                _check_size(given, out.numel(), "scatter")
                slots[rank][: own.numel()].copy_(given[begin : begin + step])
            self.buffer.barrier(signature, deadline)
            own.copy_(slots[self.rank][: own.numel()])

    def all_to_all(self, outputs: Tensors, inputs: Tensors, deadline: float) -> None:
        longest = self._exchange_sizes(outputs, inputs, deadline)
        signature = op_signature("all_to_all", longest, "bytes")
        section = self._section_bytes()
        for begin in range(0, longest, section):
            slots = self.buffer.next_slots()
            self._write_sections(slots, inputs, begin, section)
            self.buffer.barrier(signature, deadline)
            at = self.rank * section
            for rank, out in enumerate(outputs):
                chunk = out[begin : begin + section]
                if rank == self.rank:
                    chunk.copy_(inputs[rank][begin : begin + section])
                else:
                    chunk.copy_(slots[rank][at : at + chunk.numel()])

    def _exchange_sizes(
        self, outputs: Tensors, inputs: Tensors, deadline: float
    ) -> int:
        slots = self.buffer.next_typed_slots(torch.int64, self.size)
        slots[self.rank].copy_(torch.tensor([part.numel() for part in inputs]))
        self.buffer.barrier(op_signature("all_to_all", "sizes"), deadline)
        table = torch.stack(slots[:-1])
        expected = [out.numel() for out in outputs]
        found = table[:, self.rank].tolist()
        # Of the whole table, which is equal on all ranks: so are the barriers to come.
        longest = int(table.max())
        if found != expected:
            raise GroupError(
                f"all_to_all: rank {self.rank} of the group expects {expected} bytes "
                f"from the ranks, but they have {found} for it"
            )
        return longest

    def _write_sections(
        self, slots: Tensors, inputs: Tensors, begin: int, step: int
    ) -> None:
        """Write into this rank's slot a section for each other rank."""
        slot, section = slots[self.rank], self._section_bytes()
        for rank, part in enumerate(inputs):
            chunk = part[begin : begin + step]
            if rank != self.rank and chunk.numel():
                at = rank * section
                length = chunk.numel() * chunk.element_size()
                slot[at : at + length].view(chunk.dtype).copy_(chunk)

    def _section_bytes(self) -> int:
        return self.buffer.slot_bytes // self.size // _ALIGNMENT * _ALIGNMENT


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _abbreviate(sizes: Sequence[int]) -> Sequence[object]:
    return sizes if len(set(sizes)) > 1 else (sizes[0], "each")


def _check_size(data: Tensor, expected: int, name: str) -> None:
    if (found := data.numel()) != expected:
        raise GroupError(f"{name}: a tensor has {found} bytes, expected {expected}")

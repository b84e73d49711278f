"""Collectives of ranks on one node, through the memory that they share.

All are the same three moves: write what others need into the room, meet, read. Tensors
larger than a rank's room go in chunks, in the two halves of the room by turns, so that
one meeting for each chunk is enough; large reductions take one more.

Collective over the node, all of them; `deadline` is on the monotonic clock; they raise
what `Board.meet` raises, and a GroupError where one rank's own tensors do not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from mpitrain.mpi_backend.board import Board, Doing, doing
from mpitrain.mpi_backend.failures import GroupError
from mpitrain.mpi_backend.reductions import Reduction

DIRECT_BYTES = 256 << 10
"""Up to here every rank reads all of all others': one meeting, but more to read."""

DIRECT_BYTES_OF_ALL = 2 << 20
"""The same for what all ranks have together."""

LATER_SECONDS = 5.0
"""How much longer than others a rank waits for those that are in MPI for it."""

_ALIGNED = 64
"""Pieces begin on a cache line, in bytes."""

Across = Callable[[torch.Tensor, Reduction, float], None]
"""Combines a tensor with those of other nodes, in place, until a deadline."""


class OnNode:
    """The collectives of one group whose ranks share memory.

    Args:
        board: What they share.
        num_pieces: Ranks that reduce, each a piece: the first ones of the node; 0: all,
            and there is no other node.
        across: What combines this rank's piece with other nodes', if it has one.
    """

    def __init__(
        self, board: Board, *, num_pieces: int = 0, across: Across | None = None
    ) -> None:
        self.board = board
        self.rank = board.local_rank
        self.size = board.size
        self._is_alone = num_pieces == 0
        self._num_pieces = num_pieces or board.size
        self._across = across
        self._direct_bytes = min(
            DIRECT_BYTES, DIRECT_BYTES_OF_ALL // self.size, board.per_rank
        )

    def barrier(self, deadline: float) -> None:
        """Wait for all."""
        self.board.meet(doing("barrier"), deadline)

    # --- reductions -------------------------------------------------------------------

    def all_reduce(
        self, data: torch.Tensor, reduction: Reduction, world_size: int, deadline: float
    ) -> None:
        """Combine a tensor of every rank, in place.

        Args:
            data: Of one length and type on all, contiguous, ``(N,)``.
            reduction: How.
            world_size: Ranks of the whole group, for the mean.
            deadline: When to give up.
        """
        count = data.numel()
        what = doing("all_reduce", reduction.name, data.dtype, count)
        num_bytes = count * data.itemsize
        if self._is_alone and num_bytes <= self._direct_bytes:
            rows = self.board.next_typed(data.dtype, count)
            rows[self.rank].copy_(data)
            self.board.meet(what, deadline)
            self._combine(rows[:-1], reduction, world_size, data, deadline)
            return
        self._reduce_in_pieces(data, data, reduction, world_size, what, deadline)

    def reduce(
        self,
        data: torch.Tensor,
        root: int,
        reduction: Reduction,
        world_size: int,
        deadline: float,
    ) -> None:
        """Combine a tensor of every rank into that of one; the others' stay."""
        what = doing("reduce", reduction.name, data.dtype, data.numel(), root)
        out = data if self.rank == root else None
        self._reduce_in_pieces(data, out, reduction, world_size, what, deadline)

    def _reduce_in_pieces(
        self,
        data: torch.Tensor,
        out: torch.Tensor | None,
        reduction: Reduction,
        world_size: int,
        what: Doing,
        deadline: float,
    ) -> None:
        """Let each rank combine a piece of every chunk, and all read the results.

        Between two meetings a rank reads the result of one chunk, combines its piece of
        the next, and writes what others need of the one after it.
        """
        seconds = deadline - time.monotonic()
        step = self.board.per_rank // data.itemsize
        chunks = list(torch.split(data, step)) if data.numel() else [data]
        rows = self._write_all_but_mine(chunks[0])
        self.board.meet(what, deadline)
        opens_by = deadline
        if not self._is_alone:
            # Who combines for us over the nodes came later, perhaps, and gives up then;
            # it knows more of who is missing, and must be the first to tell.
            opens_by = time.monotonic() + seconds + LATER_SECONDS
        for number, chunk in enumerate(chunks):
            mine = self._piece(chunk)
            if mine.start < mine.stop:
                parts = [row[mine] for row in rows[:-1]]
                parts[self.rank] = chunk[mine]
                self._combine(parts, reduction, world_size, rows[-1][mine], deadline)
            results = rows[-1]
            if number + 1 < len(chunks):
                rows = self._write_all_but_mine(chunks[number + 1])
            self.board.meet(what, opens_by)
            if out is not None:
                out[number * step : number * step + chunk.numel()].copy_(results)

    def _write_all_but_mine(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        rows = self.board.next_typed(chunk.dtype, chunk.numel())
        own, mine = rows[self.rank], self._piece(chunk)
        for part in (slice(0, mine.start), slice(mine.stop, chunk.numel())):
            if part.start < part.stop:
                own[part].copy_(chunk[part])
        return rows

    def _piece(self, chunk: torch.Tensor) -> slice:
        """Return what this rank combines of a chunk; nothing on some ranks."""
        least = max(1, _ALIGNED // chunk.itemsize)
        count = chunk.numel()
        length = -(-count // (self._num_pieces * least)) * least
        begin = min(self.rank * length, count)
        is_mine = self.rank < self._num_pieces
        return slice(begin, min(begin + length, count) if is_mine else begin)

    def _combine(
        self,
        parts: Sequence[torch.Tensor],
        reduction: Reduction,
        world_size: int,
        out: torch.Tensor,
        deadline: float,
    ) -> None:
        wide = out
        if reduction.wide is not out.dtype:
            wide = torch.empty(out.shape, dtype=reduction.wide)
        reduction.combine(parts, wide)
        if self._across is not None:
            self._across(wide, reduction, deadline)
        reduction.finish(wide, world_size)
        if wide is not out:
            out.copy_(wide)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
        deadline: float,
    ) -> None:
        """Combine, for every rank, the tensors that all others have for it.

        Args:
            out: This rank's result, ``(N,)``.
            inputs: What this rank has for each, ``(N,)`` as long as that one's result.
            reduction: How.
            deadline: When to give up.
        """
        sizes = [part.numel() for part in inputs]
        what = doing("reduce_scatter", reduction.name, out.dtype, *_shortly(sizes))
        item = out.element_size()
        step = self._share() // item
        for begin in range(0, max(sizes), step):
            rows = self.board.next_rows()
            self._write_shares(rows, inputs, begin, step)
            self.board.meet(what, deadline)
            result = out[begin : begin + step]
            if result.numel():
                at = self.rank * self._share()
                length = result.numel() * item
                parts = [row[at : at + length].view(out.dtype) for row in rows[:-1]]
                own = inputs[self.rank][begin : begin + step]
                # In place: it would be overwritten by the ranks before.
                parts[self.rank] = own.clone() if _share_memory(own, out) else own
                self._combine(parts, reduction, self.size, result, deadline)

    # --- what is not changed on its way -----------------------------------------------

    def broadcast(self, data: torch.Tensor, root: int, deadline: float) -> None:
        """Give every rank the bytes of one, ``uint8 (N,)``."""
        what = doing("broadcast", data.numel(), "bytes from rank", root)
        step = self.board.per_rank * self.size
        for begin in range(0, data.numel(), step):
            chunk = data[begin : begin + step]
            room = self.board.next_whole()[: chunk.numel()]
            if self.rank == root:
                room.copy_(chunk)
            self.board.meet(what, deadline)
            if self.rank != root:
                chunk.copy_(room)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], data: torch.Tensor, deadline: float
    ) -> None:
        """Give every rank the bytes of all; ``uint8``, each of its own length."""
        sizes = [out.numel() for out in outputs]
        what = doing("all_gather", *_shortly(sizes), "bytes")
        _check_size(data, sizes[self.rank], "all_gather")
        step = self.board.per_rank
        if sizes[0] <= step and sizes.count(sizes[0]) == self.size:
            views = self.board.next_typed(torch.uint8, sizes[0])
            views[self.rank].copy_(data)
            self.board.meet(what, deadline)
            torch._foreach_copy_(list(outputs), views[:-1])  # all in one call
            return
        if data.data_ptr() != outputs[self.rank].data_ptr():
            outputs[self.rank].copy_(data)
        for begin in range(0, max(sizes), step):
            rows = self.board.next_rows()
            mine = data[begin : begin + step]
            rows[self.rank][: mine.numel()].copy_(mine)
            self.board.meet(what, deadline)
            for rank, out in enumerate(outputs):
                if rank != self.rank:
                    chunk = out[begin : begin + step]
                    chunk.copy_(rows[rank][: chunk.numel()])

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        data: torch.Tensor,
        root: int,
        deadline: float,
    ) -> None:
        """Give one rank the bytes of all, ``uint8 (N,)`` from each."""
        what = doing("gather", data.numel(), "bytes to rank", root)
        step = self.board.per_rank
        for begin in range(0, data.numel(), step):
            rows = self.board.next_rows()
            mine = data[begin : begin + step]
            rows[self.rank][: mine.numel()].copy_(mine)
            self.board.meet(what, deadline)
            for rank, out in enumerate(outputs or ()):
                _check_size(out, data.numel(), "gather")
                out[begin : begin + step].copy_(rows[rank][: mine.numel()])

    def scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        deadline: float,
    ) -> None:
        """Give every rank its bytes from one, ``uint8 (N,)`` to each."""
        what = doing("scatter", out.numel(), "bytes from rank", root)
        step = self.board.per_rank
        for begin in range(0, out.numel(), step):
            rows = self.board.next_rows()
            mine = out[begin : begin + step]
            for rank, given in enumerate(inputs or ()):
                _check_size(given, out.numel(), "scatter")
                rows[rank][: mine.numel()].copy_(given[begin : begin + step])
            self.board.meet(what, deadline)
            mine.copy_(rows[self.rank][: mine.numel()])

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        """Give every rank the bytes that each other has for it.

        Args:
            outputs: ``uint8``, what comes from each.
            inputs: ``uint8``, what goes to each.
            deadline: When to give up.
        """
        longest = self._agree_on_sizes(outputs, inputs, deadline)
        what = doing("all_to_all", longest, "bytes")
        share = self._share()
        for begin in range(0, longest, share):
            rows = self.board.next_rows()
            self._write_shares(rows, inputs, begin, share)
            self.board.meet(what, deadline)
            at = self.rank * share
            for rank, out in enumerate(outputs):
                chunk = out[begin : begin + share]
                if rank == self.rank:
                    chunk.copy_(inputs[rank][begin : begin + share])
                else:
                    chunk.copy_(rows[rank][at : at + chunk.numel()])

    def _agree_on_sizes(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deadline: float,
    ) -> int:
        """Tell each other the sizes; return the largest."""
        rows = self.board.next_typed(torch.int64, self.size)
        rows[self.rank].copy_(torch.tensor([part.numel() for part in inputs]))
        self.board.meet(doing("all_to_all", "with sizes of its own"), deadline)
        table = torch.stack(rows[:-1])
        expected = [out.numel() for out in outputs]
        given = table[:, self.rank].tolist()
        longest = int(table.max())
        if given != expected:
            raise GroupError(
                f"all_to_all: rank {self.rank} of the group expects {expected} bytes "
                f"from the ranks, but they have {given} for it"
            )
        return longest

    def _write_shares(
        self,
        rows: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        begin: int,
        step: int,
    ) -> None:
        """Write into this rank's row a share of what it has for each other one."""
        row, share = rows[self.rank], self._share()
        for rank, part in enumerate(inputs):
            chunk = part[begin : begin + step]
            if rank != self.rank and chunk.numel():
                at = rank * share
                length = chunk.numel() * chunk.element_size()
                row[at : at + length].view(chunk.dtype).copy_(chunk)

    # --- where things are in the room -------------------------------------------------

    def _share(self) -> int:
        """Bytes of a rank's row for each other rank."""
        return self.board.per_rank // self.size // _ALIGNED * _ALIGNED


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shortly(sizes: Sequence[int]) -> Sequence[object]:
    return sizes if len(set(sizes)) > 1 else (sizes[0], "each")


def _check_size(data: torch.Tensor, expected: int, what: str) -> None:
    if data.numel() != expected:
        raise GroupError(
            f"{what}: a tensor has {data.numel()} bytes, expected {expected}"
        )

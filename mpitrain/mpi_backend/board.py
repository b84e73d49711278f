"""What the ranks of one node share for one group: who has come, and room for data.

Every operation is made of meetings. A rank writes what it has into the room, comes to
the meeting, and reads what others wrote once all have come. Meetings are numbered; each
rank says which operation it came for, so that ranks that do different things are told
so, and by name.
"""

from __future__ import annotations

import functools
import mmap
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from mpitrain.mpi_backend.failures import GroupError, PeerGone
from mpitrain.mpi_backend.waiting import Fence, Word, give_way

LOOK_SECONDS = 1.0
"""How often a rank that waits looks whether the others still live."""

_HALVES = 2
_LINE = 256
"""Bytes of a rank's own entry; ranks must not share a cache line."""

_LEFT = 3
"""The word of an entry that says that its rank has left; before: turn and two codes."""

_TEXT = 112
_TEXTS = (32, 32 + _TEXT)
"""Where an entry holds the text of every other meeting."""

_TURNS = 1 << 32
_MOST_KEPT = 64


@dataclass(frozen=True)
class Doing:
    """What ranks meet for; equal on all of them."""

    text: bytes
    """For messages, `_TEXT` bytes."""
    code: int
    """Different for different texts, 32 bits."""


@functools.lru_cache(maxsize=1024)
def doing(what: str, *details: object) -> Doing:
    """Say what ranks meet for.

    Args:
        what: The operation.
        details: What else must be equal: types, sizes.
    """
    text = " ".join([what, *map(str, details)]).encode()
    return Doing(text[:_TEXT].ljust(_TEXT, b"\0"), zlib.crc32(text))


class Board:
    """Shared memory of the ranks of one node, for one group.

    Made by `sharing.share_memory`.

    Args:
        memory: The same file, mapped by all of them.
        local_rank: This process among them.
        names: Each of them in words, ``"rank 3"``.
        pids: Their process ids; empty where processes do not see each other.
        per_rank: Bytes of room for each rank and half.

    Attributes:
        rows: Of each half of the room a row ``uint8 (per_rank,)`` for each rank, and
            one for a result. A half may be written again once the meeting for the
            other half is over: by then all have read it.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        local_rank: int,
        names: list[str],
        pids: list[int],
        per_rank: int,
    ) -> None:
        self.local_rank = local_rank
        self.per_rank = per_rank
        self._memory = memory
        self._names = names
        self._pids = pids
        self._view = memoryview(memory)
        size = len(names)
        self._words = self._view[: (size + 1) * _LINE].cast("I")
        self._slots = [rank * _LINE // 4 for rank in range(size)]
        self._mine = self._slots[local_rank]
        self._open = Word(self._view, size * _LINE)
        self._fence = Fence()
        self._turn = 0
        self._half = 0
        begin = data_offset(size)
        length = (size + 1) * per_rank
        whole = torch.frombuffer(
            memory, dtype=torch.uint8, count=_HALVES * length, offset=begin
        )
        halves = whole.view(_HALVES, size + 1, per_rank).unbind(0)
        self._whole = [half[:size].view(-1) for half in halves]
        self.rows = [half.unbind(0) for half in halves]
        self._typed: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}
        self.spins = 0
        """How often a rank gives way before it sleeps."""

    @property
    def size(self) -> int:
        """Number of ranks that share it."""
        return len(self._names)

    def next_rows(self) -> Sequence[torch.Tensor]:
        """Return where to write next: a row for each rank, and one for a result."""
        self._half ^= 1
        return self.rows[self._half]

    def next_whole(self) -> torch.Tensor:
        """Return where to write next: all ranks' rows as one."""
        self._half ^= 1
        return self._whole[self._half]

    def next_typed(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return where to write next: the rows as tensors of a type, ``(count,)``.

        To make a view takes as long as to copy some kilobytes, so they are kept.
        """
        self._half ^= 1
        key = (self._half, dtype, count)
        found = self._typed.get(key)
        if found is None:
            if len(self._typed) >= _MOST_KEPT:
                self._typed.clear()
            length = count * dtype.itemsize
            found = [row[:length].view(dtype) for row in self.rows[self._half]]
            self._typed[key] = found
        return found

    def meet(self, doing: Doing, deadline: float) -> None:
        """Wait until all ranks of the node have come.

        Collective over the node.

        Args:
            doing: The operation, equal on all.
            deadline: When to give up, on the monotonic clock.

        Raises:
            GroupError: Some did not come in time, have ended, or came for another
                operation. In the last case on every rank.
        """
        turn = self._turn = (self._turn + 1) % _TURNS
        parity = turn & 1  # nobody is ahead by more than one meeting
        begin = self._mine * 4 + _TEXTS[parity]
        self._view[begin : begin + len(doing.text)] = doing.text
        self._words[self._mine + 1 + parity] = doing.code
        self._fence()
        self._words[self._mine] = turn
        self._fence()
        if self._all_came(turn):
            self._open.value = turn
            self._open.wake()
        else:
            self._wait(turn, deadline)
        self._fence()
        for slot in self._slots:
            if self._words[slot + 1 + parity] != doing.code:
                self._disagree(parity)

    def _all_came(self, turn: int) -> bool:
        words = self._words
        return all((words[slot] - turn) % _TURNS < _TURNS // 2 for slot in self._slots)

    def _is_open(self, turn: int) -> bool:
        return (self._open.value - turn) % _TURNS < _TURNS // 2

    def _wait(self, turn: int, deadline: float) -> None:
        for _ in range(self.spins):
            if self._is_open(turn):
                return
            give_way()
        look_at = time.monotonic() + LOOK_SECONDS
        while not self._is_open(turn):
            before = self._open.value
            if self._is_open(turn):
                return
            now = time.monotonic()
            if self._all_came(turn):  # two came at once, and neither saw the other
                self._open.value = turn
                self._open.wake()
                return
            if now > deadline:
                self._give_up(turn)
            self._look_for_left(turn)
            if now > look_at:
                look_at = now + LOOK_SECONDS
                self._look_for_dead(turn)
            self._open.sleep_while(before, min(0.1, max(deadline - now, 0.001)))

    def _missing(self, turn: int) -> list[int]:
        return [
            rank
            for rank, slot in enumerate(self._slots)
            if (self._words[slot] - turn) % _TURNS >= _TURNS // 2
        ]

    def _give_up(self, turn: int) -> NoReturn:
        missing = self._missing(turn)
        raise GroupError(
            f"{', '.join(self._names[rank] for rank in missing)} did not come to "
            f"{self._text(self.local_rank)} before its timeout ended. Last seen at: "
            + "; ".join(f"{self._names[r]}: {self._text(r)}" for r in missing)
        )

    def leave(self, why: str) -> None:
        """Tell the others that this rank comes to no more meetings."""
        parity = (self._words[self._mine] + 1) & 1  # nobody compares that text now
        begin = self._mine * 4 + _TEXTS[parity]
        self._view[begin : begin + _TEXT] = why.encode()[:_TEXT].ljust(_TEXT, b"\0")
        self._fence()
        self._words[self._mine + _LEFT] = 1
        self._open.wake()

    def _look_for_left(self, turn: int) -> None:
        for rank in self._missing(turn):
            if self._words[self._slots[rank] + _LEFT]:
                parity = (self._words[self._slots[rank]] + 1) & 1
                raise GroupError(
                    f"{self._names[rank]} left the group, while others wait for it in "
                    f"{self._text(self.local_rank)}: {self._text(rank, parity)}"
                )

    def _look_for_dead(self, turn: int) -> None:
        for rank in self._missing(turn):
            if self._pids and is_gone(self._pids[rank]):
                raise PeerGone(
                    f"{self._names[rank]} is gone: its process {self._pids[rank]} has "
                    f"ended, while others wait for it in {self._text(self.local_rank)}"
                )

    def _disagree(self, parity: int) -> NoReturn:
        doing: dict[str, list[str]] = {}
        for rank, name in enumerate(self._names):
            doing.setdefault(self._text(rank, parity), []).append(name)
        raise GroupError(
            "the ranks do different things at one time:\n"
            + "\n".join(f"  {', '.join(n)}: {text}" for text, n in doing.items())
            + "\nExpected the same calls, with the same shapes and types, in the same "
            "order on all ranks of the group."
        )

    def _text(self, rank: int, parity: int | None = None) -> str:
        if parity is None:  # of the meeting that it came to last
            parity = self._words[self._slots[rank]] & 1
        begin = self._slots[rank] * 4 + _TEXTS[parity]
        text = bytes(self._view[begin : begin + _TEXT]).rstrip(b"\0")
        return text.decode(errors="replace") or "no operation yet"


def data_offset(size: int) -> int:
    """Return where the room for data begins: behind the entries, on a page."""
    entries = (size + 1) * _LINE
    return -(-entries // mmap.PAGESIZE) * mmap.PAGESIZE


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though its parent may not know yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "ZX"


def board_bytes(size: int, per_rank: int) -> int:
    """Return how much memory a board takes."""
    return data_offset(size) + _HALVES * (size + 1) * per_rank

"""A stream of pieces from rank zero through a chain of nodes.

Each node forwards a piece as soon as it has it, so that the time does not grow with the
number of nodes, and no link carries the stream twice in one direction.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from mpitrain.stage.copies import NodeCopy
from mpitrain.stage.pack import HEAD, NUM_READERS, Index, Source

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW = 16  # pieces that are received, wait to be sent, or are written at once
# Those that are sent at once share the link, so the next node has none of them sooner.
_MAX_SENDS = 2
_MAX_WRITERS = 4
_MAX_PAUSE_SECONDS = 0.005
_TAG = 7


def send_through(
    comm: MPI.Intracomm,
    chain: Sequence[int],
    index: Index,
    source: Source | None,
    copy: NodeCopy | None,
    on_progress: Callable[[], object],
) -> None:
    """Send, forward and write all pieces, by the ranks of a chain of `comm`.

    Every rank of `chain` calls it; the first has a `source`. `copy` is written unless
    it is ``None``. Waits asleep, and calls `on_progress` whenever a piece has moved.
    """
    place = chain.index(comm.rank)
    before = chain[place - 1]
    after = chain[place + 1] if place + 1 < len(chain) else None
    incoming: deque[tuple[MPI.Request | Future[bytearray], bytearray]] = deque()
    ready: deque[bytearray] = deque()  # to be sent
    outgoing: deque[tuple[MPI.Request, bytearray]] = deque()
    writes: deque[Future[None]] = deque()
    num_writers = min(_MAX_WRITERS, len(os.sched_getaffinity(0)))
    num_started = num_arrived = 0
    pause = 0.0
    with (
        ThreadPoolExecutor(NUM_READERS) as readers,
        ThreadPoolExecutor(num_writers) as writers,
    ):
        while num_arrived < index.num_pieces or ready or outgoing or writes:
            moved = False
            while (
                num_started < index.num_pieces
                and len(incoming) < WINDOW
                and max(len(ready), len(writes)) < WINDOW
            ):
                if source is not None:
                    future = readers.submit(source.read, num_started)
                    incoming.append((future, bytearray()))
                else:
                    piece = bytearray(HEAD.size + index.piece_size(num_started))
                    incoming.append((comm.Irecv(piece, before, _TAG), piece))
                num_started += 1
            while incoming and _is_done(incoming[0][0]):
                arrived, piece = incoming.popleft()
                if isinstance(arrived, Future):
                    piece = arrived.result()
                if after is not None:
                    has_content = HEAD.unpack_from(piece)[1]
                    ready.append(piece if has_content else piece[: HEAD.size])
                if copy is not None:
                    writes.append(writers.submit(copy.write, num_arrived, piece))
                num_arrived += 1
                moved = True
            while outgoing and outgoing[0][0].Test():
                outgoing.popleft()
                moved = True
            while after is not None and ready and len(outgoing) < _MAX_SENDS:
                piece = ready.popleft()
                outgoing.append((comm.Isend(piece, after, _TAG), piece))
            while writes and writes[0].done():
                writes.popleft().result()
                moved = True
            if moved:
                on_progress()
                pause = 0.0001
            else:
                time.sleep(pause)
                pause = min(1.5 * pause, _MAX_PAUSE_SECONDS)


def _is_done(incoming: MPI.Request | Future[bytearray]) -> bool:
    if isinstance(incoming, Future):
        return incoming.done()
    return bool(incoming.Test())

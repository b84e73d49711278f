"""Finds a rank that computes wrongly: ``--verify-every N``.

A processor that is broken returns a wrong number now and then, and says nothing. Before
the gradients of every N-th step are reduced

1. the ranks compare their copies of weights, buffers and optimizer states;
2. each computes a micro-batch of another rank again, on another node where there is
   one, if any rank can compute the same bits (`Strategy.numbers_of_ranks`). Where
   batch, loss or gradients have other bits, a third rank decides.

The first is possible where each rank has a copy of the model.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mpitrain.config import TrainConfig
from mpitrain.data.loader import Batch
from mpitrain.data.samples import dense_parts, leaves_of
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.launch.device_name import device_name
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.train.metrics import TrainState
from mpitrain.train.strategy.base import Strategy

logger = logging.getLogger("mpitrain")

COLUMNS = 251  # of a checksum; a prime, so that no layout of a layer repeats in it
WORD = 8  # bytes
OF_DATA = "the inputs", "the targets"

Sums: TypeAlias = dict[str, str]  # checksums by name, in the order of the computation


class ComputeError(MpitrainError):
    """A rank has other numbers than the others, which computed the same.

    Attributes:
        verified_step: Up to this step all ranks had the same; 0: not known.
    """

    exit_status = 77
    verified_step = 0


class Verification:
    """Compares what the ranks compute, every so many steps.

    `compare_state` and `compare` are collective.
    """

    def __init__(
        self, config: TrainConfig, world: World, ranks: Communicator, strategy: Strategy
    ) -> None:
        """Collective."""
        if strategy.is_sharded:
            raise UsageError(
                "--verify-every compares the copies of all ranks, found --strategy "
                f"{strategy.name}, which shards them; expected ddp"
            ).on_all_ranks()
        if world.world_size == 1:
            logger.warning("--verify-every has no effect: one rank, and none beside it")
        assert config.verify_every is not None
        self._every, self._seed = config.verify_every, config.seed
        self._has_shards = config.shard_optimizer
        self._world, self._ranks = world, ranks
        kinds = dict.fromkeys(ranks.allgather(device_name(world.device)))
        if len(kinds) > 1:
            raise UsageError(
                f"--verify-every compares bits, which differ between {', '.join(kinds)}"
                "; expected ranks on one kind of processor or GPU"
            ).on_all_ranks()
        self._chosen: list[int | None] = []  # micro-batch of each rank
        self._shifts, self._shift = self._far_shifts(), 0
        self._mine: Sums = {}

    def is_due(self, step: int) -> bool:
        """Whether a step, numbered from 1, is verified."""
        return self._world.world_size > 1 and step % self._every == 0

    def compare_state(self, engine: Any, state: TrainState) -> None:
        """Compare weights, buffers and optimizer states, before a step.

        After `begin_step`, which lets all have rank zero's buffers.

        Raises:
            ComputeError: They differ; on every rank.
        """
        sums = self._state_sums(engine)
        # One digest of all: the sums of each tensor travel if the ranks differ.
        whole = _digest_of(sums)
        found = self._ranks.allgather(whole)
        (most, count), *others = Counter(found).most_common()
        if not others:
            return
        of_ranks: list[Sums] = self._ranks.allgather(sums)
        right = of_ranks[found.index(most)]
        wrong = next(rank for rank, it in enumerate(found) if it != most)
        its = of_ranks[wrong]
        name = next(n for n in {**right, **its} if its.get(n) != right.get(n))
        if 2 * count <= len(found):
            pair = f"rank {found.index(most)} and rank {wrong}"
            reason = f"no majority of the ranks has one copy: that of {name} differs"
            self._fail(state, None, f"{reason} between {pair}")
        reason = f"its copy of {name} is not that of the {count} others"
        self._fail(state, wrong, reason)

    def begin(self, strategy: Strategy, number: int) -> None:
        """Choose a micro-batch of each rank for a step, numbered from 1; local.

        After `begin_step`, which tells their numbers.
        """
        # By seed and step: all ranks choose alike, without an exchange.
        chance, self._mine = random.Random(f"{self._seed} {number}"), {}
        numbers = strategy.numbers_of_ranks
        self._chosen = [chance.choice(it) if it else None for it in numbers]
        self._shift = self._shifts[number // self._every % len(self._shifts)]

    def record(
        self, number: int, batch: Batch, loss: Tensor, weights: Mapping[str, Tensor]
    ) -> None:
        """Take what this rank has computed, if it is the one to compare; local.

        Before the gradients are taken out of the weights.
        """
        mine = self._world.rank
        if self._chosen and number == self._chosen[mine]:
            self._mine = _sums_of(batch, loss, weights)

    def compare(
        self,
        engine: Any,
        state: TrainState,
        load: Callable[[int], Batch],
        compute: Callable[[Batch], Tensor],
    ) -> None:
        """Compute a micro-batch of another rank again, and compare.

        ``load`` returns a micro-batch by its number, ``compute`` its loss; then the
        weights have its gradients.

        Raises:
            ComputeError: They differ; on every rank.
        """
        if not self._chosen:
            state.verified_step = state.step
            return
        size, mine = self._world.world_size, self._world.rank

        def recompute_for(rank: int) -> Sums:
            number, strategy = self._chosen[rank], engine.strategy
            if number is None:
                return {}
            batch = load(number)
            with strategy.recompute(number):
                loss = compute(batch)
                return _sums_of(batch, loss, strategy.named_weights())

        # All at once, each another one's: no rank waits, and each is verified.
        verified = recompute_for((mine + self._shift) % size)
        both = _digest_of(self._mine), _digest_of(verified)
        of_ranks: list[tuple[str, str]] = self._ranks.allgather(both)
        wrong = [
            owner
            for owner in range(size)
            if of_ranks[owner][0] != of_ranks[(owner - self._shift) % size][1]
        ]
        if wrong:
            owner, other = wrong[0], (wrong[0] - self._shift) % size
            shown = self._mine if mine == owner else verified
            sums = self._ranks.allgather(shown if mine in (owner, other) else {})
            self._judge(state, owner, other, sums, recompute_for)
        state.verified_step = state.step

    def _judge(
        self,
        state: TrainState,
        owner: int,
        other: int,
        sums: list[Sums],
        recompute_for: Callable[[int], Sums],
    ) -> NoReturn:
        """Decide which of two ranks has wrong numbers of the owner's micro-batch."""
        one, its = sums[owner], sums[other]
        name = next(n for n in {**its, **one} if one.get(n) != its.get(n))
        judges = self._judges(owner, other)
        is_judge = self._world.rank in judges
        # Both may be judges: two ranks alone compute it once more each.
        vote = _digest_of(recompute_for(owner)) if is_judge else ""
        votes = self._ranks.allgather(vote)
        for_owner, for_other = (
            any(votes[it] == _digest_of(of) for it in judges) for of in (one, its)
        )
        where = f"micro-batch {self._chosen[owner]}, {name}"
        if for_other == for_owner:
            pair = f"{self._place(owner)} and {self._place(other)}"
            reason = f"{pair} differ in {where}; no other rank decides it"
            self._fail(state, None, reason, is_of_data=name in OF_DATA)
        wrong, right = (owner, other) if for_other else (other, owner)
        seconded = ", ".join(map(self._place, judges))
        if owner in judges:
            seconded = "a second computation"
        self._fail(
            state,
            wrong,
            f"it has other bits than {self._place(right)} in {where}; "
            f"{seconded} agrees with {self._place(right)}",
            is_of_data=name in OF_DATA,
        )

    # --- inside -------------------------------------------------------------------

    def _judges(self, one: int, other: int) -> list[int]:
        """Return who decides: one of a third node, else one beside each; else both."""
        # What is wrong with a node may be wrong on all of its ranks.
        places = {rank: it.hostname for it in self._world.nodes for rank in it.ranks}
        others = [rank for rank in sorted(places) if rank not in (one, other)]
        far = [it for it in others if places[it] not in (places[one], places[other])]
        beside = {places[it]: it for it in reversed(others)}
        return far[:1] or [*beside.values()] or [one, other]

    def _far_shifts(self) -> list[int]:
        """Return how far a rank may be from the one that it verifies."""
        size = self._world.world_size
        nodes = np.zeros(size, np.int64)
        for place, node in enumerate(self._world.nodes):
            nodes[list(node.ranks)] = place
        nums = [int((nodes != np.roll(nodes, -it)).sum()) for it in range(1, size)]
        most = max(nums, default=0)  # pairs on different nodes
        return [shift for shift, num in enumerate(nums, 1) if num == most]

    def _state_sums(self, engine: Any) -> Sums:
        model, optimizer = engine.model, engine.optimizer
        named: dict[str, Tensor] = dict(model.named_parameters())
        named |= engine.strategy.named_buffers()
        names = {id(weight): name for name, weight in named.items()}
        # Not of buffers: those of batch norm are each rank's own until they are sent.
        weights = engine.strategy.named_weights().keys()
        averages = optimizer.ema_values.items()
        named |= {f"the average of {it}": v for it, v in averages if it in weights}
        for it in () if self._has_shards else optimizer.optimizers:
            for weight, state in it.local.state.items():
                of = names.get(id(weight), "a weight")
                found = {f"{k} of {of}": v for k, v in state.items()}
                named |= {k: v for k, v in found.items() if isinstance(v, Tensor)}
        return {name: checksum(tensor) for name, tensor in named.items()}

    def _place(self, rank: int) -> str:
        return f"rank {rank} on {self._world.host_of(rank)}"

    def _fail(
        self,
        state: TrainState,
        rank: int | None,
        reason: str,
        *,
        is_of_data: bool = False,
    ) -> NoReturn:
        who = "one of them" if rank is None else "this rank"
        what = f"{who} computes wrongly, or its memory does"
        if is_of_data:
            what += ", or its data are others, such as a file on its node"
        error = ComputeError(
            f"step {state.step + 1}: {reason}.\nExpected the same bits: {what}. The "
            f"last step that was verified is {state.verified_step}; test the devices "
            "by `python -m mpitrain check --compute`, and leave the node out"
        )
        error.verified_step = state.verified_step
        error.reporting_rank = 0 if rank is None else rank
        raise error


def checksum(tensor: Tensor) -> str:
    """Return a checksum of a tensor's bits; a flipped bit always changes it.

    >>> one = torch.arange(1000.0)
    >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(one.flip(0))
    (True, False)
    """
    return _digest(b"".join(map(_summed, dense_parts(tensor.detach()))))


def _summed(tensor: Tensor) -> bytes:
    raw = tensor.contiguous().flatten().view(torch.uint8)
    # Words have to begin at a multiple of 8 bytes, and a part of a tensor may not.
    if raw.data_ptr() % WORD:
        raw = raw.clone()
    # In words of 64 bits, which wrap around: a sum of 32 bits would first be copied.
    words = raw[: len(raw) // WORD * WORD].view(torch.int64)
    whole = len(words) // COLUMNS * COLUMNS
    columns = words[:whole].view(-1, COLUMNS).sum(0)
    rest = words[whole:], raw[len(words) * WORD :]
    return b"".join(it.cpu().numpy().tobytes() for it in (columns, *rest))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _digest_of(sums: Sums) -> str:
    return _digest("".join(it for pair in sums.items() for it in pair).encode())


def gradient_sums(weights: Mapping[str, Tensor]) -> Sums:
    """Return checksums of the gradients, in the order of the backward pass; local."""
    return {
        f"the gradient of {name}": checksum(weight.grad)
        for name, weight in reversed([*weights.items()])
        if weight.grad is not None
    }


def _sums_of(batch: Batch, loss: Tensor, weights: Mapping[str, Tensor]) -> Sums:
    """Return checksums of what a micro-batch was and gave, in this order."""
    sums = {
        name: "".join(checksum(it) for it in leaves_of(tree) if isinstance(it, Tensor))
        for name, tree in zip(OF_DATA, (batch.inputs, batch.targets), strict=True)
    }
    return sums | {"the loss": checksum(loss)} | gradient_sums(weights)

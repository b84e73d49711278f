"""Finds a rank that computes wrongly: ``--verify-every N``.

A processor that is broken returns a wrong number now and then, and says nothing. Before
the gradients of every N-th step are reduced

1. the ranks compare their copies of weights, buffers and optimizer states;
2. each computes a micro-batch of another rank again, on another node where there is
   one, if any rank can compute the same bits (`Strategy.can_recompute`). Where batch,
   loss or gradients have other bits, a third rank decides.

The first is possible where each rank has a copy of the model.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpitrain.config import TrainConfig
from mpitrain.data.loader import Batch
from mpitrain.data.samples import leaves_of
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.mpi.world import World
from mpitrain.train.metrics import TrainState
from mpitrain.train.strategy.base import Strategy

COLUMNS = 251  # of a checksum; a prime, so that no layout of a layer repeats in it

Sums: TypeAlias = dict[str, str]  # checksums by name, in the order of the computation
Compute: TypeAlias = Callable[[Batch], Tensor]
"""Computes the loss of a micro-batch, and the gradients."""


class ComputeError(MpitrainError):
    """A rank has other numbers than the others, which computed the same.

    Attributes:
        verified_step: Up to this step all ranks had the same; 0: not known.
    """

    exit_status = 77
    verified_step = 0


class Verification:
    """Compares what the ranks compute, every so many steps.

    All methods are collective, but for `see`.
    """

    def __init__(self, config: TrainConfig, world: World, strategy: Strategy) -> None:
        if strategy.is_sharded:
            raise UsageError(
                "--verify-every compares the copies of all ranks, found --strategy "
                f"{strategy.name}, which shards them; expected ddp"
            ).on_all_ranks()
        assert config.verify_every is not None
        self._every, self._seed = config.verify_every, config.seed
        self._has_shards = config.shard_optimizer
        self._world = world
        self._chosen: list[int | None] = []  # micro-batch of each rank
        self._shift = 0
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
        whole = _digest("".join(sums.values()).encode())
        found = engine.ranks.allgather(whole)
        (most, count), *others = Counter(found).most_common()
        if not others:
            return
        of_ranks: list[Sums] = engine.ranks.allgather(sums)
        right = of_ranks[found.index(most)]
        wrong = next(rank for rank, it in enumerate(found) if it != most)
        name = next(n for n, it in of_ranks[wrong].items() if it != right.get(n))
        if 2 * count <= len(found):
            self._fail(
                state,
                None,
                f"the ranks have unlike copies, and no majority has one: {name} "
                f"differs between rank {found.index(most)} and rank {wrong}",
            )
        self._fail(
            state, wrong, f"its copy of {name} is not that of the {count} others"
        )

    def begin(self, strategy: Strategy, number: int, name: str) -> None:
        """Choose a micro-batch of each rank for the pass of a step; see `see`.

        Args:
            strategy: Whose `begin_step` was called.
            number: Of the step, from 1.
            name: Of the pass.
        """
        self._mine, self._chosen = {}, []
        if not strategy.can_recompute:
            return
        chance = random.Random(f"{self._seed} {number} {name}")
        numbers = strategy.numbers_of_ranks
        self._chosen = [chance.choice(it) if it else None for it in numbers]
        self._shift = self._next_shift(number // self._every)

    def see(
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
        compute: Compute,
    ) -> None:
        """Compute a micro-batch of another rank again, and compare.

        Args:
            engine: Of the trainer.
            state: Before the step.
            load: Returns a micro-batch of the step by its number.
            compute: What the step does with one.

        Raises:
            ComputeError: They differ; on every rank.
        """
        if not self._chosen:
            state.verified_step = state.step
            return
        size, mine = self._world.world_size, self._world.rank

        def again(rank: int) -> Sums:
            number, strategy = self._chosen[rank], engine.strategy
            if number is None:
                return {}
            batch = load(number)
            with strategy.recompute(number):
                loss = compute(batch)
                return _sums_of(batch, loss, strategy.named_weights())

        both = self._mine, again((mine + self._shift) % size)
        of_ranks: list[tuple[Sums, Sums]] = engine.ranks.allgather(both)
        for owner in range(size):
            other = (owner - self._shift) % size
            one, its = of_ranks[owner][0], of_ranks[other][1]
            if one == its:
                continue
            name = next(n for n in its if one.get(n) != its[n])
            judges = self._judges(owner, other)
            votes = engine.ranks.allgather(again(owner) if mine in judges else {})
            for_other = any(votes[it] == its for it in judges)
            for_owner = any(votes[it] == one for it in judges)
            where = f"micro-batch {self._chosen[owner]}, {name}"
            if for_other == for_owner:
                pair = f"{self._place(owner)} and {self._place(other)}"
                self._fail(state, None, f"{pair} differ in {where}; no third agrees")
            wrong, right = (owner, other) if for_other else (other, owner)
            self._fail(
                state,
                wrong,
                f"it has other bits than {self._place(right)} in {where}, and "
                f"{self._place(judges[0])} agrees with the latter",
            )
        state.verified_step = state.step

    # --- inside -------------------------------------------------------------------

    def _judges(self, one: int, other: int) -> list[int]:
        """Return who decides: a third rank, which may be far from both; or both again.

        What is wrong with a node may be wrong on all of its ranks.
        """
        places = {rank: it.hostname for it in self._world.nodes for rank in it.ranks}
        near = {places[one], places[other]}
        others = [rank for rank in sorted(places) if rank not in (one, other)]
        others.sort(key=lambda rank: places[rank] in near)
        return others[:1] or [one, other]

    def _next_shift(self, turn: int) -> int:
        """Return how far the rank is whose micro-batch each computes again."""
        node_of = {
            rank: place
            for place, node in enumerate(self._world.nodes)
            for rank in node.ranks
        }
        size = self._world.world_size

        def num_far(shift: int) -> int:
            pairs = ((rank, (rank + shift) % size) for rank in range(size))
            return sum(node_of[one] != node_of[other] for one, other in pairs)

        most = max(map(num_far, range(1, size)))
        possible = [it for it in range(1, size) if num_far(it) == most]
        return possible[turn % len(possible)]

    def _state_sums(self, engine: Any) -> Sums:
        model, optimizer = engine.model, engine.optimizer
        named: dict[str, Tensor] = dict(model.named_parameters())
        named |= engine.strategy.named_buffers()
        named |= {f"{it} (EMA)": value for it, value in optimizer.ema_values.items()}
        names = {id(weight): name for name, weight in named.items()}
        for it in () if self._has_shards else optimizer.optimizers:
            for weight, state in it.local.state.items():
                of = names.get(id(weight), "a weight")
                found = {f"{k} of {of}": v for k, v in state.items()}
                named |= {k: v for k, v in found.items() if isinstance(v, Tensor)}
        return {name: checksum(tensor) for name, tensor in named.items()}

    def _place(self, rank: int) -> str:
        node = next(it for it in self._world.nodes if rank in it.ranks)
        return f"rank {rank} on {node.hostname}"

    def _fail(self, state: TrainState, rank: int | None, reason: str) -> None:
        who = "one of them" if rank is None else "this rank"
        what = f"{who} computes wrongly, or its memory does"
        if "the inputs" in reason or "the targets" in reason:
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
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = tensor.contiguous().flatten().view(kinds[tensor.element_size()])
    whole = len(raw) // COLUMNS * COLUMNS
    columns = raw[:whole].view(-1, COLUMNS).sum(0, dtype=torch.int64)
    rest = raw[whole:].to(torch.int64)
    return _digest(torch.cat([columns, rest]).cpu().numpy().tobytes())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _sums_of(batch: Batch, loss: Tensor, weights: Mapping[str, Tensor]) -> Sums:
    """Return checksums of what a micro-batch was and gave, in this order."""
    trees: Sequence[tuple[str, Any]] = (
        ("the inputs", batch.inputs),
        ("the targets", batch.targets),
    )
    sums = {
        name: "".join(checksum(it) for it in leaves_of(tree) if isinstance(it, Tensor))
        for name, tree in trees
    }
    sums["the loss"] = checksum(loss)
    for name, weight in reversed([*weights.items()]):  # as the backward pass goes
        if weight.grad is not None:
            sums[f"the gradient of {name}"] = checksum(weight.grad)
    return sums

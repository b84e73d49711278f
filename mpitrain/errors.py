"""The exceptions of mpitrain, as a tree.

    MpitrainError                 catch this for anything of ours; exit status 1
    |-- UsageError (ValueError)   the command line, the YAML file; exit status 2
    |-- DataError (ValueError)    samples or models that are not what they must be
    |-- NonFiniteError (ArithmeticError)   a loss or a gradient is infinite or NaN
    |-- Stopped                   stopped on request, can be resumed; exit status 75
    |-- LaunchError               the start: MPI, network, process group
        |-- MpiNotFoundError      mpi4py could not load an MPI library
        |-- TopologyError         ranks, nodes and devices do not fit together
        |-- EarlyReturnError      a rank returned while the others still worked
        |-- RemoteError           another rank's exception, seen from this one

Every message says what was found and where, what was expected, what to type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

_MIN_LIKENESS = 0.75


class MpitrainError(Exception):
    """Base of all errors that mpitrain raises on purpose."""

    exit_status = 1  # the job's, when this ends it
    # The rank that prints it, where every rank raises it; ``None``: one rank does.
    reporting_rank: int | None = None
    # Whether all ranks raise it from equal facts, so that none need be named.
    is_collective = False

    def on_all_ranks(self) -> Self:
        """Say that every rank raises it, from equal facts: rank zero prints it."""
        self.reporting_rank, self.is_collective = 0, True
        return self


class UsageError(MpitrainError, ValueError):
    """A command line or configuration that cannot be used."""

    exit_status = 2


class DataError(MpitrainError, ValueError):
    """Data or a model of the user's that does not hold what it must."""


class NonFiniteError(MpitrainError, ArithmeticError):
    """A loss or a gradient is infinite or NaN; the weights were not changed."""


class Stopped(MpitrainError):
    """The training was stopped on request and can be resumed."""

    exit_status = 75  # EX_TEMPFAIL: nothing is wrong, start it again


class LaunchError(MpitrainError):
    """The job could not be started as a whole."""


class MpiNotFoundError(LaunchError):
    """mpi4py could not load an MPI library."""

    hint = ""  # the reason and what to do, in one line


class TopologyError(LaunchError):
    """Ranks, nodes and devices contradict each other."""


class RemoteError(LaunchError):
    """Another rank raised an exception; the message is that rank's."""


class EarlyReturnError(LaunchError):
    """A rank returned while others still worked."""


@contextmanager
def usage_errors_in(place: str) -> Iterator[None]:
    """Name the place, such as a file, in a UsageError of this block."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the known word that is most like a (cut-off) `word`.

    >>> did_you_mean("minst", ["digits", "mnist", "fashion-mnist"])
    " Did you mean 'mnist'?"
    >>> did_you_mean("vit_smal", ["gcvit_small", "vit_small_patch16_224"])
    " Did you mean 'vit_small_patch16_224'?"
    >>> did_you_mean("something", ["else"])
    ''
    """
    from difflib import SequenceMatcher  # not for each process that can fail

    def likeness(name: str) -> float:
        parts = (name, name[: len(word)], name[: len(word) + 1])
        return max(SequenceMatcher(None, part, word).ratio() for part in parts)

    scores = {name: likeness(name) for name in known}
    best = max(scores, key=lambda name: (scores[name], -len(name)), default="")
    return f" Did you mean {best!r}?" if scores.get(best, 0.0) >= _MIN_LIKENESS else ""

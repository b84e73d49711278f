"""Loggers: who is told how a training goes, beside its own record.

Each is a `protocol.Logger`. `choice` makes them by name, `feeding` lets each work in a
thread of its own, `telling` says what they hear.
"""

from mpitrain.record.loggers.protocol import Logger, RunFacts

__all__ = ["Logger", "RunFacts"]

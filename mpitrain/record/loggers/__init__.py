"""Loggers: where a training is logged besides its own record.

`base` has the interface, `builtin` the loggers known by name, `process` runs each in a
process of its own, and `callback` gives them the metrics of a training.
"""

from mpitrain.record.loggers.base import Logger, RunInfo

__all__ = ["Logger", "RunInfo"]

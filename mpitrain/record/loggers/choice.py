"""From ``--log`` to loggers. Imports no torch, and of the loggers' libraries none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import fields

from mpitrain.errors import UsageError
from mpitrain.plugins import call_with_known, is_reference, load_reference
from mpitrain.record.config import LogConfig
from mpitrain.record.loggers.feeding import Fed
from mpitrain.record.loggers.protocol import Logger, RunFacts
from mpitrain.record.loggers.telling import Loggers

LIBRARIES = ("tensorboard", "wandb")
"""Loggers that need a library of the same name, which is an extra of ours."""


def refuse_missing(config: LogConfig) -> None:
    """Make sure that what ``--log`` needs is installed; looks, and imports nothing.

    Raises:
        UsageError: It is not.
    """
    for name in LIBRARIES:
        if name in config.log and not _is_installed(name):
            raise UsageError(
                f"--log {name}: the library {name} is not installed. Expected: "
                f"pip install 'mpitrain[{name}]'"
            )


def _is_installed(name: str) -> bool:
    """Whether there is such a library; a mere folder, such as W&B's, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def open_loggers(config: LogConfig, facts: RunFacts) -> Loggers:
    """Choose the loggers of a rank; none of them has begun.

    Args:
        config: What was asked.
        facts: What they are made from.

    Raises:
        UsageError: There is no such logger.
    """
    names = config.log
    if facts.rank:
        names = ("wandb",) if config.wandb_all_ranks else ()
    return Loggers(
        [Fed(name, _maker(name, config, facts)) for name in names],
        every=config.log_every_steps,
        step=facts.step,
        want_images=facts.rank == 0 and any(name != "csv" for name in names),
    )


def _maker(name: str, config: LogConfig, facts: RunFacts) -> Callable[[], Logger]:
    """Return what makes a logger; the imports wait until then."""
    if is_reference(name):
        flag = f"--log {name}"
        own = load_reference(name, "--log")
        known = {it.name: getattr(facts, it.name) for it in fields(facts)}
        return lambda: call_with_known(own, known, flag)

    def make() -> Logger:
        if name == "tensorboard":
            from mpitrain.record.loggers.tensorboard_file import TensorBoard

            return TensorBoard(facts)
        if name == "wandb":
            from mpitrain.record.loggers.weights_and_biases import WeightsAndBiases

            return WeightsAndBiases(facts, config)
        from mpitrain.record.loggers.csv_file import CsvFile

        return CsvFile(facts)

    return make

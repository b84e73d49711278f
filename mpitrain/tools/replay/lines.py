"""What a replay prints: what has changed, the step, and whether it is as recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.config import TrainConfig
from mpitrain.console import say
from mpitrain.files import read_json
from mpitrain.record.environment import facts_for_bits
from mpitrain.record.fingerprints import FILE, FingerprintFile
from mpitrain.record.reading import Metrics
from mpitrain.record.runs import differences
from mpitrain.settings import facts_of
from mpitrain.tools.replay.config import ReplayConfig
from mpitrain.tools.replay.watch import MicroBatchSeen
from mpitrain.train.metrics import StepMetrics

TOLERANCE = 1e-3  # of a loss, relative, without --bitwise: rounding, and its growth
MAX_SAMPLES = 8  # that are shown, those with the largest losses


def changes(
    run: Path, environment: Mapping[str, Any], config: TrainConfig
) -> tuple[list[str], bool]:
    """Say what the last bits may depend on, and is not as recorded.

    Also returns whether the bits can be those of the run all the same.
    """
    recorded = facts_for_bits(read_json(run / "environment.json"))
    now = facts_for_bits(environment)
    # With --bitwise a rank computes by one thread (docs/decisions/0013).
    free = {"ranks", "backend", *(["threads"] if config.bitwise else [])}
    can_be_equal = not any(
        recorded.get(name) != now[name] for name in ("torch", "processor", "gpu")
    )
    return differences(recorded, now, free), config.bitwise and can_be_equal


def changed_flags(before: Mapping[str, Any], now: TrainConfig) -> list[str]:
    """Say which flags that may change results are not those of the run."""
    ignored = {
        name
        for name, of in facts_of(TrainConfig).items()
        if of.may_change and not of.changes_bits
    }
    return differences(before, now.as_plain(""), ignored)


class Comparison:
    """Compares the losses of steps with those in a run folder; on rank zero."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._recorded: dict[int, StepMetrics] | None = None
        self._micro_batches: Mapping[int, Mapping[str, float]] = {}
        self.last: dict[int, StepMetrics] = {}  # that were compared last, by number
        self._num = 0  # steps that are recorded, too
        self.difference = ""  # the first one, in words
        self.is_bitwise = False  # whether the bits are compared

    def add(
        self, steps: Sequence[StepMetrics], losses: Sequence[Sequence[float]]
    ) -> None:
        """Compare steps, and the losses of their micro-batches where they are fixed."""
        if self._recorded is None:
            metrics = Metrics(self._run / "metrics.jsonl")
            file = FingerprintFile(self._run / FILE)
            for reader in (metrics, file):
                reader.update()
            self._recorded = {it.step: it for it in metrics.steps}
            self._micro_batches = file.losses
        self.last = {it.step: it for it in steps}
        for now, of_now in zip(steps, losses or [()] * len(steps), strict=True):
            before = self._recorded.get(now.step)
            if before is None:
                continue
            self._num += 1
            pairs = {
                "train_loss": (before.loss, now.loss),
                "gradient_norm": (before.grad_norm, now.grad_norm),
            }
            of_step = self._micro_batches.get(now.step, {})
            for (name, one), other in zip(of_step.items(), of_now, strict=False):
                pairs[f"the loss of {name}"] = one, other
            wrong = [
                f"{name} {one!r}, now {other!r}"
                for name, (one, other) in pairs.items()
                if not self._is_same(one, other)
            ][:3]
            if wrong and not self.difference:
                found = f"step {now.step} is not as recorded: {'; '.join(wrong)}"
                self.difference = found
                say(found)  # at once: the step that is asked for may be far

    def summary(self) -> str:
        """Say how many steps were compared."""
        if not self._num:
            return "none of these steps is recorded"
        if self.difference:
            return "the rest depends on it"
        how = "to the bit" if self.is_bitwise else f"to {TOLERANCE:g}, relative"
        are = "step is" if self._num == 1 else "steps are"
        return f"{self._num} {are} as recorded, {how}"

    def _is_same(self, one: float, other: float) -> bool:
        if not (math.isfinite(one) and math.isfinite(other)):
            return math.isfinite(one) == math.isfinite(other)
        if self.is_bitwise:
            return one == other
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-6)


def step_lines(
    seen: Sequence[MicroBatchSeen],
    step: int,
    comparison: Comparison,
    config: ReplayConfig,
    *,
    is_skipped: bool,
) -> Iterator[str]:
    """Tell of a step: its losses, and what is not finite.

    ``seen`` are the micro-batches that are asked for, of all ranks.
    """
    now = comparison.last.get(step)
    yield comparison.summary()
    if now is not None:
        yield (
            f"step {step}, epoch {now.epoch}: train_loss {now.loss!r}, gradient norm "
            f"{now.grad_norm!r}, lr {now.lr!r}" + ", not applied" * is_skipped
        )
    yield from _nonfinite_lines(seen)
    rows = [
        (loss, sample, _label(of))
        for of in seen
        for sample, loss in zip(of.samples, of.losses, strict=False)
        if config.sample in (None, sample)
    ]
    if not rows:
        asked = {"sample": config.sample, "micro-batch": config.micro_batch}
        named = [f"{name} {it}" for name, it in asked.items() if it is not None]
        where = f"{' of '.join(named)} is not in step {step}"
        yield "no sample has a loss of its own here" if seen else where
        return
    is_whole = config.sample is not None or config.micro_batch is not None
    # NaN compares with nothing: it is first, as the largest.
    rows.sort(key=lambda it: -math.inf if math.isnan(it[0]) else -it[0])
    shown = rows if is_whole else rows[:MAX_SAMPLES]
    if not is_whole and len(rows) > MAX_SAMPLES:
        yield f"the {MAX_SAMPLES} largest losses of {len(rows)} samples:"
    for loss, sample, label in shown:
        yield f"  sample {sample:<8} loss {loss:<12.6g} {label}"


def _nonfinite_lines(seen: Sequence[MicroBatchSeen]) -> Iterator[str]:
    for of in seen:
        label = _label(of)
        if of.bad_inputs:
            named = " ".join(map(str, of.bad_inputs))
            yield f"inputs or targets are not finite: sample {named} ({label})"
        alone = [
            sample
            for sample, loss in zip(of.samples, of.losses, strict=False)
            if not math.isfinite(loss)
        ]
        if alone and alone != of.bad_inputs:
            named = " ".join(map(str, alone))
            yield f"the loss is not finite: sample {named} ({label})"
        if of.first_bad:
            yield f"first that is not finite: {of.first_bad} ({label})"


def _label(of: MicroBatchSeen) -> str:
    of_pass = f", pass {of.pass_name!r}" * bool(of.pass_name)
    return f"micro-batch {of.number}, rank {of.rank}{of_pass}"

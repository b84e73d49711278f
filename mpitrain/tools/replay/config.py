"""What a replay computes: the run, its checkpoint before the step, and the flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mpitrain.checkpoint.layout import (
    Checkpoint,
    checkpoint_at,
    list_checkpoints,
    name_of,
)
from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.files import read_json, read_yaml
from mpitrain.flags import PROGRAM
from mpitrain.record.runs import RUN
from mpitrain.settings import setting
from mpitrain.tools.export import is_complete
from mpitrain.tools.train.prepare import read_config


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Compute a step of a run again, from the checkpoint before it.

    It writes nothing into RUN. Flags of the training follow --, such as --device cpu;
    of a script its command line: -- run script.py ARGS. The exit status is 1 if a loss
    is not the recorded one.
    """

    run: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME."""
    step: int | None = setting(None, minimum=1)
    """Number of the step, from 1, as in metrics.jsonl."""
    until: Literal["nan"] | None = None
    """nan: the first step whose loss or gradient is NaN or infinite, from --step or the
    last checkpoint on."""
    from_step: int | None = setting(None, minimum=0, flag="from")
    """Begin from the checkpoint of this step; 0: from the start. Default: from the last
    one before."""
    micro_batch: int | None = setting(None, minimum=0)
    """Show this micro-batch alone, from 0."""
    sample: int | None = setting(None, minimum=0)
    """Show this sample alone."""
    layers: bool = False
    """Show the norms of outputs, gradients and weights by layer."""
    save: Path | None = None
    """Write the model's weights before the step, and its batches, to a file that
    torch.load reads."""
    pdb: bool = False
    """Start the debugger before the forward pass, with --until nan if an input is not
    finite; on one rank."""
    hashes: Path | None = None
    """For diff --replay: write hashes of what the step computes; on one rank."""

    def __post_init__(self) -> None:
        if self.step is None and self.until is None:
            raise UsageError("replay: expected --step N, or --until nan")
        begins = self.from_step or 0
        if self.step is not None and begins >= self.step:
            raise UsageError(
                f"--from {begins} --step {self.step}: expected an earlier step"
            )
        for name, file in (("save", self.save), ("hashes", self.hashes)):
            if file is not None and not file.absolute().parent.is_dir():
                raise UsageError(
                    f"--{name} {file}: expected a file in an existing folder"
                )


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """A replay, as rank zero has read it for all ranks."""

    config: ReplayConfig
    run_id: str
    recorded: Mapping[str, Any]  # its configuration
    training: TrainConfig | None  # of the command; ``None``: a script's
    checkpoint: Path | None  # where it begins; ``None``: anew


def read_request(config: ReplayConfig, words: Sequence[str]) -> ReplayRequest:
    """Read the run folder, and the ``words`` after ``--``; on rank zero."""
    path = config.run
    config = replace(config, run=path.absolute())  # a script may change the folder
    run_id, file = read_json(path / RUN).get("id"), path / "config.yaml"
    recorded = read_yaml(file)
    if not run_id or not recorded:
        raise UsageError(
            f"{path} is no run of a training: it has no {RUN}, or no config.yaml; "
            "expected one such as runs/NAME"
        )
    script, training = recorded.get("script"), None
    if script is not None:
        if words[:1] != ["run"]:
            raise UsageError(
                f"{path} is of a script. Type: {PROGRAM} replay {path} ... -- run "
                f"{script} ARGS"
            )
    elif words[:1] == ["run"]:
        raise UsageError(f"{path} is not of a script; expected flags of a training")
    else:
        training = read_config(["--config", str(file), *words])
        training = replace(training, compile=False)  # torch calls no hooks then
    found = _checkpoint(config, recorded.get("resume", "auto"))
    return ReplayRequest(
        config=config,
        run_id=run_id,
        recorded=recorded,
        training=training,
        checkpoint=None if found is None else found.path.absolute(),
    )


def _checkpoint(config: ReplayConfig, resume: str) -> Checkpoint | None:
    """Return the checkpoint to begin from; ``None``: from the start.

    ``resume``: what the run began from, or ``auto`` or ``never``.
    """
    found = list_checkpoints(config.run)
    if config.from_step is not None:
        found = [it for it in found if it.step == config.from_step]
        if not found and config.from_step:
            raise UsageError(
                f"{config.run} has no checkpoint of step {config.from_step}; expected "
                f"one such as {name_of(config.from_step)}"
            )
    elif config.step is not None:
        found = [it for it in found if it.step < config.step]
    if (newest := next(filter(is_complete, found), None)) is not None:
        return newest
    if resume in ("auto", "never"):
        return None
    if list_checkpoints(Path(resume)):
        raise UsageError(
            f"{config.run} has no checkpoint before the step, and began from one of "
            f"{resume}, which is not recorded; expected a later step"
        )
    return checkpoint_at(Path(resume))

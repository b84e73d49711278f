"""`diff --replay`: what two runs compute differently, down to a tensor.

Each run is replayed in a process of its own, perhaps with other code, and writes hashes
of what it computes. First of all weights after each step, from the last checkpoint that
both have; then of everything in the first step that differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from mpitrain.data.samples import digest
from mpitrain.errors import UsageError
from mpitrain.files import write_atomic


class StepHashes:
    """Hashes of everything that a `StepWatch` sees, in its order, as rows of a file."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def observe(self, kind: str, number: int, name: str, tensor: Tensor) -> None:
        """Add a row."""
        row = {"kind": kind, "micro_batch": number, "name": name}
        self._rows.append({**row, "hash": digest(tensor)})

    def end_step(self, step: int, weights: Mapping[str, Any]) -> None:
        """Add a row with a hash of all weights after a step."""
        row = {"kind": "step", "step": step, "hash": digest(dict(weights))}
        self._rows.append(row)

    def end(self, step: int, weights: Mapping[str, Any], file: Path) -> None:
        """Add a row for each weight after the last step, and write the file."""
        for name, it in weights.items():
            if isinstance(it, Tensor):
                self.observe("weight", -1, name, it)
        self.end_step(step, weights)
        write_atomic(file, "".join(json.dumps(row) + "\n" for row in self._rows))


def bisect(
    runs: Sequence[Path],
    step: int,
    begins: int,
    words: Sequence[str],
    with_code: Path | None = None,
) -> str:
    """Return what the runs compute differently first, in words.

    Args:
        runs: Two run folders.
        step: The first step that is known to differ, or a later one.
        begins: The step of a checkpoint that both have, with equal bits; 0: the start.
        words: What `replay` takes after ``--``.
        with_code: A folder with the code of the second run; ``None``: this one.

    Raises:
        UsageError: A replay failed.
    """
    folders = None, with_code
    with tempfile.TemporaryDirectory(prefix="mpitrain-diff-") as name:
        files = [Path(name) / str(number) for number in range(2)]

        def hashes(step: int) -> list[list[dict[str, Any]]]:
            for run, folder, file in zip(runs, folders, files, strict=True):
                _replay(run, step, begins, words, folder, file)
            return [[*map(json.loads, it.read_text().splitlines())] for it in files]

        rows = hashes(step)
        of_steps = [[row for row in it if row["kind"] == "step"] for it in rows]
        first = _first(*of_steps)
        if first is None:
            return (
                f"replayed from step {begins} to {step} here, the runs are equal: what "
                "differs is not their code or configuration, but where they ran"
            )
        number = (first[0] or first[1])["step"]
        if number != step:
            rows = hashes(number)
    found = _first(*([row for row in it if row["kind"] != "step"] for it in rows))
    return f"replayed from step {begins}: step {number} differs first, {_named(found)}"


def _first(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the first pair of rows that differ; a row is empty where one has none."""
    nothing: Mapping[str, Any] = {}
    pairs = zip_longest(one, other, fillvalue=nothing)
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _named(pair: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> str:
    """Name what a pair of rows is of.

    >>> row = {"kind": "output", "micro_batch": 2, "name": "fc (Linear)", "hash": "a"}
    >>> _named((row, {**row, "hash": "b"}))
    'in micro-batch 2: the output of fc (Linear)'
    >>> _named((row, {**row, "name": "act (ReLU)", "hash": "b"}))
    'in micro-batch 2: the output of fc (Linear), and the output of act (ReLU)'
    """
    if pair is None:
        return "but not when it is replayed again: a run is not deterministic"
    found = []
    for row in pair:
        kind, name = row.get("kind"), row.get("name", "")
        what = {
            "output": f"the output of {name}",
            "gradient": f"the gradient of {name}",
            "sum": f"the sum of gradients of {name}",
            "weight": f"{name} after the step",
            None: "nothing",
        }.get(kind, name)
        found.append(what)
    numbers = {row["micro_batch"] for row in pair if row.get("micro_batch", -1) >= 0}
    where = f"in micro-batch {min(numbers)}: " if numbers else "in "
    return where + ", and ".join(dict.fromkeys(found))


def _replay(
    run: Path,
    step: int,
    begins: int,
    words: Sequence[str],
    folder: Path | None,
    file: Path,
) -> None:
    """Replay a run in a process of its own, which writes hashes."""
    environ = dict(os.environ)
    # Of the pass before: whether there is a file tells if this one succeeded.
    file.unlink(missing_ok=True)
    if folder is not None:
        path = (str(folder.absolute()), environ.get("PYTHONPATH", ""))
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    flags = ["--step", str(step), "--from", str(begins), "--hashes", str(file)]
    command = [sys.executable, "-m", "mpitrain", "replay", str(run.absolute()), *flags]
    done = subprocess.run(
        [*command, *(["--", *words] if words else [])],
        check=False,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if not file.exists():  # it may have said that losses are not as recorded
        raise UsageError(
            f"{run} cannot be replayed:\n{done.stdout.rstrip()[-2000:]}\nExpected "
            f"this to run: {' '.join(command)}"
        )

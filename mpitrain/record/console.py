"""The screen: who is there, how it goes, what came out. Rank zero's voice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from mpitrain.record.events import Epoch, Listener, Pace, StepRow
from mpitrain.record.progress import Standing, epoch_line
from mpitrain.world import World, in_runs

if TYPE_CHECKING:
    from tqdm import tqdm


LINE_SECONDS = 60.0
"""An epoch that lasts longer has lines between."""


class Console(Listener, Protocol):
    """What shows a training's progress; leaves the screen tidy when it is left."""

    def say(self, line: str) -> None:
        """Print a line."""

    def standing(self) -> str:
        """Say how it goes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Lines:
    """Lines, as a batch job's log wants them: for each epoch, and in long ones between.

    Args:
        num_epochs: Epochs of the training.
        standing: Puts into words how it goes.
    """

    def __init__(self, num_epochs: int, standing: Standing | None = None) -> None:
        self._num_epochs = num_epochs
        self._standing = standing or Standing()
        self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def standing(self) -> str:
        """Say how it goes."""
        return self._standing.in_words()

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Note them."""
        self._standing.rows_done(rows)

    def pace_done(self, pace: Pace) -> None:
        """Print a line if there was none for long."""
        self._standing.pace_done(pace)
        if time.monotonic() - self._said_at > LINE_SECONDS:
            self._said_at = time.monotonic()
            self.say(
                f"at step {pace.step} of epoch {pace.epoch}/{self._num_epochs} | "
                f"{self._standing.in_words()}"
            )

    def epoch_done(self, epoch: Epoch) -> None:
        """Print the epoch's line."""
        self._said_at = time.monotonic()
        self._standing.epoch_done(epoch)
        self.say(epoch_line(epoch, self._num_epochs))


class Bar(Lines):
    """A progress bar over all steps, with the epochs' lines above it."""

    def __init__(self, num_epochs: int, standing: Standing | None = None) -> None:
        super().__init__(num_epochs, standing)
        from tqdm import tqdm
        from tqdm.utils import ObjectWrapper

        class WholeLines(ObjectWrapper):
            """A file in which the bar's text ends with a newline.

            Open MPI 5's mpirun holds a line back until it ends.
            """

            def write(self, text: str) -> None:
                """Write the bar in place of the last one."""
                if text.startswith("\r"):
                    # Clear, write, go up, and come back by the newline: to the begin
                    # of the bar's own line, where other output may overwrite it.
                    text = f"\r\x1b[2K{text[1:].rstrip()}\x1b[A\n"
                self._wrapped.write(text)

            def __eq__(self, other: object) -> bool:
                # So tqdm.write knows that it writes into the same file.
                return bool(self._wrapped == other)

            __hash__ = ObjectWrapper.__hash__

        self._bar: tqdm[Any] = tqdm(
            total=self._standing.num_steps,
            initial=self._standing.done,
            unit="step",
            file=WholeLines(sys.stdout),
            ncols=terminal_columns() - 1,
            nrows=20,  # a rank's terminal says it has no rows, and tqdm would hide
            leave=False,
            mininterval=0.2,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{desc}"
            if self._standing.num_steps
            else "{n_fmt} steps{desc}",
        )

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def step_done(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(step - self._bar.n)

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Note them, and move the bar, if nobody did at each step."""
        super().rows_done(rows)
        self.step_done(rows[-1].step)

    def pace_done(self, pace: Pace) -> None:
        """Tell how it goes, beside the bar."""
        self._standing.pace_done(pace)
        words = self._standing.in_words()
        self._bar.set_description_str(f" | {words}")

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def open_console(
    progress: Literal["auto", "bar", "lines"], num_epochs: int, told: Standing
) -> Console:
    """Choose how to show progress.

    Args:
        progress: What was asked; ``"auto"``: a bar where a person watches.
        num_epochs: Epochs of the training.
        told: Puts into words how it goes.

    Returns:
        The console.
    """
    is_bar = progress == "bar" or (progress == "auto" and terminal_path() is not None)
    return Bar(num_epochs, told) if is_bar else Lines(num_epochs, told)


def terminal_path() -> str | None:
    """Return the terminal that shows what this process prints, if there is one.

    Under Open MPI a rank's stdout is a pseudo-terminal even where mpirun writes to a
    file, and under MPICH it is a pipe even where mpiexec writes to a terminal (both
    tried). So the question is asked of the parent too: under Open MPI that is mpirun
    itself, or its daemon, whose stdout is no terminal.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        path = str(Path(f"/proc/{os.getppid()}/fd/1").readlink())
    except OSError:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def terminal_columns(default: int = 100) -> int:
    """Return the width of the terminal; mpirun's, since the rank's own has none."""
    path = terminal_path()
    try:
        if path is not None:
            with Path(path).open() as terminal:
                return os.get_terminal_size(terminal.fileno()).columns or default
    except OSError:
        pass
    return default


def world_lines(world: World) -> list[str]:
    """Say who is there: a line per node, and how they meet.

    Args:
        world: Where rank zero stands.

    Returns:
        Lines for the screen.
    """
    lines = []
    for node_rank, node in enumerate(world.nodes):
        ranks = f"rank{'s' * (len(node.ranks) > 1)} {in_runs(node.ranks)}"
        lines.append(
            f"node {node_rank}: {node.hostname}, {ranks} on "
            f"{devices_in_words(node.devices, node.gpus)}, "
            f"{node.num_cores} core{'s' * (node.num_cores != 1)}"
        )
    lines.append(
        f"backend {world.backend}, rendezvous at "
        f"{world.master_addr}:{world.master_port}, "
        f"{world.num_threads} thread{'s' * (world.num_threads != 1)} per rank"
    )
    return lines


def devices_in_words(devices: Sequence[str], gpus: Sequence[str] = ()) -> str:
    """Sum up the devices of a node's ranks.

    Args:
        devices: Each rank's device by the name that this rank has for it.
        gpus: Each rank's GPU by UUID; empty without GPUs.

    Returns:
        The devices, and how many ranks share each.

    >>> devices_in_words(["cpu", "cpu"])
    'cpu'
    >>> devices_in_words(["cuda:0", "cuda:1", "cuda:0"], ["a", "b", "a"])
    'cuda:0 (shared by 2 ranks), cuda:1'

    Ranks that see one GPU each, another one for each, all call it ``cuda:0``:

    >>> devices_in_words(["cuda:0", "cuda:0"], ["a", "b"])
    '2 GPUs, each as cuda:0'
    """
    if set(devices) == {"cpu"}:
        return "cpu"
    names: dict[str, list[str]] = {}
    for device, gpu in zip(devices, gpus or devices, strict=True):
        names.setdefault(gpu, []).append(device)
    words: list[str] = []
    for of_gpu in names.values():
        name = " or ".join(dict.fromkeys(of_gpu))
        num_ranks = len(of_gpu)
        words.append(
            name if num_ranks == 1 else f"{name} (shared by {num_ranks} ranks)"
        )
    return ", ".join(
        word if words.count(word) == 1 else f"{words.count(word)} GPUs, each as {word}"
        for word in dict.fromkeys(words)
    )

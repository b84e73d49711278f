"""`python -m mpitrain jobscript`: a job script for SLURM or PBS. Needs no MPI.

The scripts are the jinja templates `templates/slurm.sh` and `templates/pbs.sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional, UseAppendAction

from mpitrain.errors import UsageError

TEMPLATES = Path(__file__).with_name("templates")

# How long before its end a job of a chain is asked to stop, if it is long enough.
MAX_NOTICE_SECONDS = 120

SchedulerName = Literal["slurm", "pbs"]

# Values in lines that the scheduler reads, where nothing is quoted.
PATTERNS = {
    "mem": (r"[1-9]\d*[KMGT]", "a number with K, M, G or T, such as 16G"),
    "account": (r"\w[\w.,:@/+=-]*", "letters, digits and . , : @ / + = -"),
    "partition": (r"\w[\w.,-]*", "letters, digits and . , -"),
    "queue": (r"\w[\w.@-]*", "letters, digits and . @ -"),
    "name": (r"[A-Za-z][\w.+-]*", "a letter, then letters, digits and . + -"),
}


@dataclass(frozen=True, kw_only=True)
class JobscriptConfig:
    """Print a job script. Flags of the training follow after --."""

    scheduler: Positional[SchedulerName]
    """The scheduler."""
    nodes: int = 2
    """Number of nodes."""
    slots_per_node: int = 4
    """Processes (ranks) on each node."""
    gpus_per_node: int | None = None
    """GPUs of each node; 0: none. Default: as many as processes."""
    cpus_per_slot: int = 4
    """Cores for each process."""
    mem: str | None = "16G"
    """Memory of each node, as 512M, 16G or 2T. None: the site's default."""
    time: str = "00:10:00"
    """Limit, [days-]hours:minutes:seconds; N alone: minutes (SLURM), seconds (PBS)."""
    account: str | None = None
    """The project that pays. Default: a line to edit, as a comment."""
    partition: str | None = None
    """Partition (SLURM)."""
    queue: str | None = None
    """Queue (PBS)."""
    name: str = "mpitrain"
    """Name of the job; with --jobs, of the run, too."""
    jobs: int = 1
    """Maximum number of jobs, one after another, until the training is finished."""
    spare_nodes: int = 0
    """Nodes in addition to --nodes, to replace failing ones (with --jobs)."""
    module: UseAppendAction[tuple[str, ...]] = ()
    """An environment module to load; may be given several times."""
    venv: Path = Path(".venv")
    """Virtual environment; a relative path is from the folder of submission."""
    output: Path | None = None
    """File to write, whole or not at all. Default: standard output."""

    def __post_init__(self) -> None:
        for flag, value, minimum in (
            ("--nodes", self.nodes, 1),
            ("--slots-per-node", self.slots_per_node, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-slot", self.cpus_per_slot, 1),
            ("--jobs", self.jobs, 1),
            ("--spare-nodes", self.spare_nodes, 0),
        ):
            if value is not None and value < minimum:
                raise UsageError(f"{flag} must be at least {minimum}, found {value}")
        if self.spare_nodes and self.jobs == 1:
            raise UsageError(
                f"--spare-nodes {self.spare_nodes}: a script for one job uses no spare "
                "nodes; expected --jobs of at least 2 beside it"
            )
        if self.scheduler == "pbs" and self.partition is not None:
            raise UsageError(f"--partition {self.partition}: PBS says --queue")
        if self.scheduler == "slurm" and self.queue is not None:
            raise UsageError(f"--queue {self.queue}: SLURM says --partition")
        seconds_of(self.time, self.scheduler)
        for name, (pattern, expected) in PATTERNS.items():
            word = getattr(self, name)
            if word is not None and not re.fullmatch(pattern, word, re.ASCII):
                raise UsageError(f"--{name} {word!r}: expected {expected}")
        for module in self.module:
            _check_word(module, f"--module {module!r}")
        _check_word(str(self.venv), f"--venv {str(self.venv)!r}")


def text_of(
    config: JobscriptConfig, words: Sequence[str], command: str = "train"
) -> str:
    """Return the job script, in which `words` follow `python -m mpitrain COMMAND`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    for word in words:
        _check_word(word, f"{word!r} after --")
    seconds = seconds_of(config.time, config.scheduler)
    slots, gpus = config.slots_per_node, config.gpus_per_node
    venv = config.venv.expanduser()
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters["quote"] = shlex.quote
    values = vars(config) | {
        "time": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
        "notice": notice_seconds(seconds),
        "all_nodes": config.nodes + config.spare_nodes,
        "gpus": slots if gpus is None else gpus,
        "from_where": "from any folder"
        if venv.is_absolute()
        else f"from the folder that holds {venv}",
        "venv": ("" if venv.is_absolute() else "$PWD/") + shlex.quote(str(venv)),
        "is_training": command in ("train", "sweep"),
        "command": "" if command == "train" else f" {command}",
        "words": "".join(" " + shlex.quote(word) for word in words),
    }
    return templates.get_template(f"{config.scheduler}.sh").render(values)


def notice_seconds(seconds: float) -> int:
    """Return how long before its end a job of so many seconds is asked to stop."""
    return int(min(MAX_NOTICE_SECONDS, seconds // 5))


def seconds_of(time: str, scheduler: SchedulerName) -> int:
    """Parse a time as the scheduler does, in seconds; both may have days.

    >>> seconds_of("30", "slurm"), seconds_of("30", "pbs"), seconds_of("1-12", "slurm")
    (1800, 30, 129600)
    """
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", time)
    if found is not None:
        days, *rest = found.groups()
        fields = [int(text) for text in rest if text is not None]
        if days is not None:  # days-hours[:minutes[:seconds]]
            hours, minutes, seconds = [*fields, 0, 0][:3]
        elif len(fields) == 1 and scheduler == "slurm":
            hours, minutes, seconds = 0, fields[0], 0
        else:  # [[hours:]minutes:]seconds
            hours, minutes, seconds = [0, 0, *fields][-3:]
        total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        too_large = any(field >= 60 for field in fields[1:])
        if total and not too_large and not (days is not None and hours >= 24):
            return total
    alone = "minutes" if scheduler == "slurm" else "seconds"
    raise UsageError(
        f"--time {time!r}: expected hours:minutes:seconds, minutes:seconds, {alone}, "
        "or days-hours:minutes:seconds, more than 0"
    )


def _check_word(word: str, where: str) -> None:
    """Refuse line ends, tabs, and bytes that are no text."""
    if not word.isprintable():
        raise UsageError(
            f"{where}: expected printable characters on one line; a script of lines "
            "cannot hold others"
        )

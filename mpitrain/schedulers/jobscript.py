"""`python -m mpitrain jobscript`: a job script for SLURM or PBS. Needs no MPI.

The scripts are `templates/slurm.sh` and `templates/pbs.sh`, with ``{{name}}`` where
something is put in. What is put in on a line of its own, and is nothing, leaves none.
Their last part is `...-once.sh`, or `...-chain.sh` for a training of several jobs, with
what they have in common: `run.sh`, `once-end.sh` and `chain-loop.sh`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional, UseAppendAction

from mpitrain.errors import UsageError

SCRIPTS = Path(__file__).with_name("templates")

EARLY_SECONDS = 120
"""How long before its end a job of a chain is told to stop, where it is long enough."""

SchedulerName = Literal["slurm", "pbs"]

PATTERNS = {
    "mem": (r"[1-9]\d*[KMGT]", "a number with K, M, G or T, such as 16G"),
    "account": (r"\w[\w.,:@/+=-]*", "letters, digits and . , : @ / + = -"),
    "partition": (r"\w[\w.,-]*", "letters, digits and . , -"),
    "queue": (r"\w[\w.@-]*", "letters, digits and . @ -"),
    "name": (r"[A-Za-z][\w.+-]*", "a letter, then letters, digits and . + -"),
}
"""What stands in a line that the scheduler reads, and how: no shell quotes it there."""


@dataclass(frozen=True, kw_only=True)
class JobscriptConfig:
    """Print a job script. Flags of the training follow after --."""

    scheduler: Positional[SchedulerName]
    """Who shall run the job."""
    nodes: int = 2
    """Number of nodes."""
    slots_per_node: int = 4
    """Processes (ranks) on each node."""
    gpus_per_node: int | None = None
    """GPUs of each node; 0: none. Default: as many as processes."""
    cpus_per_slot: int = 4
    """Cores for each process."""
    mem: str | None = "16G"
    """Memory of each node, as 512M, 16G or 2T. None: what the site gives."""
    time: str = "00:10:00"
    """Limit, [days-]hours:minutes:seconds; N alone: minutes (SLURM), seconds (PBS)."""
    account: str | None = None
    """The project that pays. Default: a line to edit, as a comment."""
    partition: str | None = None
    """Where to wait (SLURM)."""
    queue: str | None = None
    """Where to wait (PBS)."""
    name: str = "mpitrain"
    """The job's name in the queue; with --jobs, the run's, too."""
    jobs: int = 1
    """Jobs that the training may take, one after another, until it is finished."""
    spare_nodes: int = 0
    """Nodes beside --nodes, for those that fail (with --jobs)."""
    module: UseAppendAction[tuple[str, ...]] = ()
    """A module of the site's to load; once for each."""
    venv: Path = Path(".venv")
    """Virtual environment; relative to the folder that the job is submitted from."""
    output: Path | None = None
    """File to write, whole or not at all. Default: standard output."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--nodes", self.nodes, 1),
            ("--slots-per-node", self.slots_per_node, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-slot", self.cpus_per_slot, 1),
            ("--jobs", self.jobs, 1),
            ("--spare-nodes", self.spare_nodes, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag} must be at least {least}, found {value}")
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
            if not module:
                raise UsageError("--module '': expected the name of a module")
        _check_word(str(self.venv), f"--venv {str(self.venv)!r}")
        if ":" in str(self.venv):
            raise UsageError(
                f"--venv {str(self.venv)!r}: expected a path without a colon, which "
                "PATH cannot hold"
            )


def text_of(
    config: JobscriptConfig, words: Sequence[str], *, is_training: bool = True
) -> str:
    """Make the job script.

    Args:
        config: What it shall ask for.
        words: What follows `python -m mpitrain` in it; quoted for the shell there.
        is_training: Whether that is a training, which stops with a checkpoint at TERM
            and USR2.

    Returns:
        The script's text.

    Raises:
        UsageError: A word has characters that no line of a script can hold.
    """
    for word in words:
        _check_word(word, f"{word!r} after --")
    gpus = config.gpus_per_node
    if gpus is None:
        gpus = config.slots_per_node
    seconds = seconds_of(config.time, config.scheduler)
    blocks = {
        "title": _title(config),
        "name": config.name,
        "time": _hours_minutes_seconds(seconds),
        "nodes": str(config.nodes + config.spare_nodes),
        "slots": str(config.slots_per_node),
        "cpus": str(config.cpus_per_slot),
        "per_gpu": ": one for each GPU" if gpus == config.slots_per_node else "",
        "modules": _modules(config.module),
        "venv": _venv(config.venv),
        "from": "from any folder"
        if config.venv.expanduser().is_absolute()
        else f"from the folder that holds {config.venv}",
        "words": "".join(" " + shlex.quote(word) for word in words),
    }
    own = _slurm_blocks if config.scheduler == "slurm" else _pbs_blocks
    blocks |= _chain_blocks(config, seconds) | own(config, gpus)

    def part(name: str, **more: str) -> str:
        return fill((SCRIPTS / f"{name}.sh").read_text(), blocks | more)

    run, loop, end = (
        part(name).rstrip("\n") for name in ("run", "chain-loop", "once-end")
    )
    last = "once" if config.jobs == 1 else "chain"
    if last == "once":
        run += "\n\nexport MPITRAIN_STATUS_FILE\nMPITRAIN_STATUS_FILE=$(mktemp)"
    train = part(
        f"{config.scheduler}-{last}",
        run=run if is_training else "",
        launch="run " if is_training else "",
        end=end if is_training else "",
        loop=loop,
    )
    return part(config.scheduler, train=train)


def fill(script: str, blocks: Mapping[str, str]) -> str:
    r"""Put texts where their names stand; what is put in is not looked at again.

    Args:
        script: A text with ``{{name}}`` in it.
        blocks: The texts by name; an empty one takes the end of its line with it.

    Returns:
        The text.

    >>> fill("a={{a}};\n{{b}}\n{{c}}\n", {"a": "{{c}}", "b": "", "c": "#"})
    'a={{c}};\n#\n'
    """

    def block(found: re.Match[str]) -> str:
        text = blocks[found["name"]]
        return text + found["end"] if text else ""

    return re.sub(r"\{\{(?P<name>\w+)\}\}(?P<end>\n?)", block, script)


def seconds_of(time: str, scheduler: SchedulerName) -> int:
    """Read a time as the scheduler would; days are understood for both.

    Args:
        time: ``[days-]hours:minutes:seconds`` and the shorter forms of both.
        scheduler: Whose forms.

    Returns:
        Seconds, at least 1.

    Raises:
        UsageError: It is no time.

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


def _hours_minutes_seconds(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def _check_word(word: str, where: str) -> None:
    """Refuse line ends, tabs, and bytes that are no text."""
    if not word.isprintable():
        raise UsageError(
            f"{where}: expected printable characters on one line; a script of lines "
            "cannot hold others"
        )


def _title(config: JobscriptConfig) -> str:
    nodes, slots = config.nodes, config.slots_per_node
    on_nodes = "1 node" if nodes == 1 else f"{nodes} nodes"
    processes = "1 process" if slots == 1 else f"{slots} processes"
    chain = "" if config.jobs == 1 else ", in as many jobs as it takes"
    return (
        f"Train on {on_nodes}, {processes} on {'it' if nodes == 1 else 'each'}{chain}"
    )


def _venv(venv: Path) -> str:
    """Return what the shell shall make the path from."""
    path = venv.expanduser()
    return ("" if path.is_absolute() else "$PWD/") + shlex.quote(str(path))


def _modules(names: Sequence[str]) -> str:
    loads = [f"module load {shlex.quote(name)}" for name in names]
    return "\n".join(
        [
            "# Where Python comes from: the site's modules"
            + (" ..." if names else ", if you need them ..."),
            *(loads or ["# module load python/3.11", "# module load openmpi"]),
        ]
    )


def _account(directive: str, account: str | None) -> str:
    if account is not None:
        return f"# The project that pays.\n#{directive}{account}"
    return f"""\
# The project that pays. EDIT: take one # away and put your own. On a cluster
# without accounts leave the line as it is: with two # it is only a comment.
##{directive}my_project"""


def _chain_blocks(config: JobscriptConfig, seconds: int) -> dict[str, str]:
    """Return what is about a training of several jobs, each of so many seconds."""
    is_chain = config.jobs > 1
    early = min(EARLY_SECONDS, seconds // 5)
    slurm = f"""\
# What lets it come back to the queue (below), go on with the same log, and hear
# of its end in time.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@{early}"""
    pbs = """\
# Should a node fail, PBS may run it again.
#PBS -r y"""
    if config.spare_nodes:
        slurm += """
# A node that fails does not end the job: it goes on with the others.
#SBATCH --no-kill"""
        pbs += """
# A node that fails does not end the job: it goes on with the others.
#PBS -W tolerate_node_failures=all"""
    lines = slurm if config.scheduler == "slurm" else pbs
    another = {
        "slurm": "#     sbatch --job-name OTHER THIS_SCRIPT  another training: its run "
        "is named so",
        "pbs": "#     qsub -N OTHER THIS_SCRIPT                  another training: its "
        "run is named so",
    }[config.scheduler]
    mpirun = {
        "slurm": """\
    # This script runs once, on the first node. So does mpirun: it has srun start
    # the others, with this environment. No host and no port: the ranks find each
    # other over MPI. (MPICH: `hostfile --format mpich`, -f in place of --hostfile,
    # and no --prefix.)""",
        "pbs": """\
    # This script runs once, on the first node. So does mpirun. No port: the ranks
    # find each other over MPI. (MPICH: `hostfile --format mpich`, -f in place of
    # --hostfile, and none of the options above.)""",
    }[config.scheduler]
    return {
        "another": another if is_chain else "",
        "mpirun": mpirun,
        "chain_lines": lines if is_chain else "",
        "help": "see its --help." if is_chain else "its --help tells what can differ.",
        "jobs_flag": f" --jobs {config.jobs}" if is_chain else "",
        "jobs": str(config.jobs),
        "seconds": str(seconds),
        "early": str(early),
        "patience": str(max(early - 15, early * 3 // 4, 1)),
        "at_most": f" --nodes {config.nodes}" if config.spare_nodes else "",
        "nodefile": "" if is_chain else '    options+=(--hostfile "$PBS_NODEFILE")',
    }


def _slurm_blocks(config: JobscriptConfig, gpus: int) -> dict[str, str]:
    account, partition = config.account, config.partition
    return {
        "account": _account("SBATCH --account=", account),
        "partition": f"# Where to wait.\n#SBATCH --partition={partition}"
        if partition is not None
        else "",
        "mem": f"# Memory of each node.\n#SBATCH --mem={config.mem}"
        if config.mem is not None
        else "",
        "gpus": "# GPUs of each node. On a CPU partition DELETE this line.\n"
        f"#SBATCH --gres=gpu:{gpus}"
        if gpus
        else "",
    }


def _pbs_blocks(config: JobscriptConfig, gpus: int) -> dict[str, str]:
    def select(gpus: int) -> str:
        cores = config.slots_per_node * config.cpus_per_slot
        words = [
            f"PBS -l select={config.nodes + config.spare_nodes}",
            f"ncpus={cores}",
            f"mpiprocs={config.slots_per_node}",
            f"ompthreads={config.cpus_per_slot}",
            f"ngpus={gpus}" if gpus else "",
            f"mem={config.mem.lower()}b" if config.mem is not None else "",
        ]
        return ":".join(filter(None, words))

    without_gpus = f"""
# On a CPU queue, or where PBS says "Unknown resource: ngpus", DELETE the line
# above and take one # away here:
##{select(0)}"""
    return {
        "account": _account("PBS -A ", config.account),
        "queue": f"# Where to wait.\n#PBS -q {config.queue}"
        if config.queue is not None
        else "",
        "select": f"#{select(gpus)}" + (without_gpus if gpus else ""),
    }

"""`python -m mpitrain jobscript`: a job script for SLURM or PBS. Needs no MPI.

The jinja templates `templates/slurm.sh` and `templates/pbs.sh` extend `base.sh`. What a
site wants is in `sites/NAME.yaml`: flags of this command, each explained.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpitrain.errors import UsageError, did_you_mean, usage_errors_in
from mpitrain.flags import PROGRAM, read_flag_file, read_flags
from mpitrain.mpi.launchers import DEFAULT, LAUNCHERS, LauncherName
from mpitrain.plugins import load_reference, plugins_of
from mpitrain.settings import flag_name, setting
from mpitrain.tools.jobs.containers import Runtime, words_of

TEMPLATES = Path(__file__).with_name("templates")
SITES = Path(__file__).with_name("sites")

# How long before its end a job of a chain is asked to stop, if it is long enough.
MAX_NOTICE_SECONDS = 120

RESTARTS = 3  # of a job that is no chain; a check tells its first fault, and ends

SchedulerName = Literal["slurm", "pbs"]

# Values in lines that the scheduler reads, where nothing is quoted.
MEM = r"[1-9]\d*[KMGT]", "a number with K, M, G or T, such as 16G"
ACCOUNT = r"\w[\w.,:@/+=-]*", "letters, digits and . , : @ / + = -"
PARTITION = r"\w[\w.,-]*", "letters, digits and . , -"
QUEUE = r"\w[\w.@-]*", "letters, digits and . @ -"
NAME = r"[A-Za-z][\w.+-]*", "a letter, then letters, digits and . + -"
MAIL = r"[\w.+@-]+", "an address, such as me@example.org"
# A line for nothing else.
MEM_ALONE = re.compile(r"#\w+ +(-l *)?(--)?p?v?mem[\w-]*[= ]\{(all_)?mem\}\w*")
DIRECTIVES = {"slurm": "#SBATCH ", "pbs": "#PBS "}


@dataclass(frozen=True, kw_only=True)
class JobscriptConfig:
    """Print a job script. Flags of the training follow after --."""

    scheduler: SchedulerName = setting(is_positional=True)
    """The scheduler. Not needed beside --site."""
    site: str | None = None
    """A site's defaults, which your flags override: alliance, alps, aurora, derecho,
    frontier, gadi, jupiter, juwels, lumi, oscer, perlmutter, polaris, vista, or a YAML
    file of such flags."""
    show: bool = False
    """Print the file of --site, which explains its flags, instead of the script."""
    launcher: LauncherName = DEFAULT
    """What starts the ranks."""
    launcher_flag: tuple[str, ...] = setting((), is_repeatable=True)
    """Extra argument for the launcher; may be given several times."""
    nodes: int = setting(2, minimum=1)
    """Number of nodes."""
    slots_per_node: int = setting(4, minimum=1)
    """Processes (ranks) on each node."""
    gpus_per_node: int | None = setting(None, minimum=0)
    """GPUs of each node; 0: none. Default: as many as processes."""
    cpus_per_slot: int = setting(4, minimum=1)
    """Cores for each process."""
    mem: str | None = setting("16G", pattern=MEM)
    """Memory of each node, as 512M, 16G or 2T. None: the site's default."""
    time: str = "00:10:00"
    """Limit, [days-]hours:minutes:seconds; N alone: minutes (SLURM), seconds (PBS)."""
    account: str | None = setting(None, pattern=ACCOUNT)
    """Account to charge. Default: a line to edit, as a comment."""
    partition: str | None = setting(None, pattern=PARTITION)
    """Partition (SLURM)."""
    queue: str | None = setting(None, pattern=QUEUE)
    """Queue (PBS)."""
    name: str = setting("mpitrain", pattern=NAME)
    """Name of the job; with --jobs, of the run, too, without --run-dir."""
    jobs: int = setting(1, minimum=1)
    """Maximum number of jobs, one after another, until the training is finished."""
    restarts: int | None = setting(None, minimum=0)
    """Maximum number of restarts after a fault. Default: 3; of `check` 0; with --jobs,
    no limit."""
    warm: bool = False
    """Keep a fork server on each node: starts after the first take less time."""
    run_dir: Path | None = None
    """Run folder of a script (`-- run SCRIPT`), with --jobs."""
    spare_nodes: int = setting(0, minimum=0)
    """Nodes in addition to --nodes, to replace failing ones (with --jobs)."""
    stage: bool = False
    """Copy Python and torch to each node at the start (`stage`)."""
    mail: str | None = setting(None, pattern=MAIL)
    """Address to which the scheduler writes when the job ends or fails."""
    line: tuple[str, ...] = setting((), is_repeatable=True)
    """A further line for the scheduler, as '#PBS -l filesystems=home'; may be given
    several times."""
    resources: tuple[str, ...] = setting((), is_repeatable=True)
    """A line that asks for nodes, cores, GPUs or memory, with {nodes}, {slots}, {cpus},
    {gpus}, {mem}, {node_cpus}, {all_cpus}, {all_gpus} or {all_mem} in it; they replace
    the usual ones; may be given several times."""
    module: tuple[str, ...] = setting((), is_repeatable=True)
    """An environment module to load; may be given several times."""
    setup: tuple[str, ...] = setting((), is_repeatable=True)
    """A line of shell before the start, as 'export A=b' or '. my.sh'; may be given
    several times."""
    container: str | None = None
    """Image in which the ranks run. The launcher runs outside, and so does mpitrain of
    --venv, for the script itself."""
    container_runtime: Runtime | None = None
    """What runs the image. Default: apptainer, for a file .sif."""
    container_flag: tuple[str, ...] = setting((), is_repeatable=True)
    """Extra argument for it, such as --rocm instead of --nv; may be given several
    times."""
    venv: Path = Path(".venv")
    """Virtual environment; a relative path is from the folder of submission."""
    output: Path | None = None
    """File to write; never left half-written. Default: standard output."""

    def __post_init__(self) -> None:
        if self.spare_nodes and self.jobs == 1:
            raise UsageError(
                f"--spare-nodes {self.spare_nodes}: a script for one job uses no spare "
                "nodes; expected --jobs of at least 2 beside it"
            )
        if self.scheduler == "pbs" and self.partition is not None:
            raise UsageError(f"--partition {self.partition}: PBS says --queue")
        if self.scheduler == "slurm" and self.queue is not None:
            raise UsageError(f"--queue {self.queue}: SLURM says --partition")
        launcher = LAUNCHERS[self.launcher]
        if self.warm and (self.stage or self.container):
            raise UsageError(
                "--warm: expected no --container and --stage, where the ranks run "
                "another Python"
            )
        if self.warm or self.spare_nodes:
            spare = f"--spare-nodes {self.spare_nodes}"
            launcher.check_hosts("--warm" if self.warm else spare)
        if launcher.scheduler not in ("", self.scheduler):
            raise UsageError(
                f"--launcher {self.launcher}: {launcher.title} is of "
                f"{launcher.scheduler.upper()}, found {self.scheduler.upper()}"
            )
        if self.show and self.site is None:
            raise UsageError("--show: expected --site beside it")
        if self.container is None and self.container_runtime is not None:
            raise UsageError("--container-runtime: expected --container beside it")
        directive = DIRECTIVES[self.scheduler]
        for flag in ("line", "resources"):
            for line in getattr(self, flag):
                if not line.startswith(directive):
                    raise UsageError(f"--{flag} {line!r}: expected '{directive}...'")
        job_seconds(self.time, self.scheduler)
        for name, words in vars(self).items():
            for word in words if isinstance(words, tuple) else ():
                _check_word(word, f"{flag_name(name)} {word!r}")
        _check_word(str(self.venv), f"--venv {str(self.venv)!r}")
        _check_word(str(self.run_dir), f"--run-dir {str(self.run_dir)!r}")


def text_of(
    config: JobscriptConfig, words: Sequence[str], command: str = "train"
) -> str:
    """Return the job script, in which `words` follow `python -m mpitrain COMMAND`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    for word in words:
        _check_word(word, f"{word!r} after --")
    seconds = job_seconds(config.time, config.scheduler)
    slots, gpus = config.slots_per_node, config.gpus_per_node
    gpus = slots if gpus is None else gpus
    nodes, cpus = config.nodes + config.spare_nodes, config.cpus_per_slot
    memory = {}
    if mem := config.mem:
        total = re.sub(r"\d+", lambda it: str(nodes * int(it[0])), f"{mem}B")
        memory = {"mem": mem, "all_mem": total}
    amounts = {
        "nodes": nodes,
        "slots": slots,
        "cpus": cpus,
        "gpus": gpus,
        "ranks": config.nodes * slots,
        "node_cpus": slots * cpus,
        "all_cpus": nodes * slots * cpus,
        "all_gpus": nodes * gpus,
        **memory,
    }
    launcher = LAUNCHERS[config.launcher]
    typed = (_filled("--launcher-flag", it, amounts) for it in config.launcher_flag)
    given = list(map(shlex.quote, typed))
    is_bound = any(word.startswith("--cpu-bind") for word in given)
    more = "" if is_bound else launcher.binding
    program, *options = f"{launcher.command} {more}".format(**amounts).split()
    options += given
    restarts = restarts_of(config, command)
    venv = config.venv.expanduser()
    from_where = "from any folder"
    if command == "run" or any(it.startswith("--task") for it in words):
        from_where = "from the folder of your code"
    elif not venv.is_absolute():
        from_where = f"from the folder that holds {venv}"
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        # A misspelt name is an error, and no empty place in a script.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    templates.filters["quote"] = shlex.quote
    values = vars(config) | {
        "run_dir": config.run_dir and shlex.quote(str(config.run_dir)),
        "time": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
        "notice": notice_seconds(seconds),
        "all_nodes": nodes,
        "gpus": gpus,
        "restarts": restarts,
        "program": program,
        "container": config.container
        and words_of(
            config.container, config.container_runtime, config.container_flag, gpus
        ),
        "options": " ".join(options),
        "can_choose": bool(launcher.host_file),
        "resources": [
            _filled("--resources", it, amounts)
            for it in config.resources
            if memory or not MEM_ALONE.fullmatch(it)
        ],
        "from_where": from_where,
        "is_script": command == "run",
        "is_check": command == "check",
        "venv": ("" if venv.is_absolute() else "$PWD/") + shlex.quote(str(venv)),
        "command": " stage -- python -m mpitrain" * config.stage
        + ("" if command == "train" else f" {command}"),
        "words": "".join(" " + shlex.quote(word) for word in words),
    }
    text = templates.get_template(f"{config.scheduler}.sh").render(values)
    return re.sub("\n{3,}", "\n\n", text)  # around a block that is empty


def restarts_of(config: JobscriptConfig, command: str) -> int | None:
    """Return how often a job starts `command` again; ``None``: without a limit."""
    if config.restarts is None and config.jobs == 1:
        return 0 if command == "check" else RESTARTS
    return config.restarts


def _filled(flag: str, line: str, amounts: Mapping[str, object]) -> str:
    try:
        return line.format(**amounts)
    except (KeyError, IndexError, ValueError):
        known = ", ".join(amounts)
        known += " (with --mem: mem, all_mem)" * ("mem" not in amounts)
        raise UsageError(f"{flag} {line!r}: in braces expected {known}") from None


def with_site(flags: Sequence[str]) -> list[str]:
    """Return the flags, after those of the site that they name, if they name one.

    Its scheduler stands first. ``jobscript NAME`` means ``jobscript --site NAME``.
    """
    # `--site=NAME` is two words from here on.
    words = [it for word in flags for it in re.split("(?<=^--site)=", word)]
    if words and (SITES / f"{words[0]}.yaml").is_file():
        words.insert(0, "--site")
    if "--site" not in words[:-1]:
        return list(flags)
    name = words[words.index("--site") + 1]
    values = read_site(name)
    scheduler = str(values.pop("scheduler", ""))
    if words[0] in DIRECTIVES:
        if scheduler not in ("", words[0]):
            raise UsageError(f"--site {name} is of {scheduler}, found {words[0]}")
        scheduler = words.pop(0)
    if scheduler not in DIRECTIVES:
        raise UsageError(
            f"--site {name} names no scheduler; expected `scheduler: slurm` or pbs in "
            "it, or `jobscript slurm --site ...`"
        )
    typed = {word.partition("=")[0] for word in words}
    if "--launcher" in typed:
        values.pop("launcher_flag", None)  # they are of the site's launcher
    if "--resources" in typed:
        values.pop("resources", None)
    found: list[str] = []
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            found.append(f"{flag}={each}")
    with usage_errors_in(f"--site {name}"):  # else nothing tells whose flag is wrong
        program = f"{PROGRAM} jobscript"
        read_flags(JobscriptConfig, [scheduler, *found], program=program, files=False)
    return [scheduler, *found, *words]


def site_file(name: str) -> Path:
    """Return the file of a site: ours, the user's, or that of an installed package."""
    ours = SITES / f"{name}.yaml"
    if ours.is_file() and "/" not in name:
        return ours
    if Path(name).is_file():
        return Path(name)
    named = plugins_of("sites")
    if name in named:
        return Path(load_reference(name, "--site", "sites")())
    known = [*sorted(path.stem for path in SITES.glob("*.yaml")), *named]
    raise UsageError(
        f"--site {name!r}: there is no such file, and no site of that name; expected "
        f"one of {', '.join(known)}.{did_you_mean(name.lower(), known)}"
    )


def read_site(name: str) -> dict[str, Any]:
    """Read the flags of a site; lists are of flags that may be given several times."""
    path = site_file(name)
    with usage_errors_in(f"--site {path}"):
        return read_flag_file(path, "launcher: srun", as_words=True)


def notice_seconds(seconds: float) -> int:
    """Return how long before its end a job of so many seconds is asked to stop."""
    return int(min(MAX_NOTICE_SECONDS, seconds // 5))


def job_seconds(time: str, scheduler: SchedulerName) -> int:
    """Parse a time as the scheduler does, in seconds; both may have days.

    >>> job_seconds("30", "slurm"), job_seconds("30", "pbs"), job_seconds("1-12", "pbs")
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
    if not word.isprintable():
        raise UsageError(
            f"{where}: expected printable characters on one line; a script of lines "
            "cannot hold others"
        )

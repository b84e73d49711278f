"""Launchers that cannot be had here, as strict as their documentation.

    python fake_launchers.py NAME STATE UNDER WORDS...

Takes the words of PALS' mpiexec, srun, ibrun, jsrun or flux run: documented options
only, an error for others. Starts the ranks by the MPI underneath, `UNDER`: MPICH's
mpiexec, or Open MPI's mpirun where the launcher speaks PMIx. Each rank gets the
variables that the launcher documents, and none of those of the MPI underneath but what
its PMI needs. Signals and exit statuses are the launcher's. `STATE` is a folder for
this start. Sources: see mpitrain/mpi/launchers.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn


class Rules(NamedTuple):
    """What a launcher takes, and does."""

    program: str
    without: str  # options without a value
    with_value: str
    single_dash: bool = False  # long options with one dash, too
    forwards: tuple[int, ...] = ()  # signals that reach the ranks
    kills: tuple[int, ...] = ()  # signals that end the ranks by KILL


HUP, USR1, USR2, TERM = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

RULES = {
    "pals": Rules(
        program="mpiexec",
        without="envall envnone transfer no-transfer label l no-label exclusive "
        "shared line-buffer no-line-buffer abort-on-failure no-abort-on-failure no-vni "
        "genvall verbose",
        with_value="np n ppn soft host hosts hostlist hostfile arch wdir path file "
        "configfile f umask env envlist cpu-bind mem-bind gpu-bind depth d pmi "
        "include-tasks exclude-tasks rlimits procinfo-file",
        single_dash=True,
        forwards=(HUP, USR1, USR2, TERM),
    ),
    "srun": Rules(
        program="srun",
        without="contiguous X disable-status exact l label O overcommit overlap s u "
        "unbuffered v verbose Q quiet K kill-on-bad-exit k no-kill",
        with_value="A account c cpus-per-task cpu-bind cpus-per-gpu C constraint "
        "D chdir d distribution e error x exclude export G gpus gpus-per-node "
        "gpus-per-task gpu-bind gres hint i input J job-name mem mem-bind mem-per-cpu "
        "mem-per-gpu m mpi network w nodelist N nodes n ntasks ntasks-per-node o "
        "output p partition t time threads-per-core W wait",
        forwards=(USR1, USR2),
        kills=(TERM, HUP),
    ),
    "ibrun": Rules(program="ibrun", without="", with_value="np n o", single_dash=True),
    "jsrun": Rules(
        program="jsrun",
        without="i immediate V version",
        with_value="n nrs a tasks_per_rs p np c cpu_per_rs g gpu_per_rs r rs_per_host "
        "K rs_per_socket l latency_priority d launch_distribution b bind "
        "m memory_per_rs E env F env_eval D env_no_propagate e stdio_mode "
        "t stdio_input o stdio_stdout k stdio_stderr I stdin_rank h chdir M smpiargs "
        "X exit_on_error x exclude_hosts",
    ),
    "intel": Rules(
        program="mpirun",
        without="genvall genvnone envall envnone rr l prepend-rank v verbose V version "
        "info print-rank-map print-all-exitcodes silent-abort nolocal ordered-output",
        with_value="n np ppn perhost grr host hosts f hostfile machine machinefile "
        "bootstrap bootstrap-exec configfile envlist genvlist iface wdir rmk s usize "
        "tune",
        single_dash=True,
        forwards=(USR1, TERM),
    ),
    "flux": Rules(
        program="flux run",
        without="x exclusive u unbuffered l label-io dry-run quiet v verbose",
        with_value="n ntasks N nodes c cores-per-task g gpus-per-task cores "
        "tasks-per-node tasks-per-core gpus-per-node q queue B bank t time-limit "
        "urgency job-name o setopt S setattr requires env env-remove rlimit input "
        "output error cwd signal taskmap",
        forwards=(TERM, HUP, USR1, USR2),
    ),
}


def fail(rules: Rules, text: str, status: int = 1) -> NoReturn:
    print(f"{rules.program}: {text}", file=sys.stderr)
    sys.exit(status)


def parse(rules: Rules, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options, by name without dashes, and the program with its words."""
    without, with_value = rules.without.split(), rules.with_value.split()
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        is_long = word.startswith("--")
        is_named = is_long or rules.single_dash or len(name) == 1
        if not is_long and not rules.single_dash and len(name) > 1 and not equals:
            name, value, equals = name[0], name[1:], "="  # -n6
            is_named = name in with_value
        if is_long and len(name) == 1 and not rules.single_dash:
            is_named = False
        if rules.program == "mpirun" and name in ("genv", "env"):
            del rest[:2]  # a name and a value
        elif is_named and name in with_value:
            if not equals and not rest:
                fail(rules, f"option '{word}' requires an argument")
            options[name] = value if equals else rest.pop(0)
        elif is_named and name in without:
            options[name] = value
        else:
            fail(rules, f"unrecognized option '{word}'")
    if not rest:
        fail(rules, "no program")
    return options, rest


def hosts_of_job() -> list[str]:
    """Return the job's hosts as its scheduler tells them."""
    if file := os.environ.get("PBS_NODEFILE"):
        return list(dict.fromkeys(Path(file).read_text().split()))
    return os.environ["FAKE_HOSTS"].split(",")


def layout(name: str, rules: Rules, options: dict[str, str]) -> tuple[int, int]:
    """Return how many ranks start, and how many of them on each host."""

    def number(*names: str, default: int) -> int:
        given = next((options[it] for it in names if it in options), str(default))
        if not re.fullmatch(r"[1-9]\d*", given):
            fail(rules, f"invalid number {given!r}")
        return int(given)

    hosts = len(hosts_of_job())
    of_slurm = int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    if name == "intel":
        slots = number("ppn", "perhost", default=of_slurm)
        ranks = number("n", "np", default=hosts * slots)
    elif name == "pals":
        if re.search(r":\d+(,|$)", options.get("hosts", options.get("host", ""))):
            fail(rules, "hosts have no slots")
        ranks = number("n", "np", default=1)
        slots = number("ppn", default=-(-ranks // hosts))
    elif name == "srun":
        slots = number("ntasks-per-node", default=of_slurm)
        ranks = number("n", "ntasks", default=hosts * slots)
    elif name == "ibrun":
        if "n" in options and "o" not in options:
            fail(rules, "-n and -o must be used together")
        slots, ranks = of_slurm, number("np", "n", default=hosts * of_slurm)
    elif name == "jsrun":
        per_set = number("a", "tasks_per_rs", default=1)
        ranks = number("n", "nrs", default=1) * per_set
        slots = number("r", "rs_per_host", default=1) * per_set
    else:
        if "tasks-per-node" in options and {"n", "ntasks", "c", "g"} & options.keys():
            fail(rules, "Per-resource options can't be used with per-task options.")
        ranks = number("n", "ntasks", default=1)
        nodes = number("N", "nodes", default=hosts)
        if nodes > ranks:
            fail(rules, "It is an error to request more nodes than there are tasks")
        slots = -(-ranks // nodes)
    if slots * hosts < ranks:
        fail(rules, f"{ranks} ranks, {slots} on a node: {hosts} nodes are too few")
    return ranks, slots


def launch(name: str, state: Path, under: str, words: list[str]) -> int:
    """Start the ranks, forward signals to them, and return the launcher's status."""
    rules = RULES[name]
    if name == "flux":
        if words[:1] != ["run"]:
            print("flux: expected run", file=sys.stderr)
            return 1
        words = words[1:]
    options, program = parse(rules, words)
    ranks, slots = layout(name, rules, options)
    hosts = hosts_of_job()[: -(-ranks // slots)]
    state.mkdir(parents=True)
    wrapper = [sys.executable, "-I", "-S", __file__, "--rank", name, str(state)]
    is_open_mpi = Path(under).name == "mpirun"
    places = ",".join(f"{host}:{slots}" for host in hosts)
    start = (
        [under, "--allow-run-as-root", "--bind-to", "none", "--host", places]
        if is_open_mpi
        else [under, "-launcher", "ssh", "-hosts", places]
    )
    forwarded = ["-x", "PATH"] if is_open_mpi else []
    child = subprocess.Popen(
        [*start, "-n", str(ranks), *forwarded, *wrapper, *program],
        start_new_session=True,
    )

    def forward(number: int, frame: object) -> None:
        del frame
        for file in state.glob("pid-*"):
            os.kill(int(file.read_text()), 9 if number in rules.kills else number)

    for number in (*rules.forwards, *rules.kills):
        signal.signal(number, forward)
    child.wait()
    found = [int(file.read_text()) for file in state.glob("status-*")]
    statuses = [status if status >= 0 else 128 - status for status in found]
    if name == "pals" and "no-abort-on-failure" not in options and any(statuses):
        return 143  # the others got TERM, and theirs is the highest
    if name == "jsrun":
        return 1 if any(statuses) else 0  # no rule is documented
    return max(statuses, default=1)


def rank(name: str, state: Path, program: list[str]) -> int:
    """Run a rank's program with the variables of the launcher, and note its end."""
    old = os.environ
    is_pmix = "PMIX_RANK" in old
    number = old["PMIX_RANK"] if is_pmix else old["PMI_RANK"]
    size = old["OMPI_COMM_WORLD_SIZE"] if is_pmix else old["PMI_SIZE"]
    local = old["OMPI_COMM_WORLD_LOCAL_RANK" if is_pmix else "MPI_LOCALRANKID"]
    here = old["OMPI_COMM_WORLD_LOCAL_SIZE" if is_pmix else "MPI_LOCALNRANKS"]
    hidden = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE", "MPI_LOCAL")
    environ = {k: v for k, v in old.items() if not k.startswith(hidden)}
    given = {
        "pals": {
            "PALS_RANKID": number,
            "PALS_LOCAL_RANKID": local,
            "PALS_LOCAL_SIZE": here,
            "PALS_APID": "1",
            "PALS_DEPTH": "1",
            **({} if is_pmix else {"PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": here}),
        },
        "srun": {
            "SLURM_PROCID": number,
            "SLURM_LOCALID": local,
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": size,
            "SLURM_STEP_NUM_TASKS": size,
        },
        "ibrun": {"MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": here},
        "intel": {"MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": here},
        "jsrun": {
            "JSM_NAMESPACE_RANK": number,
            "JSM_NAMESPACE_SIZE": size,
            "JSM_NAMESPACE_LOCAL_RANK": local,
            "JSM_NAMESPACE_LOCAL_SIZE": here,
        },
        "flux": {
            "FLUX_TASK_RANK": number,
            "FLUX_JOB_SIZE": size,
            "FLUX_TASK_LOCAL_ID": local,
        },
    }[name]
    child = subprocess.Popen(program, env=environ | given, close_fds=False)
    for number_ in (TERM, USR1, USR2, HUP):
        signal.signal(number_, lambda it, _: child.send_signal(it))
    (state / f"pid-{number}").write_text(str(child.pid))
    status = child.wait()
    (state / f"status-{number}").write_text(str(status))
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        sys.exit(rank(sys.argv[2], Path(sys.argv[3]), sys.argv[4:]))
    sys.exit(launch(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))

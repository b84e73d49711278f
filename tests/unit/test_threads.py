"""Cores and threads: who is bound to what, who asked for it, what is fair."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.launch import cores, threads
from mpitrain.launch.launcher import (
    Launcher,
    asked_per_node,
    binding_asked,
    find_launcher,
)


@pytest.mark.parametrize(
    ("masks", "quota", "expected"),
    [
        ([range(8)], float("inf"), (8,)),
        ([range(8)] * 2, float("inf"), (4, 4)),
        ([range(2)] * 8, float("inf"), (1,) * 8),
        ([range(4), range(4, 8)], float("inf"), (4, 4)),  # mpirun bound them apart
        ([{0}, {1}], float("inf"), (1, 1)),  # bound to a core each
        ([range(3)] * 3, float("inf"), (1, 1, 1)),  # thirds sum to just below one
        ([range(64)] * 4, 8.0, (2, 2, 2, 2)),  # a container with 8 cores' worth
        ([range(64)], 0.5, (1,)),
    ],
)
def test_threads_share_the_cores(masks: list, quota: float, expected: tuple) -> None:
    assert threads.share(masks, quota) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", float("inf")),
        ("150000 100000", 1.5),
        ("rubbish", float("inf")),
        (None, float("inf")),
    ],
)
def test_the_quota_of_a_container_is_read(
    text: str | None, expected: float, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert threads.cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", float("inf")), ("50000", 0.5)])
def test_the_quota_of_a_version_1_cgroup_is_read(
    quota: str, expected: float, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads.cpu_quota(tmp_path) == expected


PBS = {
    "PBS_JOBID": "7.head",
    "PBS_NODEFILE": "/var/spool/pbs/aux/7.head",
    "NCPUS": "8",
    "OMP_NUM_THREADS": "8",
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "2"}, None),  # the user's own
        ({"NCPUS": ""}, None),
        ({"NCPUS": "0", "OMP_NUM_THREADS": "0"}, None),
        ({"PBS_JOBID": None}, None),  # SLURM's, or nobody's
    ],
)
def test_threads_that_pbs_set_are_known(change: dict, expected: int | None) -> None:
    environ = {k: v for k, v in (PBS | change).items() if v is not None}
    assert threads.threads_of_pbs(environ) == expected


PER_PROCESS = """\
Job Id: 7.head
    Resource_List.select = 1:ncpus=16:mpiprocs=4:omp
\tthreads=4
"""
OF_CHUNK = """\
Job Id: 7.head
    schedselect = 1:ncpus=8:mpiprocs=4
    Submit_arguments = -l select=1:ncpus=8:mpiprocs=4 -v ARGS=ompthreads=4 job.sh
"""


@pytest.mark.parametrize(
    ("of_pbs", "num_ranks", "says", "expected", "asked"),
    [
        (4, 4, PER_PROCESS, 4, True),  # ncpus=16:mpiprocs=4:ompthreads=4, the default
        (8, 4, OF_CHUNK, 2, True),  # ncpus=8:mpiprocs=4
        (8, 4, "", 8, True),  # PBS does not answer: said, and obeyed
        (2, 4, "", 2, False),  # no chunk of 4 processes has 2 cores
        (8, 1, "", 8, False),  # one process: both are the same
    ],
)
def test_threads_by_pbs_are_of_a_process_where_the_job_asks_for_ompthreads(
    of_pbs: int,
    num_ranks: int,
    says: str,
    expected: int,
    asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "says").write_text(says)
    (tmp_path / "qstat").write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked\nexec cat {tmp_path}/says\n"
    )
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert threads.cores_by_pbs(of_pbs, num_ranks, "7.head") == expected
    assert (tmp_path / "asked").exists() == asked
    assert ("does not tell" in caplog.text) == (asked and not says)


def bound(*masks: set[int], given: int = 8, one_core: bool = True) -> list:
    return [
        cores.Binding(
            cores=frozenset(mask),
            given=frozenset(range(given)) | mask,
            one_core=one_core,
            asked=None,
        )
        for mask in masks
    ]


@pytest.mark.parametrize(
    ("ranks", "asked", "num_wider", "idle"),
    [
        (bound({0}, {1}), False, 8, 0),  # mpirun -np 2
        (bound({0}, {1}), True, 0, 6),  # mpirun -np 2 --bind-to core
        (bound({0}, {1}), None, 0, 6),  # mpirun is out of sight: left alone, and said
        (bound({0}, {1}, given=2), False, 0, 0),  # these are all the cores there are
        (bound({0}, {0}, given=1), False, 0, 0),  # taskset -c 0 mpirun
        (bound({0, 1}, {2, 3}, given=0), False, 0, 0),  # nothing known of the job's
        (bound(set(range(4)), one_core=False), False, 0, 0),  # a package stays
        (bound({0, 4}, {1, 5}), False, 8, 0),  # a core with two hardware threads
    ],
)
def test_only_a_core_that_nobody_asked_for_is_left(
    ranks: list, asked: bool | None, num_wider: int, idle: int
) -> None:
    found = cores.widen(ranks, asked=asked)
    assert (len(found.cores), found.idle) == (num_wider, idle)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([False, None], False),  # rank zero sees mpirun, the other node a daemon
        ([False, True], True),
        ([None, None], None),
    ],
)
def test_one_rank_that_sees_mpirun_knows_for_all(
    by_rank: list, expected: bool | None
) -> None:
    bindings = [
        cores.Binding(cores=frozenset({0}), given=frozenset(), one_core=True, asked=a)
        for a in by_rank
    ]
    assert cores.whether_asked(bindings) is expected


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (("-np", "2"), {}, False),
        (("-np", "2", "--bind-to", "none"), {}, True),
        (("--bind-to=core",), {}, True),
        (("--map-by", "ppr:4:node:PE=8"), {}, True),
        (("--map-by", "ppr:4:node"), {}, False),
        (("--map-by", "slot:pe-list=0,2"), {}, True),
        (("--cpu-set", "0-3"), {}, True),
        (("--prtemca", "hwloc_default_binding_policy", "core"), {}, True),
        (None, {}, None),  # only a daemon is seen
        (None, {"OMPI_MCA_hwloc_base_binding_policy": "core"}, True),
        ((), {"OMPI_MCA_rmaps_base_mapping_policy": "slot:PE=2"}, True),
        ((), {"OMPI_MCA_rmaps_base_mapping_policy": "slot"}, False),
    ],
)
def test_who_asked_for_a_binding_is_known(
    words: tuple | None, environ: dict, expected: bool | None
) -> None:
    launcher = Launcher(name="prterun", words=words)
    assert binding_asked(launcher, environ) is expected
    if words is not None and environ:
        launcher = Launcher(name="prterun", words=words, variables=environ)
        assert binding_asked(launcher, {}) is expected


@pytest.mark.parametrize("name", ["", "hydra_pmi_proxy"])
def test_without_an_mpirun_that_binds_by_default_it_was_asked(name: str) -> None:
    assert binding_asked(Launcher(name=name, words=()), {}) is True


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        (Launcher(words=("-np", "8")), {}, None),
        (Launcher(words=("--map-by", "ppr:4:node")), {}, 4),
        (Launcher(words=("--map-by", "PPR:2:NODE:PE=3")), {}, 2),
        (Launcher(words=("--map-by", "ppr:4:package")), {}, None),
        (Launcher(words=("-ppn", "3")), {}, 3),
        (Launcher(), {"OMPI_MCA_rmaps_ppr_n_pernode": "5"}, 5),
        (Launcher(), {"OMPI_MCA_rmaps_base_mapping_policy": "ppr:6:node"}, 6),
        (Launcher(), {"SLURM_NTASKS_PER_NODE": "4"}, 4),
        # In a container mpirun may be out of sight.
        (Launcher(), {"SLURM_NTASKS_PER_NODE": "4", "OMPI_COMM_WORLD_SIZE": "3"}, None),
        # One process in an allocation of four a node: nobody asked mpirun for four.
        (Launcher(name="prterun"), {"SLURM_NTASKS_PER_NODE": "4"}, None),
    ],
)
def test_how_many_a_node_were_asked_for_is_known(
    launcher: Launcher, environ: dict, expected: int | None
) -> None:
    assert asked_per_node(launcher, environ) == expected


def process(
    proc: Path, pid: int, parent: int, name: str, words: str, of_cores: str
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "status").write_text(
        f"Name:\t{name}\nPPid:\t{parent}\nCpus_allowed_list:\t{of_cores}\n"
    )
    (folder / "comm").write_text(name + "\n")
    (folder / "cmdline").write_text("\0".join(words.split()) + "\0")
    (folder / "environ").write_text("HOME=/h\0A=b=c\0")


def test_mpirun_is_found_behind_the_shell_and_the_daemon(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "init", "init", "0-63")
    process(tmp_path, 5, 1, "mpirun", "mpirun -ppn 2 bash -x", "0-7")
    process(tmp_path, 6, 5, "hydra_pmi_proxy", "hydra_pmi_proxy", "0-3,8")
    process(tmp_path, 7, 6, "bash", "bash -c run", "2")
    process(tmp_path, 8, 7, "python", "python run.py", "2")
    found = find_launcher(8, {"OMPI_COMMAND": "bash"}, tmp_path)
    assert found.name == "hydra_pmi_proxy"
    assert found.cores == {0, 1, 2, 3, 8}  # the daemon's: of this host
    assert found.words == ("-ppn", "2")  # without the user's own flags
    assert found.variables["A"] == "b=c"


def test_a_daemon_alone_tells_the_cores_and_not_the_words(tmp_path: Path) -> None:
    process(tmp_path, 1, 0, "sshd", "sshd", "0-63")
    process(tmp_path, 6, 1, "prted", "prted --prtemca ess env", "0-15")
    process(tmp_path, 8, 6, "python", "python run.py", "2")
    found = find_launcher(8, {}, tmp_path)
    assert (found.name, found.words) == ("prted", None)
    assert len(found.cores) == 16


def test_without_mpirun_nothing_is_found() -> None:
    assert find_launcher(1, {}) == Launcher()
    assert find_launcher(os.getpid(), {}, Path("/nowhere")) == Launcher()


@pytest.mark.parametrize(
    ("siblings", "mask", "expected"),
    [("0,4", {0, 4}, True), ("0,4", {0}, True), ("0,4", {0, 1}, False)],
)
def test_a_core_is_known_with_its_hardware_threads(
    siblings: str, mask: set, expected: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "cpu0" / "topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores.is_one_core(mask, tmp_path) is expected


@pytest.mark.parametrize(("mask", "expected"), [({3}, True), ({3, 4}, False)])
def test_without_the_kernels_word_a_core_is_one_number(
    mask: set, expected: bool, tmp_path: Path
) -> None:
    assert cores.is_one_core(mask, tmp_path) is expected


def test_cores_that_do_not_exist_are_refused_without_harm() -> None:
    before = os.sched_getaffinity(0)
    assert not cores.run_on({100_000})
    assert os.sched_getaffinity(0) == before

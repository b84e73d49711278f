"""Cores and threads: who is bound to what, and what is fair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from single_process import LONE

from mpitrain.launch import cpu


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
    assert cpu.fair_shares(masks, quota) == expected


def quota_of(root: Path, own: str, files: dict[str, str]) -> float:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    return cpu.cpu_quota(root, root / "own")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "rubbish"}, float("inf")),
        ({}, float("inf")),
        # A job's, a step's or a service's: the least holds.
        ({"a/b/cpu.max": "300000 100000\n"}, 3),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ({"a/b/cpu.max": "100000 100000", "a/cpu.max": "200000 100000"}, 1),
        ({"a/cpu.max": "200000 100000", "a/other/cpu.max": "100000 100000"}, 2),
    ],
)
def test_the_quota_of_a_cgroup_and_of_those_above_it_is_read(
    files: dict, expected: float, tmp_path: Path
) -> None:
    assert quota_of(tmp_path, "0::/a/b\n", files) == expected


@pytest.mark.parametrize("folder", ["", "a/", "a/b/"])
@pytest.mark.parametrize(("quota", "expected"), [("-1", float("inf")), ("50000", 0.5)])
def test_the_quota_of_a_version_1_cgroup_is_read(
    quota: str, expected: float, folder: str, tmp_path: Path
) -> None:
    at = f"cpu/{folder}cpu.cfs"
    files = {f"{at}_quota_us": f"{quota}\n", f"{at}_period_us": "100000\n"}
    own = "4:memory:/else\n3:cpu,cpuacct:/a/b\n0::/\n"
    assert quota_of(tmp_path, own, files) == expected


@pytest.mark.parametrize(
    ("given", "expected"), [(None, 3), ("", 3), (" ", 3), ("2", 2), ("4,2", 4)]
)
def test_omp_num_threads_counts_unless_it_is_empty(
    given: str | None, expected: int
) -> None:
    variables = {} if given is None else {"OMP_NUM_THREADS": given}
    assert cpu.threads_of(3, variables) == expected
    assert variables["OMP_NUM_THREADS"].startswith(str(expected))  # libgomp reads it


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
    assert cpu.threads_of_pbs(environ) == expected


@pytest.mark.parametrize(
    ("masks", "given", "idle"),
    [
        ([{0}, {1}], 8, 6),  # mpirun -np 2, bound to a core each
        ([{0}, {1}], 2, 0),  # these are all the cores there are
        ([{0}, {0}], 1, 0),  # taskset -c 0 mpirun
        ([{0}], 0, 0),  # nothing known of the launcher's
        ([set(range(4))], 8, 0),  # a package is left alone
    ],
)
def test_cores_that_stay_idle_beside_bound_ranks_are_counted(
    masks: list, given: int, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "hardware_threads_per_core", lambda: 1)
    assert cpu.idle_cores([*map(frozenset, masks)], frozenset(range(given))) == idle


@pytest.mark.parametrize(
    ("launcher", "of_launcher", "num_ranks", "of_ranks", "words"),
    [
        ("srun", 16, 2, 2, "1 of 16 cores reach this rank's workers; srun binds it: "),
        ("srun", 16, 2, 2, "try --cpus-per-task=8"),
        ("openmpi", 16, 2, 2, "mpirun binds it: try --bind-to none"),
        ("openmpi", 2, 2, 2, "the job has no more: ask the scheduler for them"),
        ("", 0, 2, 2, "the job has no more: ask the scheduler for them"),
        ("srun", 16, 4, 16, "4 of 16 cores reach this rank's workers, which 4 ranks"),
        ("", 0, 1, 16, "16 of 16 cores reach this rank's workers"),
    ],
)
def test_why_cores_do_not_reach_the_workers_is_said(
    launcher: str,
    of_launcher: int,
    num_ranks: int,
    of_ranks: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(cpu, "cpu_quota", lambda: float("inf"))
    monkeypatch.setattr(cpu, "launcher_name", lambda _: launcher)
    monkeypatch.setattr(cpu, "launcher_cores", lambda _: range(of_launcher))
    node = replace(LONE.nodes[0], num_cores=of_ranks)
    world = replace(
        LONE, local_world_size=num_ranks, nodes=(node,), num_cores=of_ranks // num_ranks
    )
    assert words in cpu.cores_for_workers(world)

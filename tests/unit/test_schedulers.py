"""Allocations as SLURM and PBS tell them, and host files in every file_format."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import get_args

import pytest

from mpitrain.errors import LaunchError, UsageError
from mpitrain.mpi.launchers import HostFileFormat
from mpitrain.schedulers import pbs, read_allocation, seconds_left, slurm
from mpitrain.schedulers.allocation import AllocatedNode
from mpitrain.schedulers.slurm import expand_nodes, expand_tasks
from mpitrain.tools.jobs.hostfile import parse, render

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that knows one node list."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        "if [ \"$3\" = 'gpu[1-3]' ]; then printf 'gpu1\\ngpu2\\ngpu3\\n'; exit; fi\n"
        'echo "Invalid hostlist: $3" >&2; exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def test_a_warning_beside_a_node_list_is_none_of_its_nodes(scontrol: Path) -> None:
    """SLURM warns of a slurm.conf that is older than another, on stderr."""
    warning = "#!/bin/sh\necho 'scontrol: error: DNS SRV lookup failed' >&2\n"
    scontrol.write_text(scontrol.read_text().replace("#!/bin/sh\n", warning))
    assert expand_nodes("gpu[1-3]") == ["gpu1", "gpu2", "gpu3"]
    with pytest.raises(LaunchError, match=r"DNS SRV .*Invalid hostlist: n"):
        expand_nodes("n[1")


def test_a_node_list_that_is_none_is_refused_by_name(scontrol: Path) -> None:
    assert expand_nodes("gpu[1-3]") == ["gpu1", "gpu2", "gpu3"]
    with pytest.raises(LaunchError, match=r"NODELIST='n\[1'.*Invalid hostlist: n"):
        expand_nodes("n[1")
    scontrol.unlink()
    with pytest.raises(LaunchError, match="printed ''; expected the names of hosts"):
        expand_nodes("gpu[1-3]")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("1,2(x1),3", [1, 2, 3])],
)
def test_task_counts_of_slurm_are_written_out(text: str, counts: list[int]) -> None:
    assert expand_tasks(text) == counts


@pytest.mark.parametrize("text", ["", "4(2)", "x", "4,", "0", "4(x0)"])
def test_task_counts_that_are_none_are_refused_by_name(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE"):
        expand_tasks(text)


SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "gpu[1-3]",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
}


@pytest.mark.usefixtures("scontrol")
@pytest.mark.parametrize(
    ("more", "gpus"),
    [
        ({}, [None, None, None]),
        ({"SLURM_GPUS_ON_NODE": "2"}, [2, 2, 2]),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS": "6"}, [None, None, None]),
        (
            {
                "SLURM_GPUS_ON_NODE": "2",
                "SLURM_GPUS": "6",
                "SLURM_GPUS_PER_NODE": "a100:2",
            },
            [2, 2, 2],
        ),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "2"}, [8, 8, 6]),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "a:1,b:1"}, [8, 8, 6]),
        ({"SLURM_GPUS_ON_NODE": "0"}, [None, None, None]),
    ],
)
def test_slurm_tells_gpus_where_every_node_is_sure_to_have_them(
    more: Mapping[str, str], gpus: list[int | None]
) -> None:
    nodes = read_allocation({**SLURM, **more})
    assert [node.gpus for node in nodes] == gpus


@pytest.mark.usefixtures("scontrol")
def test_slurm_tells_the_job_its_nodes_and_tasks() -> None:
    assert [(n.hostname, n.slots) for n in read_allocation(SLURM)] == [
        ("gpu1", 4),
        ("gpu2", 4),
        ("gpu3", 3),
    ]


@pytest.mark.usefixtures("scontrol")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_TASKS_PER_NODE": ""}, "SLURM_TASKS_PER_NODE is not set"),
        ({"SLURM_TASKS_PER_NODE": "1"}, "SLURM_TASKS_PER_NODE='1' counts 1 node.* 3"),
        ({"SLURM_GPUS_ON_NODE": "all"}, "SLURM_GPUS_ON_NODE='all'"),
    ],
)
def test_what_slurm_tells_amiss_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_allocation(SLURM | change)


@pytest.mark.parametrize(
    ("job_id", "seconds", "is_running"), [("17", 598.0, True), ("18", None, False)]
)
def test_a_job_of_an_array_is_told_from_the_others(
    job_id: str,
    seconds: float | None,
    is_running: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`squeue -j` lists all jobs of an array by the id of one."""
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\n"
        'case "$5" in\n'
        "*%L) printf '117 1:00:00\\n17 9:58\\n18 INVALID\\n';;\n"
        "*%T) printf '117 PENDING\\n17 RUNNING\\n18 COMPLETING\\n';;\n"
        "esac\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert seconds_left({"SLURM_JOB_ID": job_id}) == seconds
    assert slurm.is_running(job_id) == is_running


@pytest.mark.parametrize(
    ("stime", "used", "now", "left"),
    [
        ("Sun Oct 25 02:30:00 2026", "", "00:31", 7140),  # summer time
        ("Sun Oct 25 02:30:00 2026", "", "01:31", 7140),
        ("Sun Oct 25 02:30:00 2026", "", "01:02", 5280),  # no start is still to come
        ("Sun Oct 25 05:30:00 2026", "00:01:00", "01:02", 7140),  # clocks differ
        ("Sun Oct 25 02:30:00 2026", "01:58:30", "02:30", 0),
        ("Sun Oct 25 02:30:00 2026", "00:58:30", "02:30", 3600),
        ("Sun Oct 25 01:30:00 2026", "00:10:00", "00:30", 3600),
    ],
)
def test_a_job_of_pbs_that_starts_as_summer_time_ends_knows_how_long_it_has(
    stime: str, used: str, now: str, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qstat` writes times of an hour that comes twice; `now` is in UTC."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    text = f"    Resource_List.walltime = 02:00:00\n    stime = {stime}\n"
    text += f"    resources_used.walltime = {used}\n" * bool(used)
    at = datetime.fromisoformat(f"2026-10-25 {now}+00:00").timestamp()
    try:
        assert pbs.parse_time_left(text, at) == left
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1\nn1\nn2\nn2\n", [("n1", 2), ("n2", 2)]),  # mpiprocs=2
        ("n1.hpc.example.org\nn2.hpc.example.org\n", None),  # a line for each chunk
        ("n2\nn1\nn2\n", [("n2", 2), ("n1", 1)]),  # chunks of unequal size, scattered
        ("n1\n\n", [("n1", 1)]),
    ],
)
def test_pbs_tells_a_slot_by_a_line(
    text: str, nodes: list[tuple[str, int]] | None, tmp_path: Path
) -> None:
    nodefile = tmp_path / "17.head"
    nodefile.write_text(text)
    environ = {"PBS_JOBID": "17.head", "PBS_NODEFILE": str(nodefile)}
    found = read_allocation(environ)
    expected = nodes or [("n1.hpc.example.org", 1), ("n2.hpc.example.org", 1)]
    assert [(n.hostname, n.slots) for n in found] == expected
    assert {n.gpus for n in found} == {None}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "PBS_NODEFILE is not set"),
        ({"PBS_NODEFILE": "/nowhere/17"}, "/nowhere/17.*No such file.*first node"),
        ({"PBS_NODEFILE": "/dev/null"}, "/dev/null names no host"),
    ],
)
def test_a_node_file_that_is_not_there_is_named(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises((LaunchError, UsageError), match=words):
        read_allocation({"PBS_JOBID": "17.head"} | environ)


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("    Resource_List.select = 1:ncpus=16:ompth\n\treads=4\n", True),
        ("    schedselect = 1:ncpus=16:mpiprocs=4\n", False),
        ("", None),
    ],
)
def test_qstat_tells_whether_a_job_asks_for_ompthreads(
    text: str, asks: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks long lines."""
    monkeypatch.setattr(pbs, "query", lambda *words: text)
    assert pbs.asks_for_ompthreads("7.head") is asks


def test_without_a_job_the_message_says_what_to_type() -> None:
    with pytest.raises(UsageError, match=r"neither SLURM_JOB_ID nor PBS_JOBID") as told:
        read_allocation({"HOME": "/"})
    assert "--from FILE" in str(told.value)


FOUR_EACH = (
    AllocatedNode(hostname="node1", slots=4),
    AllocatedNode(hostname="node2", slots=4),
)


@pytest.mark.parametrize("file_format", get_args(HostFileFormat))
def test_the_example_of_each_file_format_says_the_same(
    file_format: HostFileFormat,
) -> None:
    file = ROOT / "hostfiles" / file_format
    assert parse(file.read_text(), str(file)) == FOUR_EACH


@pytest.mark.parametrize("file_format", get_args(HostFileFormat))
def test_what_is_written_is_read_back(file_format: HostFileFormat) -> None:
    nodes = (
        AllocatedNode(hostname="gpu-01.example.org", slots=8),
        AllocatedNode(hostname="login@n_2", slots=1),
    )
    assert parse(render(nodes, file_format), "it") == nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1 slots=4 max-slots=8", [("n1", 4)]),
        ("n1 slots = 4  max_slots = 8 # the fast one", [("n1", 4)]),
        ("\n  # nobody\n\tn1\tslots=4\r\n", [("n1", 4)]),
        ("n1:4", [("n1", 4)]),
        ("n1:2\nn2:1\nn1:2", [("n1", 4), ("n2", 1)]),
        ("n1\nn2\nn1\n", [("n1", 2), ("n2", 1)]),
        ("10.0.0.1 slots=2\nuser@n2:3", [("10.0.0.1", 2), ("user@n2", 3)]),
    ],
)
def test_lines_of_host_files_are_understood(
    text: str, nodes: list[tuple[str, int]]
) -> None:
    found = parse(text, "it")
    assert [(n.hostname, n.slots) for n in found] == nodes


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("n1 slots=many", "slots=many"),
        ("n1 slots=0", "slots=0"),
        ("n1:0", "n1:0"),
        ("n1:4 slots=4", "n1:4 slots=4"),
        ("n1 max-slots=2", "max-slots=2"),
        ("n1 slots", "n1 slots"),
        ("n1 slots=1 slots=2", "slots=2"),
        ("n1 cpus=4", "cpus=4"),
        ("+n0 slots=4", "+n0"),
        ("slots=4", "slots=4"),
        ("n1 slots=2\nn1 slots=2", "a second time"),
    ],
)
def test_a_line_that_is_none_is_named_with_its_number(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"it:[23]: ") as told:
        parse(f"# first\n{line}\n", "it")
    assert words in str(told.value)


def test_a_host_file_without_hosts_is_refused() -> None:
    with pytest.raises(UsageError, match="it names no host"):
        parse("# nobody\n", "it")

"""What a run costs: counters of energy, jobs that add up, prices.

The counters are files in a folder that stands for ``/sys``: the machines of these tests
have none that can be read. What they hold is made up, in the kernel's form. `scontrol`
and `qstat` are stand-ins that print a record; tests/cluster/test_cost.py has a real
SLURM, and no test has a real PBS. By hand, on an OpenPBS of three hosts, the sums were
those of `qstat -x`: of a finished job, a killed rank, a lost node with a spare one.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_folders import Part, make_run

from mpitrain.launch.env_checks import STATUS_FILE
from mpitrain.mpi.world import Node, World
from mpitrain.record import cost
from mpitrain.record.cost import FILE, cost_of, describe_job, end_job
from mpitrain.record.energy import EnergyMeter
from mpitrain.schedulers import read_job
from mpitrain.tools.report.report import ReportConfig, report


def counter(root: Path, path: str, value: int, **beside: str) -> Path:
    """Write a counter of a sysfs that is made up, with files beside it."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}\n")
    for name, text in beside.items():
        (file.parent / name).write_text(f"{text}\n")
    return file


def rapl(root: Path, zone: str, name: str, value: int) -> Path:
    path = f"class/powercap/intel-rapl:{zone}/energy_uj"
    return counter(root, path, value, name=name, max_energy_range_uj="1000000000")


def test_rapl_counts_packages_and_memory_and_goes_on_where_a_counter_wraps(
    tmp_path: Path,
) -> None:
    package = rapl(tmp_path, "0", "package-0", 999_000_000)
    memory = rapl(tmp_path, "0:1", "dram", 5_000_000)
    cores = rapl(tmp_path, "0:0", "core", 7)  # within the package
    whole = rapl(tmp_path, "1", "psys", 7)  # the package is within it
    meter = EnergyMeter(tmp_path)
    assert meter.joules == 0.0
    assert meter.parts == {"cpu", "memory"}
    for file in (cores, whole):
        file.write_text("900000000\n")
    package.write_text("1000000\n")  # 2 J later
    memory.write_text("8000000\n")
    meter.update()
    assert meter.joules == pytest.approx(2.0 + 3.0)
    package.write_text("11000000\n")
    meter.update()
    assert meter.joules == pytest.approx(15.0)


def test_crays_counter_is_of_the_whole_node_and_alone(tmp_path: Path) -> None:
    package = rapl(tmp_path, "0", "package-0", 0)
    node = tmp_path / "cray/pm_counters/energy"
    node.parent.mkdir(parents=True)
    node.write_text("115810 J 1636147304843122 us\n")
    meter = EnergyMeter(tmp_path)
    package.write_text("50000000\n")
    node.write_text("115990 J 1636147305843122 us\n")
    meter.update()
    assert meter.joules == 180.0
    assert meter.parts == {"node"}


def test_gpus_have_a_counter_or_only_their_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    intel = counter(tmp_path, "class/hwmon/hwmon3/energy1_input", 10**6, name="xe")
    amd = counter(tmp_path, "class/hwmon/hwmon4/power1_average", 0, name="amdgpu")
    disk = counter(tmp_path, "class/hwmon/hwmon5/energy1_input", 0, name="ibmaem")
    meter = EnergyMeter(tmp_path)
    intel.write_text("4000000\n")
    amd.write_text("250000000\n")  # microwatts
    disk.write_text("99000000\n")
    now = 110.0
    meter.update()
    assert meter.joules == pytest.approx(3.0 + 2500.0)
    assert meter.parts == {"gpu"}


def test_a_counter_that_cannot_be_read_is_left_out_with_the_reason(
    tmp_path: Path,
) -> None:
    package = rapl(tmp_path, "0", "package-0", 0)
    package.unlink()
    package.mkdir()  # root, who runs these tests, can read all files
    memory = rapl(tmp_path, "0:1", "dram", 0)
    meter = EnergyMeter(tmp_path)
    assert meter.parts == {"memory"}
    assert f"Is a directory: '{package}'" in meter.missing
    memory.unlink()  # later, too, it is no error
    meter.update()
    assert meter.joules == 0.0
    none = EnergyMeter(tmp_path / "nothing")
    none.update()
    assert not none.parts
    assert "no counters of energy" in none.missing


SLURM_RECORDS = """\
JobId=16 JobName=x SubmitTime=2026-11-22T01:00:00 StartTime=2026-11-22T02:00:00 \
NumNodes=1 NumCPUs=1
JobId=17 JobName=x SubmitTime=2026-11-22T04:40:00 StartTime=2026-11-22T04:50:00 \
EndTime=2026-11-22T05:50:00 NumNodes=2 NumCPUs=16 NumTasks=2 TRES=cpu=16,node=2
"""
PBS_RECORD = """\
Job Id: 17.head
    Job_Name = job.sh
    resources_used.walltime = 00:00:05
    exec_host = node1/0*8+node1/1*4
\t+node2/0*4
    qtime = Sun Nov 22 04:40:00 2026
    Resource_List.ncpus = 16
    Resource_List.nodect = 3
    stime = Sun Nov 22 04:50:00 2026
"""
STARTED = datetime(2026, 11, 22, 4, 50).timestamp()


@pytest.fixture(params=["slurm", "pbs"])
def scheduler(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A scheduler of which one command is there, which always prints the same."""
    variable, number, program, text = {
        "slurm": ("SLURM_JOB_ID", "17", "scontrol", SLURM_RECORDS),
        "pbs": ("PBS_JOBID", "17.head", "qstat", PBS_RECORD),
    }[request.param]
    (tmp_path / "record").write_text(text)
    path = tmp_path / "bin" / program
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path}/record\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, number)
    return str(request.param)


def world_of(*hosts: str) -> World:
    nodes = tuple(
        Node(hostname=it, ranks=(2 * i, 2 * i + 1), num_cores=4, gpus=("0", "0"))
        for i, it in enumerate(hosts)
    )
    return World(
        rank=0,
        world_size=2 * len(hosts),
        local_rank=0,
        local_world_size=2,
        node_rank=0,
        nodes=nodes,
    )


def test_a_job_counts_from_its_start_by_the_scheduler_with_all_of_its_cores(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = describe_job(world_of("node1", "node2"), tmp_path / "runs/a" / FILE)
    job_id = {"slurm": "17", "pbs": "17.head"}[scheduler]
    assert job["id"] == f"{scheduler} {job_id} {STARTED:.0f}"
    assert (job["began"], job["queue_seconds"]) == (STARTED, 600.0)
    assert (job["cores"], job["gpus"]) == (16, 2)  # two ranks share each GPU
    # Of a part of the job's nodes, those of its ranks.
    job = describe_job(world_of("node1"), tmp_path / "runs/a" / FILE)
    assert (job["cores"], job["gpus"]) == (4, 1)
    # But `supervise` has all of them: others are spare, or were lost.
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status"))
    job = describe_job(world_of("node1"), tmp_path / "runs/a" / FILE)
    assert (job["cores"], job["gpus"]) == (16, 2)


@pytest.mark.usefixtures("scheduler")
def test_runs_and_restarts_of_one_job_add_up_to_the_job(tmp_path: Path) -> None:
    world, end = world_of("node1", "node2"), STARTED
    for name, seconds in (("a", 100), ("a", 50), ("b", 30), ("c", 20)):
        path = tmp_path / "runs" / name / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        job = describe_job(world, path)
        assert job["began"] == end
        end += seconds
        before = json.loads(path.read_text())["jobs"] if path.exists() else []
        path.write_text(json.dumps({"jobs": [*before, {**job, "ended": end}]}))
    costs = {name: cost_of(tmp_path / "runs" / name) for name in "abc"}
    assert costs["a"]["num_jobs"] == 1
    assert sum(it["core_hours"] for it in costs.values()) == 200 * 16 / 3600
    assert sum(it["gpu_hours"] for it in costs.values()) == 200 * 2 / 3600
    assert sum(it["queue_seconds"] for it in costs.values()) == 600.0


def test_without_an_answer_a_job_counts_from_the_start_of_its_launcher(
    scheduler: str, tmp_path: Path
) -> None:
    (tmp_path / "record").write_text("error: Invalid job id specified\n")
    variable = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}[scheduler]
    assert read_job({variable: "17"}) is None
    job = describe_job(world_of("node1", "node2"), tmp_path / FILE)
    assert time.time() - 3600 < job["began"] < time.time()
    assert job["cores"] == 8
    assert "queue_seconds" not in job


def test_what_ranks_have_counted_counts_where_the_scheduler_answers_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rapl(tmp_path / "sys", "0", "package-0", 0)
    world = world_of("node1")

    def late(*arguments: Any) -> dict[str, Any]:
        time.sleep(0.3)
        return describe_job(*arguments)

    monkeypatch.setattr(cost, "open_meter", lambda _: EnergyMeter(tmp_path / "sys"))
    monkeypatch.setattr(cost, "describe_job", late)
    ranks = SimpleNamespace(allgather=lambda mine: [mine])
    trainer: Any = SimpleNamespace(engine=SimpleNamespace(world=world, ranks=ranks))
    costs = cost.Costs(tmp_path)
    costs.on_fit_start(trainer)
    costs.on_fit_end(trainer)
    assert cost_of(tmp_path)["energy_joules"] == 0.0


def test_supervise_ends_the_job_that_it_has_started_and_no_earlier_one(
    tmp_path: Path,
) -> None:
    job = {"id": "x", "began": 1000.0, "ended": 2000.0, "cores": 1, "gpus": 0}
    (tmp_path / FILE).write_text(json.dumps({"jobs": [job]}))
    end_job(tmp_path, 2500.0)  # mpirun found the run finished
    assert cost_of(tmp_path)["wall_hours"] == pytest.approx(1000 / 3600)
    end_job(tmp_path, 1500.0)
    hours = (time.time() - 1000.0) / 3600
    assert cost_of(tmp_path)["wall_hours"] == pytest.approx(hours, abs=0.01)
    end_job(tmp_path / "nothing", 0.0)


def test_a_file_that_is_none_costs_nothing_known(tmp_path: Path) -> None:
    assert cost_of(tmp_path) == {}
    for text in ("", "[]", '{"jobs": []}', '{"jobs": [{"id": "x"}]}'):
        (tmp_path / FILE).write_text(text)
        assert cost_of(tmp_path) == {}


@pytest.mark.parametrize(
    ("gpus", "lines"),
    [
        (0, ["core-hours: 24", "cost at 1.5 per core-hour: 36.00"]),
        (4, ["core-hours: 24", "GPU-hours: 8", "cost at 1.5 per GPU-hour: 12.00"]),
    ],
)
def test_the_report_has_the_price_of_gpus_or_else_of_cores(
    gpus: int, lines: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", (Part(world_size=2, last=20),))
    config = ReportConfig(run=run, price=1.5, pictures=False)
    assert report(config).splitlines()[0].startswith("cost: not known, since ")
    jobs = [
        {"id": it, "began": 0.0, "ended": 3600.0, "cores": 12, "gpus": gpus}
        for it in "ab"
    ]
    for job in jobs:
        used = {"energy_joules": 1.8e6, "energy_parts": ["cpu"]}
        job |= {"ranks": [used, {}], "queue_seconds": 30.0}
    (run / FILE).write_text(json.dumps({"jobs": jobs}))
    lines.insert(-1, "kWh (cpu): 1")
    lines.insert(-1, "in the queue: 1 min 00 s")
    assert report(config).splitlines()[:-1] == lines
    page = (run / "report.html").read_text()
    for line in lines:
        name, _, value = line.partition(": ")
        assert f"<b>{value}</b><span>{name}</span>" in page
    without = report(ReportConfig(run=run, pictures=False)).splitlines()
    assert without[:-1] == lines[:-1]

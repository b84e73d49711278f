"""Nodes that are left out of a start: lost ones until a probe, wrong ones for good."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.mpi.launchers import LAUNCHERS
from mpitrain.tools.jobs.check_nodes import check_nodes
from mpitrain.tools.jobs.launch_words import parse_words
from mpitrain.tools.jobs.node_choice import NodeChoice
from mpitrain.tools.jobs.warm_nodes import WarmNodes


def choice_of_three(folder: Path, file: Path) -> NodeChoice:
    hosts = folder / "all"
    hosts.write_text("a.x.org slots=2\nb slots=2\nc slots=2\n")
    words = f"mpirun --hostfile {hosts} python -m mpitrain".split()
    return NodeChoice(
        parse_words(words, LAUNCHERS["openmpi"]),
        {},
        file,
        limit=None,
        minimum=1,
        seconds=9.0,
    )


@pytest.mark.parametrize(
    ("program", "is_script"),
    [
        ("python -m mpitrain --epochs 3", False),
        ("python -m mpitrain run train.py", True),
        ("python train.py", True),
        ("python -m mpitrain stage -- python -m mpitrain --epochs 3", False),
        ("python -m mpitrain stage --to /tmp -- python -m mpitrain run x.py", True),
        ("python -m mpitrain stage -- python x.py -- stage", True),
        ("python -m mpitrain stage -- numactl -N0 python -m mpitrain --name x", False),
        ("python -m mpitrain stage -- numactl -N0 python x.py", True),
        ("python -m mpitrain stage -- /a/bin/mpitrain --name x", False),
        ("python -m mpitrain stage -- numactl -N0 mpitrain run x.py", True),
    ],
)
def test_a_script_is_known_although_stage_starts_it(
    program: str, is_script: bool
) -> None:
    words = parse_words(["mpirun", *program.split()], LAUNCHERS["openmpi"])
    assert words.is_script == is_script


@pytest.mark.parametrize(
    ("launcher", "words", "start", "num_ranks"),
    [
        ("openmpi", "--np=4 --hostfile=f --bind-to none", "--bind-to none", 4),
        ("openmpi", "--hostfile f -c 4 --mca btl=self x", "--mca btl=self x", 4),
        ("mpich", "-n=4 --f=f -ppn 2", "-ppn 2", 4),
        ("mpich", "-f f -c 3", "-c 3", None),
        ("openmpi", "--machinefile f nice -n 5", "nice -n 5", None),
        ("openmpi", "-np 4 --hostfile f /bin/taskset -c 3", "/bin/taskset -c 3", 4),
        ("openmpi", "--hostfile f -n 4 mine -n 3", "mine -n 3", 4),
        *(
            ("openmpi", f"--hostfile f -n 4 {before}{program}", before + program, 4)
            for before in ("", "--oversubscribe ", "--mca btl self ", "--other ")
            for program in (
                *("nsys profile -f true", "ncu -c 5", "perf record -c 100"),
                *("conda run -n env", "apptainer exec -f x.sif", "timeout -f -n 5 9"),
                *("gdb -n -f", "likwid-pin -c 0-3", "/opt/bin/rocprof -f x"),
            )
        ),
        ("openmpi", "-np 4 -x env --hostfile f", "-x env", 4),
        (
            "openmpi",
            "-x env -wd time -n 4 --hostfile f nice",
            "-x env -wd time nice",
            4,
        ),
        ("openmpi", "-n 4 --mca time nice --hostfile f", "--mca time nice", 4),
        ("mpich", "-genv A env -f f -n 4 mine -f x", "-genv A env mine -f x", 4),
        ("openmpi", "--hostfile f --a=b mine -n 3", "--a=b mine -n 3", None),
    ],
)
@pytest.mark.parametrize("python", ["python", "/a/bin/python3.13t"])
def test_a_launcher_s_options_are_known_in_each_form(
    launcher: str, words: str, start: str, num_ranks: int | None, python: str
) -> None:
    command = ["mpirun", *words.split(), python, "x.py", "--np=3"]
    found = parse_words(command, LAUNCHERS[launcher])
    assert found.start == ("mpirun", *start.split())
    assert (found.host_file, found.num_ranks) == (Path("f"), num_ranks)
    assert found.program == (python, "x.py", "--np=3")


def test_a_launcher_that_takes_all_nodes_is_refused_where_some_are_chosen() -> None:
    launcher = LAUNCHERS["srun"]
    words = parse_words(["srun", "python", "x.py"], launcher)
    limits = {"limit": 2, "minimum": 1, "seconds": 9.0}
    for flag, start in (
        ("--nodes 2", lambda: NodeChoice(words, {}, Path("f"), **limits)),
        ("--warm", lambda: WarmNodes(words, {})),
        ("--probe", lambda: check_nodes([], ["srun"], 9.0, {})),
    ):
        with pytest.raises(UsageError, match=f"^{flag}: srun takes all nodes of"):
            start()
    words = parse_words(["mpirun", "python", "x.py"], LAUNCHERS["openmpi"])
    with pytest.raises(UsageError, match="--nodes 2: expected a job, or a host file"):
        NodeChoice(words, {}, Path("f"), **limits)


def test_a_full_disk_leaves_the_nodes_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choice_of_three(tmp_path, tmp_path / "chosen")
    assert choice.leave_out("b")
    with monkeypatch.context() as full:
        error = OSError(errno.ENOSPC, "No space left on device")
        full.setattr(Path, "write_bytes", Mock(side_effect=error))
        assert not choice.leave_out("c")
    assert "chosen is not renewed: [Errno 28] No space left" in caplog.text
    assert choice.hosts == ["a.x.org", "c"]
    assert choice.leave_out("c")
    assert choice.hosts == ["a.x.org"]


def test_a_node_that_computes_wrongly_is_in_no_later_probe(tmp_path: Path) -> None:
    file = tmp_path / "chosen"
    choice = choice_of_three(tmp_path, file)
    assert choice.leave_out("b")
    assert file.read_text() == "a.x.org slots=2\nc slots=2\n"
    assert "--exclude" not in choice.begin_probe(), "it may be there again"
    assert choice.leave_out("a", is_wrong=True)
    assert choice.leave_out("c")
    assert file.read_text() == "b slots=2\n"
    probe = choice.begin_probe()
    assert probe[probe.index("--exclude") + 1] == "a"
    # The command leaves it out; without a probe, which needs the hosts.
    flags = [it for it in probe[4 : probe.index("--")] if it != "--probe"]
    assert main(["hostfile", *flags]) == 0
    assert file.read_text() == "b slots=2\nc slots=2\n"

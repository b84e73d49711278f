"""What is known of launchers is in one table, and the sites' files fit it."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.launch.env_checks import check_size, launched_size, was_launched
from mpitrain.mpi.launchers import LAUNCHERS, by_command, by_process, version_of
from mpitrain.settings import flags_of
from mpitrain.tools.jobs.check_nodes import launcher_of
from mpitrain.tools.jobs.containers import Runtime
from mpitrain.tools.jobs.jobscript import SITES, JobscriptConfig, read_site

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "mpitrain/mpi/launchers.py"
NAMES = sorted(path.stem for path in SITES.glob("*.yaml"))

# Words of one MPI or of its launcher. mpirun is our word for all of them.
WORDS = re.compile(
    r"\bopen.?mpi\b|mpich|hydra|prrte|\b(prted|orted|jsrun|ibrun|pals)\b|pmix|\bpmi_?"
    r"|intel\(r\) mpi|flux run|OMPI_|I_MPI|--bind-to|--map-by|\bppr:|--mca",
    re.IGNORECASE,
)


def strings_of(path: Path) -> list[tuple[int, str]]:
    """Return the strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text())
    documents = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                documents.add(id(item.value))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documents
    ]


def test_no_code_but_the_table_knows_an_mpi_by_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted((ROOT / "mpitrain").rglob("*.py"))
        if path != TABLE
        for line, text in strings_of(path)
        if WORDS.search(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("site", NAMES)
def test_a_site_s_script_is_one_that_bash_reads(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", "--site", site, "--account", "a", "--nodes", "3"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    launcher = LAUNCHERS[str(read_site(site)["launcher"])]
    assert f"    {launcher.program} " in script
    assert "{" not in re.sub(r"\$\{.*?\}", "", script).replace("{ :", "")
    assert main(["jobscript", "--site", site, "--show"]) == 0
    assert capsys.readouterr().out == (SITES / f"{site}.yaml").read_text()


@pytest.mark.parametrize("site", NAMES)
def test_a_site_s_file_says_where_it_is_from_and_that_it_was_not_run(site: str) -> None:
    text = (SITES / f"{site}.yaml").read_text()
    head = " ".join(re.findall(r"^# (.*)", text, re.M)[:6])
    assert "https://" in head
    assert re.search(r"November 2026", head)
    assert "Not run" in head


def test_the_page_of_sites_has_each_site_and_launcher_once() -> None:
    page = (ROOT / "docs/howto/sites.md").read_text()
    table = page.partition("| site |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`--site (\w+)`", table)) == NAMES
    rows = [line.split("|")[4].strip() for line in table.splitlines()[2:]]
    assert {*rows} == {"real", "imitated"}
    (flag,) = (it for it in flags_of(JobscriptConfig) if it.name == "--site")
    assert [name for name in NAMES if name not in flag.text] == []


def test_flags_after_a_site_take_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--site",
        "polaris",
        "--queue",
        "prod",
        "--line",
        "#PBS -l x=y",
        "--nodes=9",
    ]
    assert main(["jobscript", *words]) == 0
    script = capsys.readouterr().out
    assert "#PBS -q prod\n" in script
    assert "#PBS -q debug" not in script
    assert "#PBS -l filesystems=home:eagle\n#PBS -l x=y\n" in script
    assert "select=9:system=polaris" in script
    assert "mpiexec" in script
    assert "-n 36 --ppn 4" in script


@pytest.mark.parametrize("site", NAMES)
def test_without_memory_a_site_s_script_has_no_line_for_it(
    site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", "--site", site, "--mem", "None"]) == 0
    script = capsys.readouterr().out
    assert [it for it in script.splitlines() if re.match(r"#\w+ .*\bmem=", it)] == []
    assert re.search(r"^#(SBATCH --nodes=|PBS -l (select|ncpus)=)", script, re.M)


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        ("#SBATCH --mem={mem}", False),
        ("#SBATCH --mem-per-cpu={mem}", False),
        ("#SBATCH --mem {mem}", False),
        ("#PBS -l mem={all_mem}b", False),
        ("#SBATCH --exclusive --mem={mem}", True),
        ("#PBS -l select=2:mem={mem}", True),
    ],
)
def test_only_a_line_for_nothing_else_is_left_out(
    line: str, is_kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = "slurm" if line.startswith("#SBATCH") else "pbs"
    words = ["jobscript", scheduler, "--mem", "None", "--resources", line]
    assert main(words) == (2 if is_kept else 0)
    found = capsys.readouterr()
    if is_kept:
        assert "(with --mem: mem, all_mem)" in found.err
    assert not re.search(r"^#\w+ .*\bmem[-=]", found.out, re.M)


@pytest.mark.parametrize("runtime", get_args(Runtime))
def test_ranks_are_started_in_each_kind_of_container(
    runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["slurm", "--container", "an image", "--container-runtime", runtime]
    assert main(["jobscript", *words]) == 0
    script = capsys.readouterr().out
    (line,) = re.findall(r"^container=\((.*)\)$", script, re.M)
    assert "'an image'" in line
    assert '--container "${container[*]@Q}" --restarts 3 -- ' in script
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.stderr == ""
    assert main(["jobscript", *words, "--gpus-per-node", "0"]) == 0
    script = capsys.readouterr().out
    assert not re.search(r"--nv|--gpu |nvidia", script)
    assert main(["jobscript", *words, "--restarts", "0"]) == 0
    assert '"${container[@]}" python -m mpitrain' in capsys.readouterr().out
    more = ["--container-flag=--rocm", "--jobs", "3"]
    assert main(["jobscript", *words, *more]) == 0
    script = capsys.readouterr().out
    assert " --rocm " in script
    assert '--container "${container[*]@Q}"' in script


def test_numbers_of_a_site_are_taken_as_they_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("scheduler: slurm\ntime: 2:00:00\naccount: 0123\n")
    assert main(["jobscript", "--site", str(mine)]) == 0
    script = capsys.readouterr().out
    assert "--time=02:00:00" in script
    assert "--account=0123" in script


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lancher: srun", "unknown flag --lancher. Did you mean '--launcher'?"),
        ("nodes: two", "--nodes: found 'two', expected a whole number"),
        ("warm: often", "--warm: found 'often', expected true or false."),
    ],
)
def test_what_is_wrong_in_the_file_of_a_site_is_told_with_the_file(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"scheduler: slurm\ncpus-per-slot: 8\n{line}\n")
    assert main(["jobscript", "--site", str(mine)]) == 2
    assert f"--site {mine}: {said}" in capsys.readouterr().err


def test_a_site_may_switch_a_flag_on_and_off_as_yaml_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("scheduler: slurm\nwarm: true\nstage: false\n")
    assert main(["jobscript", "--site", str(mine)]) == 0
    script = capsys.readouterr().out
    assert " --warm -- " in script
    assert "mpitrain stage" not in script
    # The file is for trainings, too: a check, which is started once, is not refused.
    assert main(["jobscript", "--site", str(mine), "--", "check"]) == 0
    assert "--warm" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--", "check"], ["--restarts", "0"]])
def test_warm_starts_are_refused_where_there_is_one_start(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", "slurm", "--warm", *words]) == 2
    assert "is started once; expected --restarts of" in capsys.readouterr().err
    assert main(["jobscript", "slurm", "--warm", "--restarts", "1"]) == 0
    assert " --warm " in capsys.readouterr().out


def test_words_of_binding_are_the_site_s_or_the_launcher_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for site, words in (
        ("aurora", "--cpu-bind=list:"),
        ("derecho", "--cpu-bind depth"),
    ):
        assert main(["jobscript", site]) == 0
        script = capsys.readouterr().out
        assert script.count("--cpu-bind") == 1
        assert words in script


def test_a_program_that_may_start_something_is_not_asked_what_it_is(
    tmp_path: Path,
) -> None:
    for name in ("start.sh", "ibrun"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        (tmp_path / name).chmod(0o755)
    assert launcher_of([f"{tmp_path}/start.sh"]) == "openmpi"
    assert launcher_of([f"{tmp_path}/ibrun"]) == "ibrun"
    assert not (tmp_path / "started").exists()


def test_a_site_may_be_named_as_a_scheduler_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["jobscript", "lumi", "--launcher", "openmpi"]) == 0
    found = capsys.readouterr()
    assert "#SBATCH --partition=standard-g" in found.out
    assert "cpu-bind" not in found.out  # of the site's launcher
    assert "no --account" in found.err


def test_a_user_s_own_file_works_as_a_site(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("scheduler: slurm\nlauncher: srun\nslots_per_node: 3\n")
    assert main(["jobscript", "--site", str(mine), "--gpus-per-node", "0"]) == 0
    script = capsys.readouterr().out
    assert "--ntasks-per-node=3" in script
    assert "srun " in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--site", "polariss"], "Did you mean 'polaris'?"),
        (
            ["slurm", "--line", "#PBS -l a"],
            "--line '#PBS -l a': expected '#SBATCH ...'",
        ),
        (["slurm", "--show"], "expected --site beside it"),
        (["slurm", "--launcher", "srun", "--spare-nodes", "1", "--jobs", "2"], "srun"),
        (
            ["slurm", "--resources", "#SBATCH {what}"],
            "--resources '#SBATCH {what}': in braces expected nodes",
        ),
        (
            ["pbs", "--mem", "None", "--resources", "#PBS -l select=2:mem={mem}"],
            "{mem}': in braces expected nodes, slots, cpus",
        ),
        (["slurm", "--container-flag", "a\nb"], "--container-flag"),
        (["slurm", "--container", "image"], "--container-runtime"),
        (["slurm", "--container-runtime", "podman"], "expected --container beside it"),
        (["slurm", "--site", "polaris"], "--site polaris is of pbs, found slurm"),
        (["--site", "POLARIS"], "Did you mean 'polaris'?"),
        (["pbs", "--launcher", "srun"], "is of SLURM, found PBS"),
        (["slurm", "--launcher", "nothing"], "openmpi"),
    ],
)
def test_a_mistake_is_told_before_a_job_queues(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobscript", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("process", "environ", "name"),
    [
        ("prted", {"OMPI_COMM_WORLD_SIZE": "2"}, "openmpi"),
        ("hydra_pmi_proxy", {"PMI_RANK": "0"}, "mpich"),
        ("hydra_pmi_proxy", {"PMI_RANK": "0", "I_MPI_ROOT": "/opt"}, "intel"),
        ("mpiexec", {"OMPI_COMM_WORLD_SIZE": "2", "I_MPI_ROOT": "/opt"}, "openmpi"),
        ("slurmstepd", {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun"),
        ("slurmstepd", {"PALS_RANKID": "0", "PMI_SIZE": "2"}, "srun"),
        ("palsd", {"PALS_RANKID": "0"}, "pals"),
        ("", {"PALS_RANKID": "0", "PMIX_RANK": "0"}, "pals"),
        ("", {"JSM_NAMESPACE_RANK": "0"}, "jsrun"),
        ("flux-shell", {"PMI_RANK": "0"}, "flux"),
        ("bash", {}, ""),
    ],
)
def test_a_rank_s_launcher_is_known_by_what_started_it(
    process: str, environ: dict[str, str], name: str
) -> None:
    assert by_process(process, environ) == name


@pytest.mark.parametrize(
    ("command", "answer", "name"),
    [
        ("mpirun", "mpirun (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec", "HYDRA build details:\n    Version:   5.0.2", "mpich"),
        ("mpirun", "Intel(R) MPI Library for Linux* OS, Version 2021.14", "intel"),
        ("/opt/cray/pals/1.7/bin/mpiexec", "mpiexec version 1.7.1", "pals"),
        ("srun", "slurm 24.05", "srun"),
        ("flux", "", "flux"),
        ("mpirun", "what?", ""),
    ],
)
def test_a_launcher_is_known_by_what_it_says(
    command: str, answer: str, name: str
) -> None:
    assert by_command(command, answer) == name


@pytest.mark.parametrize(
    ("launcher", "answer", "version"),
    [("openmpi", "mpirun (Open MPI) 5.0.11", "5.0.11"), ("srun", "", "")],
)
def test_the_version_of_a_launcher_is_what_it_says(
    launcher: str, answer: str, version: str
) -> None:
    assert version_of(launcher, answer) == version


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "4", "PMIX_RANK": "0"}, 4),
        ({"PMIX_RANK": "5"}, 6),
        ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"}, 6),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        # mpirun -np 1, whose daemons are a larger step of SLURM.
        (
            {
                "OMPI_COMM_WORLD_SIZE": "1",
                "OMPI_COMM_WORLD_RANK": "0",
                "SLURM_STEP_NUM_TASKS": "2",
            },
            1,
        ),
        ({"PMIX_RANK": "0"}, 1),  # of a shell that srun opened, too
        ({}, 1),
    ],
)
def test_ranks_without_pmi_size_are_no_lone_processes(
    environ: dict[str, str], size: int
) -> None:
    assert was_launched(environ) == (size > 1 or "OMPI_COMM_WORLD_SIZE" in environ)
    assert launched_size(environ) == size
    if size > 1:
        with pytest.raises(UsageError.__base__, match="each would train alone"):  # type: ignore[arg-type]
            check_size(1, environ)

"""`python -m mpitrain hostfile`: whole texts, and refusals by flag."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.flags import read_flags
from mpitrain.schedulers import slurm
from mpitrain.tools.jobs.hostfile import HostfileConfig, text_of

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
GPUS = {"SLURM_GPUS_ON_NODE": "4"}


@pytest.fixture(autouse=True)
def scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster where `scontrol` knows the nodes."""
    monkeypatch.setattr(slurm, "query", lambda *words: "gpu1\ngpu2\n")


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ({}, SLURM, "# SLURM job 17\ngpu1 slots=2\ngpu2 slots=1\n"),
        ({}, SLURM | GPUS, "# SLURM job 17\ngpu1 slots=4\ngpu2 slots=4\n"),
        (
            {"gpus": "ignore", "format": "mpich"},
            SLURM | GPUS,
            "# SLURM job 17\ngpu1:2\ngpu2:1\n",
        ),
        (
            {"slots": 3, "format": "mpich"},
            SLURM | GPUS,
            "# SLURM job 17\ngpu1:3\ngpu2:3\n",
        ),
        ({"format": "pbs"}, SLURM, "gpu1\ngpu1\ngpu2\n"),
    ],
)
def test_a_host_file_has_the_slots_of_the_allocation(
    flags: dict, environ: dict[str, str], text: str
) -> None:
    assert text_of(HostfileConfig(**flags), environ) == text


def test_a_host_file_has_the_slots_of_the_node_file(tmp_path: Path) -> None:
    (tmp_path / "17").write_text("n1.a.org\nn1.a.org\nn2.a.org\n")
    environ = {"PBS_JOBID": "17.head", "PBS_NODEFILE": f"{tmp_path}/17"}
    assert text_of(HostfileConfig(), environ) == (
        "# PBS job 17.head\nn1.a.org slots=2\nn2.a.org slots=1\n"
    )


def test_a_file_is_put_into_another_dialect_outside_every_job(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1 slots=2\nn2 slots=1\n")
    config = HostfileConfig(from_file=file, format="mpich")
    text = text_of(config, {})
    assert text == "n1:2\nn2:1\n"


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("n1 max_slots=8 slots=4", "n1 slots=4"),
        ("n1 max-slots=8   slots = 4", "n1 slots=4"),
        ("2001:db8::17 slots=4", "2001:db8::17 slots=4"),
        ("fe80::1", "fe80::1 slots=1"),
        ("::ffff:10.0.0.1 slots=2 max-slots=4", "::ffff:10.0.0.1 slots=2"),
        ("[2001:db8::17]:4", "2001:db8::17 slots=4"),
        ("10.0.0.1:2", "10.0.0.1 slots=2"),
    ],
)
def test_addresses_and_both_orders_of_slots_are_read(
    line: str, written: str, tmp_path: Path
) -> None:
    """As Open MPI 5.0.11 reads them, but for the brackets."""
    file = tmp_path / "hosts"
    file.write_text(line)
    assert text_of(HostfileConfig(from_file=file), {}) == f"{written}\n"


def test_only_the_excluded_one_of_some_addresses_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("10.0.0.1:2\n10.0.0.2:2\nn3.a.org:2\nn4:2\n")
    excluded = ("10.0.0.1", "n3", "n4.a.org")
    text = text_of(HostfileConfig(from_file=file, exclude=excluded), {})
    assert text == "10.0.0.2 slots=2\n"


def test_an_ipv6_address_is_refused_where_mpich_cannot_read_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("fe80::1 slots=2\n")
    with pytest.raises(UsageError, match="fe80::1 is an IPv6 address"):
        text_of(HostfileConfig(from_file=file, format="mpich"), {})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--slots 0", "--slots must be at least 1, found 0"),
        ("--slots 2 --gpus require", "--gpus require.*--slots 2"),
        ("--slots 2 --gpus ignore", "--gpus ignore.*--slots 2"),
        ("--from x --gpus require", "--gpus require.*--from x"),
    ],
)
def test_flags_that_contradict_each_other_are_named(typed: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_flags(HostfileConfig, typed.split(), program="x")


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        ({}, {}, "--from FILE"),
        ({"gpus": "require"}, SLURM, "SLURM job 17 does not tell.*gpu1.*--slots"),
        ({"from_file": Path("/nowhere/x")}, {}, "--from /nowhere/x.*No such file"),
    ],
)
def test_what_cannot_be_told_is_refused_with_what_to_type(
    flags: dict, environ: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        text_of(HostfileConfig(**flags), environ)


def test_a_sum_of_gpus_over_nodes_is_no_number_for_each_of_them() -> None:
    with pytest.raises(UsageError, match="does not tell the GPUs of gpu1, gpu2"):
        text_of(
            HostfileConfig(gpus="require"),
            SLURM | {"SLURM_GPUS": "3", "SLURM_GPUS_ON_NODE": "2"},
        )


def test_the_file_is_written_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, written = tmp_path / "from", tmp_path / "to"
    source.write_text("n1:2\n")
    flags = ["hostfile", "--from", str(source)]
    assert main([*flags, "--output", str(written)]) == 0
    assert written.read_text() == "n1 slots=2\n"
    source.write_text("n1:none\n")
    assert main([*flags, "--output", str(written)]) == 2
    assert written.read_text() == "n1 slots=2\n"
    assert sorted(tmp_path.iterdir()) == [source, written]
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{source}:1: found 'n1:none'")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/nowhere/hosts", "No such file or directory"),
        (os.devnull, "is no file"),
        (".", "is no file"),
    ],
)
def test_an_output_that_is_no_file_is_refused(
    output: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "from").write_text("n1:2\n")
    flags = ["--from", str(tmp_path / "from"), "--output", output]
    assert main(["hostfile", *flags]) == 2
    said = capsys.readouterr().err
    assert f"--output {output}" in said
    assert words in said


def test_on_stdout_there_is_the_host_file_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "from").write_text("n1:2\n")
    assert main(["hostfile", "--from", f"{tmp_path}/from", "--format", "pbs"]) == 0
    assert capsys.readouterr() == ("n1\nn1\n", "")

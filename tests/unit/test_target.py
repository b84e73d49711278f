"""The words after `run`, as a table; what Python finds for a script or a module."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpitrain.errors import UsageError
from mpitrain.flags import HelpShown
from mpitrain.launch.run_script import failure, script_variables
from mpitrain.launch.run_target import (
    Target,
    find_module,
    find_program,
    read_script,
    read_words,
    split,
)
from mpitrain.mpi.world import Node, World


@pytest.mark.parametrize(
    ("words", "flags", "target"),
    [
        ([], [], None),
        (["t.py"], [], ("script", "t.py", ())),
        (["t.py", "--device", "x"], [], ("script", "t.py", ("--device", "x"))),
        (["t.py", "-m", "-h"], [], ("script", "t.py", ("-m", "-h"))),
        (["--device", "cpu", "-h", "t.py"], ["--device", "cpu", "-h"], "t.py"),
        (["t.py", "--", "a"], [], ("script", "t.py", ("--", "a"))),
        (["--device", "cpu", "t.py"], ["--device", "cpu"], ("script", "t.py", ())),
        (["--device=cpu", "t.py"], ["--device=cpu"], ("script", "t.py", ())),
        (["--config", "c.yaml", "t"], ["--config", "c.yaml"], ("script", "t", ())),
        (["--", "-odd.py", "-v"], [], ("script", "-odd.py", ("-v",))),
        (["-m", "a.b", "-m"], [], ("module", "a.b", ("-m",))),
        (["--no-python", "sh", "-c", "x"], [], ("program", "sh", ("-c", "x"))),
        (["--no-python", "--", "-p"], [], ("program", "-p", ())),
        (["--no-python", "--interface", "ib0", "sh"], ["--interface", "ib0"], "sh"),
        (["--devise", "cpu", "t.py"], ["--devise"], "cpu"),  # refused by its flags
        (["--device"], ["--device"], None),
        (["-m"], [], None),
        # As torchrun and Python spell them.
        (["--module", "a.b", "-v"], [], ("module", "a.b", ("-v",))),
        (["-ma.b", "-v"], [], ("module", "a.b", ("-v",))),
        (["--no_python", "ls", "-l"], [], ("program", "ls", ("-l",))),
    ],
)
def test_flags_end_where_the_script_is_named(
    words: list, flags: list, target: tuple | str | None
) -> None:
    found_flags, found = split(words)
    assert found_flags == flags
    if isinstance(target, tuple):
        kind, name, args = target
        assert found == Target(kind=kind, name=name, args=args)
    else:
        assert (found and found.name) == target


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to run is named"),
        (["--devise", "cpu", "t.py"], "--devise"),
        (["--device", "tpu", "t.py"], "--device"),
        (["--device"], "--device"),
        (["--nproc-per-node", "4", "t.py"], "unknown flag --nproc-per-node: mpirun"),
        (["--nproc_per_node=4", "t.py"], "mpirun -np N python -m mpitrain run"),
        (["--standalone", "t.py"], "unknown flag --standalone: mpirun"),
        (["--rdzv-backend", "c10d", "t.py"], "unknown flag --rdzv-backend: mpirun"),
        (["-u", "t.py"], "unexpected '-u'.* before -m mpitrain"),
        (["-c", "print()"], "unexpected '-c'.* a script"),
        (["--hang-timeout", "9", "--no-python", "sh"], "--hang-timeout counts"),
    ],
)
def test_what_cannot_be_used_is_refused(words: list, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_words(words)


def test_help_shows_the_three_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpShown):
        read_words(["--help"])
    said = capsys.readouterr().out
    for form in ("run [FLAGS] SCRIPT.py", "-m PACKAGE.MODULE", "--no-python PROGRAM"):
        assert form in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"for x in", "line 1"),
        (b"\x7fELF\x00\x00", "is no Python"),
        (b"\xff\xfe", "is no Python"),
    ],
)
def test_a_script_that_python_cannot_read_is_refused(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "t.py"
    if content is not None:
        script.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_script(str(script))


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Is a directory.*\n.*SCRIPT\.py"):
        read_script(str(tmp_path))


def test_a_script_is_read_under_its_own_path() -> None:
    main, code = read_script(__file__)
    assert main.__file__ == __file__
    assert main.__spec__ is None
    assert code.co_filename == __file__


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "pack_to_run"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "tool.py").write_text("x = 1\n")
    (folder / "wrong.py").write_text("x = = 1\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "__init__.py").touch()
    (folder / "sub" / "__main__.py").write_text("x = 2\n")
    (folder / "needs").mkdir()
    (folder / "needs" / "__init__.py").write_text("import not_there_at_all\n")
    (folder / "needs" / "tool.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "spec", "parent"),
    [
        ("pack_to_run.tool", "pack_to_run.tool", "pack_to_run"),
        ("pack_to_run.sub", "pack_to_run.sub.__main__", "pack_to_run.sub"),
    ],
)
def test_a_module_is_found_as_python_m_does(
    package: str, name: str, spec: str, parent: str
) -> None:
    main, _ = find_module(name)
    assert main.__name__ == "__main__"
    assert main.__spec__ is not None
    assert main.__spec__.name == spec
    assert main.__package__ == parent
    assert str(main.__file__).startswith(package)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pack_to_run", "no such module"),  # no __main__.py
        ("pack_to_run.nothing", "no such module"),
        ("nothing_at_all.tool", "no such module"),
        ("pack_to_run/tool.py", "no such module"),
        ("math", "no such module"),  # compiled
        ("pack_to_run.wrong", "line 1"),
    ],
)
def test_a_module_that_cannot_run_is_refused(
    package: str, name: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        find_module(name)


def test_a_module_whose_package_lacks_another_is_not_blamed(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find_module("pack_to_run.needs.tool")


def test_a_program_is_found_as_a_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    assert find_program("sh") == "/bin/sh"
    plain = tmp_path / "plain.txt"
    plain.touch()
    with pytest.raises(UsageError, match="chmod"):
        find_program(str(plain))
    with pytest.raises(UsageError, match="--no-python nothing: expected a program"):
        find_program("nothing")


@pytest.mark.parametrize(
    ("status", "exit_status", "words"),
    [
        (3, 3, "x ended with status 3"),
        (-9, 137, "x was killed by SIGKILL"),
        (-63, 191, "x was killed by signal 63"),
    ],
)
def test_the_end_of_a_program_is_worded(
    status: int, exit_status: int, words: str
) -> None:
    error = failure("x", status)
    assert (error.exit_status, str(error)) == (exit_status, words)


NODES = (Node(hostname="a", ranks=(0, 1)), Node(hostname="b", ranks=(2, 3)))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", "1"),
        ("cuda:1", "1"),
        ("cuda:0", "0"),  # shared, or the only one that the rank sees
    ],
)
def test_local_rank_is_what_a_script_hands_to_set_device(
    device: str, expected: str
) -> None:
    world = World(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        nodes=NODES,
        device=device,
    )
    found = script_variables(world, "x", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert found["LOCAL_RANK"] == expected
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("1", "2")
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("3", "4")
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"

"""The parts of `stage` without MPI: index, copies, paths, the command line."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import zlib
from multiprocessing import spawn
from pathlib import Path
from typing import IO

import pytest

from mpitrain.errors import UsageError
from mpitrain.stage import copies
from mpitrain.stage.copies import NodeCopy
from mpitrain.stage.environment import Relocation, activate, roots_of
from mpitrain.stage.stage import StageConfig, _folder, read_command, read_words
from mpitrain.stage.stream import MIN_PIECE_BYTES, Entry, Index, Source, walk


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """A folder as a virtual environment is, with odd files."""
    root = tmp_path / "env"
    packages = root / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin/tool").write_text(f"#!{root}/bin/python\nimport sys\n")
    (root / "bin/tool").chmod(0o755)
    long = f"#!/bin/sh\n'''exec' \"{root}/bin/python\" \"$0\"\n' '''\n{root}\n"
    (root / "bin/long").write_text(long)
    (root / "bin/long").chmod(0o755)
    (root / "bin/huge").write_text(f"#!{root}/bin/python\n" + "#\n" * 50_000)
    (root / "bin/data").write_bytes(b"#!\xff\xfe" + os.fsencode(root))
    (root / "bin/python").symlink_to(sys.executable)
    (root / "bin/here").symlink_to(root / "bin/tool")
    (root / "bin/python3").symlink_to("python")
    (root / "out").symlink_to("../else")
    (root / "lib64").symlink_to("lib")
    (root / "pyvenv.cfg").write_text(f"home = {root}/bin\nversion = 3\n")
    (packages / "a.pth").write_text(f"{packages}/inner\nimport os # {root}\n/usr/x\n")
    (packages / "model.py").write_text(f"HERE = '{root}'\n")
    (packages / "empty").touch()
    (packages / "ünï \n name\udcff").write_bytes(b"odd")
    (packages / "/".join(["f" * 200] * 12)).mkdir(parents=True)
    (packages / "/".join(["f" * 200] * 12) / "deep").write_bytes(b"deep")
    (packages / "large").write_bytes(os.urandom(3 * MIN_PIECE_BYTES + 17))
    (packages / "secret").write_bytes(b"x")
    (packages / "secret").chmod(0o400)
    os.link(packages / "secret", packages / "hard")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "s"))
    for number, path in enumerate(sorted(packages.iterdir())):
        os.utime(path, ns=(1, 1_600_000_000_123_456_789 + number))
    return root


def copied(root: Path, to: Path) -> tuple[NodeCopy, Source, Path]:
    """Stage in this process, without MPI."""
    return carried(walked_index(root), to)


def walked_index(root: Path) -> Index:
    roots = roots_of([str(root)])
    return Index(roots, walk(roots.values(), lambda: None))


def carried(
    index: Index, to: Path, damage: int | None = None, *, rewrites: bool = True
) -> tuple[NodeCopy, Source, Path]:
    """Read, write and copy the stream; change a byte of piece `damage` on the way.

    Returns the path of the copy of the first root, too.
    """
    to.mkdir(exist_ok=True)
    copy = NodeCopy(index, str(to), "", rewrites=rewrites)
    source, crc = Source(index), 0
    if copy.prepare():
        for number, size in enumerate(index.sizes):
            piece = bytearray(size)
            source.read(number, piece)
            crc = zlib.crc32(piece, crc)
            if number == damage:
                piece[-1] ^= 1
            copy.write(number, piece)
        copy.finish(source.error, crc)
    root = next(iter(index.roots))
    return copy, source, Path(copy.paths.get(root, root))


def test_a_copy_has_all_that_the_folder_has(env: Path, tmp_path: Path) -> None:
    copy, _, there = copied(env, tmp_path / "to")
    assert copy.error == ""
    rewritten = {"pyvenv.cfg", "a.pth", "tool", "long", "huge"}
    names = {os.path.relpath(p, env) for p in walked(env)} - {"pipe", "s"}
    assert names == {os.path.relpath(p, there) for p in walked(there)}
    for name in names:
        old, new = os.lstat(env / name), os.lstat(there / name)
        assert stat.S_IFMT(old.st_mode) == stat.S_IFMT(new.st_mode), name
        if stat.S_ISREG(old.st_mode):
            assert stat.S_IMODE(old.st_mode) == stat.S_IMODE(new.st_mode), name
            assert old.st_mtime_ns == new.st_mtime_ns, name
            assert new.st_nlink == 1, name
            same = (env / name).read_bytes() == (there / name).read_bytes()
            assert same == (Path(name).name not in rewritten), name


def walked(root: Path) -> list[str]:
    return [
        f"{folder}/{name}"
        for folder, folders, files in os.walk(root)
        for name in [*folders, *files]
    ]


def test_what_names_its_own_folder_is_rewritten(env: Path, tmp_path: Path) -> None:
    _, _, there = copied(env, tmp_path / "to")
    packages = there / "lib/python3.11/site-packages"
    assert (there / "pyvenv.cfg").read_text() == f"home = {there}/bin\nversion = 3\n"
    assert (there / "bin/tool").read_text().startswith(f"#!{there}/bin/python\n")
    assert f'"{there}/bin/python"' in (there / "bin/long").read_text()
    assert (there / "bin/long").read_text().endswith(f"\n{env}\n")
    assert (packages / "a.pth").read_text() == (
        f"{packages}/inner\nimport os # {there}\n/usr/x\n"
    )
    links = {name: str((there / name).readlink()) for name in ("lib64", "out")}
    assert links == {"lib64": "lib", "out": str(env.parent / "else")}
    assert str((there / "bin/here").readlink()) == f"{there}/bin/tool"
    assert str((there / "bin/python3").readlink()) == "python"
    assert str((there / "bin/python").readlink()) == sys.executable


def test_a_root_may_be_a_file_or_a_link(env: Path, tmp_path: Path) -> None:
    for name, target in (("link", "env/pyvenv.cfg"), ("folder", "env")):
        (tmp_path / name).symlink_to(target)
        copy, _, _ = copied(tmp_path / name, tmp_path / "to")
        assert copy.error == ""
        there = Path(copy.paths[str(tmp_path / name)])
        assert there.is_relative_to(tmp_path / "to")
        cfg = there if name == "link" else there / "pyvenv.cfg"
        above = Path(copy.folder + str(env))
        home = env if name == "link" else above
        assert cfg.read_text() == f"home = {home}/bin\nversion = 3\n"
    tool = (there / "bin/tool").read_text()
    assert tool == f"#!{above}/bin/python\nimport sys\n"


def test_a_root_may_be_below_one_that_is_a_link(env: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("env")
    inner = tmp_path / "link/lib/python3.11/site-packages"
    roots = roots_of([str(tmp_path / "link"), str(inner)])
    index = Index(roots, walk(roots.values(), lambda: None))
    copy, _, there = carried(index, tmp_path / "to")
    assert copy.error == ""
    moved = Path(Relocation(copy.paths)(str(inner)))
    assert moved.is_relative_to(there)
    assert (moved / "model.py").resolve().is_relative_to(tmp_path / "to")


def test_a_root_behind_a_link_is_walked_once(env: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("env")
    found = []
    for root in (env, tmp_path / "link"):
        paths = [it.path for it in walk(roots_of([str(root)]).values(), lambda: None)]
        found.append(sorted(paths))
        assert len({*paths}) == len(paths)
    assert found[0] == found[1]


def test_a_node_that_has_the_copy_writes_nothing(env: Path, tmp_path: Path) -> None:
    """Rank zero reads the stream for others, and has it."""
    copied(env, tmp_path / "to")
    index = walked_index(env)
    copy = NodeCopy(index, str(tmp_path / "to"), "", rewrites=True)
    source = Source(index)
    assert not copy.prepare()
    for number, size in enumerate(index.sizes):
        piece = bytearray(size)
        source.read(number, piece)
        copy.write(number, piece)
    copy.finish("", copy.crc)
    assert (copy.error, copy.had_it) == ("", True)
    assert walked_index(env).entries == index.entries


def test_a_complete_copy_is_taken_again_and_a_damaged_one_is_not(
    env: Path, tmp_path: Path
) -> None:
    """In processes of their own: this one holds what it has used."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:2]; from pathlib import Path; "
        "import test_stage as t; "
        "copy, source, there = t.copied(Path(sys.argv[2]), Path(sys.argv[3])); "
        "print(copy.error, copy.folder, not copy.had_it)"
    )

    def stage() -> list[str]:
        words = [sys.executable, "-c", code, str(Path(__file__).parent)]
        words += [str(env), str(tmp_path / "to")]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return done.stdout.split()

    path, was_written = stage()
    assert was_written == "True"
    assert stage() == [path, "False"]
    Path(path, ".lock").unlink()
    assert stage() == [path, "False"]
    model = Path(f"{path}{env}/lib/python3.11/site-packages/model.py")
    model.unlink()
    assert stage() == [path, "True"]
    model.write_text("")
    assert stage() == [path, "True"]
    Path(path, ".boot").write_text("of another start of the node")
    assert stage() == [path, "True"]
    # A changed source is another copy, and the old one is removed.
    (env / "lib/python3.11/site-packages/model.py").touch()
    changed, was_written = stage()
    assert (changed != path, was_written) == (True, "True")
    assert [str(it) for it in Path(changed).parent.glob("*/")] == [changed]


def test_the_copy_has_one_path_on_all_nodes(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank zero reads the flags of a training for all."""
    paths = []
    for boot in ("of one node", "of another"):
        monkeypatch.setattr(copies, "boot_id", lambda boot=boot: boot)
        _, _, there = copied(env, tmp_path / "to")
        paths.append(str(there))
        (tmp_path / "to").rename(tmp_path / boot)  # each node has a folder of its own
    assert paths[0] == paths[1] != str(env)


def test_the_index_tells_every_change(env: Path) -> None:
    model = env / "lib/python3.11/site-packages/model.py"
    found = [walked_index(env).entries]
    assert walked_index(env).entries == found[0]
    for change in (
        lambda: model.write_text("longer than before"),
        lambda: os.utime(model, ns=(1, 1)),
        lambda: model.chmod(0o600),
        model.unlink,
        lambda: model.symlink_to("empty"),
        lambda: model.with_name("new").touch(),
    ):
        change()
        found.append(walked_index(env).entries)
    assert len({*map(tuple, found)}) == len(found)


def test_folders_of_other_environments_and_copies_are_left_out(env: Path) -> None:
    for name in ("conda-meta", "pkgs", "envs"):
        (env / name).mkdir()
        (env / name / "file").touch()
    (env / f"tmp/mpitrain-stage-{os.getuid()}/0").mkdir(parents=True)
    inner = env / "lib/python3.11/site-packages"
    roots = roots_of([str(env), str(inner)])
    index = Index(roots, walk(roots.values(), lambda: None))
    paths = {os.path.relpath(it.path, env) for it in index.entries}
    assert {"conda-meta/file", "lib/python3.11/site-packages/model.py"} <= paths
    assert not [
        it for it in paths if "mpitrain-stage" in it or it[:4] in ("pkgs", "envs")
    ]
    assert len(paths) == len(index.entries)
    copy, _, there = carried(index, env.parent / "to")
    assert copy.error == ""
    assert (there / "lib/python3.11/site-packages/model.py").exists()


# --- failures -------------------------------------------------------------------------


def test_a_file_that_changes_meanwhile_is_an_error(env: Path, tmp_path: Path) -> None:
    index = walked_index(env)
    name = env / "lib/python3.11/site-packages/large"
    name.write_bytes(b"short")
    copy, source, _ = carried(index, tmp_path / "to")
    assert copy.error == source.error == f"{name}: it has just been changed"
    assert [it.name for it in Path(copy._above).iterdir()] == [".lock"]


def test_what_is_gone_while_it_is_listed_is_left_out(
    env: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python renames a .pyc file that it writes; others remove folders."""
    (env / "lib/gone").mkdir()
    (env / "lib/gone/file").touch()
    (env / "lib/x.pyc.123").touch()

    def listdir(folder: str) -> list[str]:
        if folder.endswith("/gone"):
            (env / "lib/gone/file").unlink()
            (env / "lib/gone").rmdir()
        names = real(folder)
        if folder.endswith("/lib"):
            (env / "lib/x.pyc.123").rename(env / "lib/x.pyc")
        return names

    real = os.listdir
    monkeypatch.setattr(os, "listdir", listdir)
    paths = {it.path.removeprefix(f"{env}/lib/") for it in walked_index(env).entries}
    assert "python3.11" in paths
    assert not paths & {"x.pyc.123", "x.pyc", "gone/file"}
    with pytest.raises(FileNotFoundError, match="no root"):
        walk([str(env / "no root")], lambda: None)


def test_an_error_of_any_kind_is_one_of_the_copy(tmp_path: Path) -> None:
    folder = Entry("/no name of a folder\0", stat.S_IFDIR | 0o700)
    copy, _, _ = carried(Index({"/": "/"}, [folder]), tmp_path / "to")
    assert "null byte" in copy.error
    assert not list((tmp_path / "to").glob("mpitrain-stage-*/*/"))


def test_an_error_of_any_kind_is_one_of_the_stream() -> None:
    entry = Entry("/no name of a file\0", stat.S_IFREG | 0o600, size=3)
    source = Source(Index({"/": "/"}, [entry]))
    source.read(0, bytearray(3))
    assert "null byte" in source.error


@pytest.mark.parametrize("piece", [0, -1])
def test_wrong_bytes_are_noticed(env: Path, tmp_path: Path, piece: int) -> None:
    index = walked_index(env)
    copy, _, _ = carried(index, tmp_path / "to", damage=piece % len(index.sizes))
    assert copy.error == "received wrong bytes (CRC32)"
    assert [it.name for it in Path(copy._above).iterdir()] == [".lock"]


def test_data_are_copied_as_they_are(env: Path, tmp_path: Path) -> None:
    _, _, there = carried(walked_index(env), tmp_path / "to", rewrites=False)
    for name in ("pyvenv.cfg", "bin/tool", "lib/python3.11/site-packages/a.pth"):
        assert (there / name).read_bytes() == (env / name).read_bytes()


def test_a_file_of_data_that_was_cut_is_noticed(env: Path, tmp_path: Path) -> None:
    """In data no file is rewritten, so that each has its size."""
    for rewrites, error in ((True, ""), (False, "the copy has lost files")):
        to = tmp_path / f"to-{rewrites}"
        _, _, there = carried(walked_index(env), to, rewrites=rewrites)
        (there / "bin/tool").write_text("")
        copy, _, _ = carried(walked_index(env), to, rewrites=rewrites)
        assert copy.error.startswith(error)
        assert copy.had_it == rewrites


def test_a_copy_that_has_lost_files_and_is_in_use_is_left_alone(
    env: Path, tmp_path: Path
) -> None:
    _, _, there = copied(env, tmp_path / "to")  # this process holds it
    (there / "pyvenv.cfg").unlink()
    again, _, _ = copied(env, tmp_path / "to")
    reason = "the copy has lost files, and another job uses it"
    assert again.error.startswith(f"{reason}; wait for its end, or give --to another")
    copies = (tmp_path / "to").glob("*/*/")
    assert [f"{it}{env}" for it in copies] == [str(there)]


def test_a_copy_whose_lock_cannot_be_made_is_an_error_and_no_crash(
    env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(path: str, how: int, seconds: float = 0.0) -> IO[str]:
        if ".partial-" in path:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(path, how, seconds)

    real = copies._lock
    monkeypatch.setattr(copies, "_lock", lock)
    copy, _, _ = copied(env, tmp_path / "to")
    assert copy.error.endswith(": Disk quota exceeded")
    assert not list((tmp_path / "to").glob("mpitrain-stage-*/*/"))


def test_a_folder_of_others_is_not_used(env: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"to/mpitrain-stage-{os.getuid()}"
    folder.mkdir(parents=True, mode=0o755)
    copy, _, _ = copied(env, tmp_path / "to")
    assert copy.error == f"{folder} is not a folder of this user alone"
    folder.rmdir()
    folder.symlink_to(tmp_path)
    copy, _, _ = copied(env, tmp_path / "to")
    assert copy.error == f"{folder} is not a folder of this user alone"


def test_a_copy_outlives_the_folder_that_pbs_removes_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job = tmp_path / "pbs.7.head"
    of_job.mkdir()
    monkeypatch.setenv("TMPDIR", str(of_job))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    assert _folder(None) == str(of_job)  # another's variable
    monkeypatch.setenv("PBS_JOBID", "7.head")
    assert _folder(None) == str(tmp_path)
    tmp_path.chmod(0o500)
    try:
        of_user = str(tmp_path if os.access(tmp_path, os.W_OK) else of_job)  # root may
        assert _folder(None) == of_user
    finally:
        tmp_path.chmod(0o700)


# --- paths ----------------------------------------------------------------------------


def test_variables_and_imports_lead_to_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, name, "/opt/env")
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    monkeypatch.setattr(sys, "_base_executable", "/usr/bin/python")
    monkeypatch.setattr(sys, "path", ["/opt/env/lib", "/opt/environment", ""])
    monkeypatch.setattr(spawn, "_python_exe", spawn.get_executable())  # put back
    environ = {
        "PATH": "/opt/env/bin:/usr/bin:/opt/environment/bin",
        "VIRTUAL_ENV": "/opt/env",
        "PWD": "/opt/env",
        "HF_HOME": "/data/hf/",
        "RUNS": "/data/hf/runs",
        "WORD": "x/opt/env",
    }
    data = {"/data": "/no", "/data/hf": "/tmp/d/data/hf"}
    activate(Relocation({"/opt/env": "/tmp/c/opt/env"}, data), environ)
    assert environ == {
        "PATH": "/tmp/c/opt/env/bin:/usr/bin:/opt/environment/bin",
        "VIRTUAL_ENV": "/tmp/c/opt/env",
        "PWD": "/opt/env",
        "HF_HOME": "/tmp/d/data/hf",
        "RUNS": "/data/hf/runs",
        "WORD": "x/opt/env",
    }
    assert sys.path == ["/tmp/c/opt/env/lib", "/opt/environment", ""]
    assert (sys.prefix, sys._base_executable) == ("/tmp/c/opt/env", "/usr/bin/python")
    assert spawn.get_executable() == b"/tmp/c/opt/env/bin/python"


# --- the command line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sh", "train.sh"], "found 'sh train.sh' after --"),
        ([], "found '' after --"),
        (["python"], "found 'python' after --"),
        (["python", "-m"], "found 'python -m' after --"),
        (["python", "-c", "1"], "found 'python -c 1' after --"),
        (["python", "-X", "dev", "x.py"], "found 'python -X dev x.py' after --"),
        (["python", "--no-python", "x"], "found 'python --no-python x' after --"),
        (["python", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["/other/bin/python", "x.py"], "found '/other/bin/python x.py' after --"),
    ],
)
def test_a_command_that_cannot_run_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_command(words)
    assert expected in str(raised.value)


def test_flags_and_command_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    flags = ["--to", "$TMPDIR", "--data", script, "--data", str(tmp_path)]
    found = read_words(flags, [sys.executable, "-u", script, "--lr", "1"])
    target = read_command(["python", script, "--lr", "1"])
    config = StageConfig(to="$TMPDIR", data=(script, str(tmp_path)))
    assert found == (config, target)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"as the command names it: \./train"):
        read_words(["--data", "train.py"], ["python", script])
    with pytest.raises(UsageError, match="--data nowhere: expected a file"):
        read_words(["--data", "nowhere"], ["python", script])


def test_data_with_the_current_folder_in_it_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = ["python", "-m", "mpitrain"]
    for path in ("./", "../here", str(tmp_path)):
        with pytest.raises(UsageError, match="what the command writes is in it"):
            read_words(["--data", path], command)

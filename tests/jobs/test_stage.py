"""`stage` under mpirun: what the command sees, and what becomes of copies."""

from __future__ import annotations

import fcntl
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from environments import variables
from launcher import Done, Mpi, send_signal, under_each_mpi
from stage_environment import SHOW, command, make_environment
from test_disks import mount, small_disk, umount


@pytest.fixture
def env(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "to").mkdir()
    return make_environment(tmp_path / "env")


def run(mpi: Mpi, env: Path, *words: str, num_ranks: int = 2, **more: str) -> Done:
    """Run ``stage`` in the folder above `env`, with copies in `to` there."""
    flags = [] if "--to" in words else ["--to", str(env.parent / "to")]
    done = subprocess.run(
        ["timeout", "-k", "5", "120", *command(mpi, num_ranks, env, *flags, *words)],
        cwd=env.parent,
        env=variables(mpi, env, **more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    ended = time.time()
    return Done(status=done.returncode, out=done.stdout, err=done.stderr, ended=ended)


def shown(done: Done) -> list[dict[str, Any]]:
    """What each rank of SHOW has printed, by rank."""
    assert done.status == 0, done.out + done.err
    lines = [line for line in done.out.splitlines() if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda it: it["rank"])


def copies(env: Path) -> list[Path]:
    """All folders of copies, partial ones included."""
    return sorted((env.parent / "to").glob("mpitrain-stage-*/*/"))


@under_each_mpi
def test_a_script_runs_from_the_copy(mpi: Mpi, env: Path) -> None:
    done = run(mpi, env, "--", "python", "-u", "show.py", "--lr", "0.1")
    found = shown(done)
    (copy,) = copies(env)
    there = f"{copy}{env}"
    assert [it["rank"] for it in found] == [0, 1]
    for it in found:
        assert it["prefix"] == it["child"] == there
        assert str(it["module"]).startswith(f"{there}/lib/")
        assert f"{there}/bin" in it["path"]
        assert f"{env}/bin" not in it["path"]
        assert it["argv"] == ["show.py", "--lr", "0.1"]
        assert it["name"] == "__main__"
    tool = subprocess.run([f"{there}/bin/tool"], capture_output=True, text=True)
    assert tool.stdout.strip() == there
    assert done.err.count("staged: ") == 1


def test_the_commands_status_is_the_jobs(mpi: Mpi, env: Path) -> None:
    bodies = {
        0: "import sys; sys.exit(0)",
        3: "import sys; sys.exit(3)",
        1: "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise ValueError(7)\n"
        "MPI.COMM_WORLD.Barrier()",
    }
    for status, body in bodies.items():
        (env.parent / "ends.py").write_text(body)
        done = run(mpi, env, "--", "python", "ends.py")
        assert done.status == status, done.out + done.err
        if status == 1:
            assert len(done.ours) == 1, done.err
            assert "ValueError: 7" in done.ours[0]


def test_a_module_runs_from_the_copy(openmpi: Mpi, env: Path) -> None:
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "inner_package").mkdir()
    (packages / "inner_package/__main__.py").write_text(SHOW)
    done = run(openmpi, env, "--", "python", "-m", "inner_package", "-x")
    (copy,) = copies(env)
    for it in shown(done):
        assert it["argv"] == [f"{copy}{packages}/inner_package/__main__.py", "-x"]
        assert it["prefix"] == f"{copy}{env}"


def test_a_usage_error_is_one_error(openmpi: Mpi, env: Path) -> None:
    done = run(openmpi, env, "--", "python", "none.py")
    assert done.status == 2
    assert done.err.count("there is no script 'none.py'") == 1
    assert copies(env) == []


def test_mpitrain_itself_runs_from_the_copy(openmpi: Mpi, env: Path) -> None:
    words = ("--device", "cpu", "--dry-run")
    done = run(openmpi, env, "--", "python", "-m", "mpitrain", *words)
    assert done.status == 0, done.out + done.err
    assert done.out.count("finished: ") == 1


def test_without_mpirun_it_works_too(openmpi: Mpi, env: Path) -> None:
    words = command(openmpi, 1, env, "--to", f"{env.parent}/to", "--", "python")
    at = words.index("-m") - 1
    done = subprocess.run(
        [*words[at:], "show.py"],
        cwd=env.parent,
        env=variables(openmpi, env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prefix"] == f"{copies(env)[0]}{env}"


def test_a_copy_that_is_in_use_is_not_removed(openmpi: Mpi, env: Path) -> None:
    shown(run(openmpi, env, "--", "python", "show.py"))
    (first,) = copies(env)
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "small_module.py").write_text("NUMBER = 22\n")
    with (first / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        shown(run(openmpi, env, "--", "python", "show.py"))
        assert len(copies(env)) == 2
    shown(run(openmpi, env, "--", "python", "show.py"))
    assert len(copies(env)) == 1
    assert not first.exists()


def test_data_and_caches_are_staged_and_named_in_the_command(
    openmpi: Mpi, env: Path
) -> None:
    (env.parent / "data/birds").mkdir(parents=True)
    (env.parent / "data/birds/one").write_text("1")
    (env.parent / "cache").mkdir()
    (env.parent / "cache/kernel").write_text("k")
    (env.parent / "reads.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "print(*sys.argv[1:], os.environ['TRITON_CACHE_DIR'],\n"
        "      (Path(sys.argv[1]) / 'birds/one').read_text())\n"
        "Path(os.environ['TRITON_CACHE_DIR'], 'new').touch()\n"
    )
    words = ("--data", "./data", "--", "python", "reads.py")
    paths = ("./data", "--data-dir=data/", f"data.root={env.parent}/data")
    arguments = (*paths, "data", "data2", "./data2")
    cache = {"TRITON_CACHE_DIR": str(env.parent / "cache")}
    done = run(openmpi, env, *words, *arguments, **cache)
    assert done.status == 0, done.err
    (other,) = [it for it in copies(env) if not Path(f"{it}{env}").exists()]
    there = f"{other}{env.parent}"
    expected = (
        f"{there}/data --data-dir={there}/data data.root={there}/data "
        f"data data2 ./data2 {there}/cache 1"
    )
    assert done.out.splitlines() == [expected, expected]
    assert Path(there, "cache/new").exists()
    assert [it.name for it in (env.parent / "cache").iterdir()] == ["kernel"]


def test_what_the_command_writes_below_data_stays(openmpi: Mpi, env: Path) -> None:
    """A copy, and what is written into it, goes with the node."""
    (env.parent / "shared/runs").mkdir(parents=True)
    (env.parent / "shared/runs/old").touch()
    (env.parent / "writes.py").write_text(
        "import os, sys\nfrom pathlib import Path\nfrom mpi4py import MPI\n"
        "flag, _, folder = sys.argv[1].partition('=')\n"
        "for folder in (folder, sys.argv[2], os.environ['OUT']):\n"
        "    Path(folder, f'{MPI.COMM_WORLD.rank}').touch()\n"
    )
    flags = ("--data", "./shared", "--", "python", "writes.py")
    words = ("--runs-dir=./shared/runs", f"{env.parent}/shared/runs")
    done = run(openmpi, env, *flags, *words, OUT=f"{env.parent}/shared/runs")
    assert done.status == 0, done.err
    written = {it.name for it in (env.parent / "shared/runs").iterdir()}
    assert written == {"old", "0", "1"}
    for word in words:
        warning = f"{word} is below --data: the command uses the original, no copy"
        assert done.err.count(warning) == 1


def test_ranks_may_have_words_of_their_own(openmpi: Mpi, env: Path) -> None:
    words = ("--to", f"{env.parent}/to", "--", "python", "show.py")
    other = (":", *command(openmpi, 1, env, *words, "one")[1:])
    found = shown(run(openmpi, env, "--", "python", "show.py", "zero", *other))
    assert [it["argv"][1:] for it in found] == [["zero"], ["zero"], ["one"]]


# --- failures -------------------------------------------------------------------------


def test_a_job_that_is_killed_leaves_nothing_that_is_used(
    openmpi: Mpi, env: Path
) -> None:
    with (env / "large").open("wb") as file:
        file.truncate(800 << 20)
    words = command(
        openmpi, 2, env, "--to", f"{env.parent}/to", "--", "python", "show.py"
    )
    job = subprocess.Popen(
        words,
        cwd=env.parent,
        env=variables(openmpi, env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not copies(env):
        assert time.monotonic() < end
        time.sleep(0.002)
    pids = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{env}/bin/python".encode() in read(path)
    ]
    send_signal([job.pid, *pids])
    job.communicate()
    (partial,) = copies(env)
    assert ".partial-" in partial.name
    (env / "large").unlink()
    found = shown(run(openmpi, env, "--", "python", "show.py"))
    (copy,) = copies(env)
    assert ".partial-" not in copy.name
    assert found[0]["prefix"] == f"{copy}{env}"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_rank_that_cannot_use_the_copy_is_a_warning(openmpi: Mpi, env: Path) -> None:
    """All ranks use the originals then: theirs would be another Python."""
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "fault.pth").write_text("import fault\n")
    (packages / "fault.py").write_text(
        "import os\n"
        "def dup(descriptor):\n"
        "    raise OSError(24, 'Too many open files')\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "    os.dup = dup\n"
    )
    done = run(openmpi, env, "--", "python", "show.py")
    assert [it["prefix"] for it in shown(done)] == [str(env)] * 2
    assert done.err.count("Too many open files") == 1, done.err
    assert "the original files are read on all nodes: " in done.err


def test_a_full_disk_is_a_warning(openmpi: Mpi, env: Path) -> None:
    """No room at all, and none for the last files."""
    for flags in ("1m", "64m,nr_inodes=60"):
        folder = env.parent / "disk"
        with small_disk(folder, flags):
            done = run(openmpi, env, "--to", str(folder), "--", "python", "show.py")
            assert shown(done)[1]["prefix"] == str(env)
            assert done.err.count("No space left on device") == 1, done.err
            assert "the original files are read on " in done.err
            assert not list(folder.glob("mpitrain-stage-*/*/"))
        folder.rmdir()


def test_a_disk_that_tells_no_size_is_not_full(openmpi: Mpi, env: Path) -> None:
    folder = env.parent / "disk"
    folder.mkdir()
    mount("-t", "ramfs", "ramfs", str(folder))
    try:
        done = run(openmpi, env, "--to", str(folder), "--", "python", "show.py")
    finally:
        umount(folder)
    assert shown(done)[0]["prefix"].startswith(f"{folder}/"), done.err


def test_a_folder_that_cannot_be_written_is_a_warning(openmpi: Mpi, env: Path) -> None:
    done = run(openmpi, env, "--to", "/proc", "--", "python", "show.py")
    assert shown(done)[0]["prefix"] == str(env)
    assert "the original files are read on " in done.err


def test_two_jobs_at_once_share_one_copy(openmpi: Mpi, env: Path) -> None:
    words = command(
        openmpi, 2, env, "--to", f"{env.parent}/to", "--", "python", "show.py"
    )
    jobs = [
        subprocess.Popen(
            words,
            cwd=env.parent,
            env=variables(openmpi, env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    (copy,) = copies(env)
    for out, _ in said:
        prefixes = {json.loads(it)["prefix"] for it in out.splitlines()}
        assert prefixes == {f"{copy}{env}"}

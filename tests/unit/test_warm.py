"""What a warm rank must have equal, and what is told where it cannot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.warm import protocol, proxy
from mpitrain.warm.process_state import READ_AT_IMPORT, tracers

ROOT = Path(__file__).parents[2]

RECORDS = """
import importlib, os, sys

kind, read = type(os.environ), set()
get = kind.__getitem__

def record(self, name):
    read.add(name)
    return get(self, name)

kind.__getitem__ = record
from mpitrain.warm.fork_server import MODULES, MORE_MODULES, import_torch

import_torch()
for name in (*MODULES, *MORE_MODULES):
    importlib.import_module(name)
print(*read)
"""

MAY_DIFFER = {
    "PATH": "programs are looked for at each call",
    "PSUTIL_DEBUG": "messages of psutil alone",
    "SAGE_ROOT": "mpmath within Sage, which is another Python",
    "TEMP TMP TMPDIR": "`tempfile` forgets it in the fork; caches of kernels",
    "LNAME LOGNAME USER USERNAME": "name those caches; the user id is equal",
    "MPITRAIN_STATUS_FILE": "is read at each call",
}


def test_every_variable_that_is_read_at_import_must_be_equal() -> None:
    few = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RECORDS], env=few, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    read = {name for name in done.stdout.split() if not name.startswith("_")}
    assert len(read) > 300
    may_differ = {name for names in MAY_DIFFER for name in names.split()}
    assert {it for it in read if not READ_AT_IMPORT.match(it)} <= may_differ
    assert not READ_AT_IMPORT.match("TORCHELASTIC_RUN_ID")  # another for each start


def in_python(code: str, *words: str, **options: object) -> str:
    done = subprocess.run(
        [*(words or (sys.executable,)), "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SHOWS = (
    "import sys; from mpitrain.warm.process_state import identity; found = identity(); "
    "print(found.get({!r}), file=sys.stderr or sys.stdout)"
)


def test_python_is_the_same_by_any_of_its_names(tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    names = [it for it in ("python", "python3") if (folder / it).exists()]
    assert len(names) == 2
    shown = {in_python(SHOWS.format("Python"), str(folder / name)) for name in names}
    assert len(shown) == 1


def test_closed_streams_and_the_job_are_part_of_what_must_be_equal() -> None:
    show = SHOWS.format("closed streams")
    for redirection, expected in (("", "[]"), (">&-", "[1]"), ("<&- 2>&-", "[0, 2]")):
        shell = ("bash", "-c", f'exec "$0" "$@" {redirection}', sys.executable)
        assert in_python(show, *shell).strip() == expected
    shell = ("env", "SLURM_JOB_ID=17", sys.executable)
    assert in_python(SHOWS.format("job of the scheduler"), *shell).strip() == "17"


def test_a_profiler_is_seen() -> None:
    was = tracers()
    sys.setprofile(lambda *_: None)
    found = tracers()
    sys.setprofile(None)
    assert found != was
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:  # Python 3.12 and later
        monitoring.use_tool_id(monitoring.PROFILER_ID, "cProfile")
        found = tracers()
        monitoring.free_tool_id(monitoring.PROFILER_ID)
        assert "cProfile" in found


def test_an_empty_variable_is_none() -> None:
    named = protocol.socket_path({protocol.SOCKET: ""})
    assert named == protocol.socket_path({})


TAKES = """
import dataclasses, socket
from mpitrain.warm.process_state import ProcessState

state = ProcessState.of_this_process()
try:
    dataclasses.replace(state, CHANGE).take([], socket.socketpair()[0])
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cores=[8000]", "cannot set the cores to [8000]"),
        ("folder='/nowhere'", "cannot set the current folder to /nowhere"),
        ("oom_score='5000'", "cannot set oom_score_adj to 5000"),
        (
            "limits={'RLIMIT_NOFILE': (2, 1)}",
            "cannot set RLIMIT_NOFILE (ulimit) to 2 and 1",
        ),
    ],
)
def test_what_cannot_be_handed_on_has_a_name(change: str, words: str) -> None:
    text = in_python(TAKES.replace("CHANGE", change))
    assert words in text
    assert "Errno 0" not in text
    assert "start it where the ranks start" in text


def test_the_socket_of_a_killed_server_is_no_server(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert proxy._connect(path) is None
    assert not [*tmp_path.iterdir()]
    path.write_text("of a user, who has given a wrong name")
    with pytest.raises(OSError, match="is no socket"):
        proxy._connect(path)
    assert [*tmp_path.iterdir()] == [path]
    lock = protocol.try_lock(path)
    assert lock is not None
    lock.close()
    assert path.exists()


def test_without_a_folder_there_is_one_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpitrain"]
    for words in (["check"], ["--help"], ["run", "x.py"], ["serve"]):
        (folder := tmp_path / "gone").mkdir()
        shell = ["bash", "-c", 'rmdir "$PWD"; exec "$@"', "bash", *command, *words]
        done = subprocess.run(
            shell,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "the current folder cannot be used: No such file" in done.stderr

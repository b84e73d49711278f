"""Trainings that are logged: each logger read back, and none of them in the way."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import logger_files
import pytest
from launcher import ROOT, Mpi, slow
from logger_files import Points, as_floats
from resume_jobs import NUM_STEPS, Runs
from test_disks import fill, small_disk

pytestmark = pytest.mark.usefixtures("warm_starts")

ALL = ("--log", "csv", "tensorboard", "wandb", "--log-every-steps", "1")
KEY = "0123456789abcdef" * 2 + "01234567"
TEXTFILE = "examples.custom_logger:Textfile"
SAVING = ("--checkpoint-every-steps", "2")
OFFLINE = {"WANDB_MODE": "offline"}


@pytest.fixture
def runs(openmpi: Mpi, tmp_path: Path) -> Runs:
    # No key of whoever runs this test; and no server, unless a test has one.
    alone = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    return Runs(mpi=openmpi, folder=tmp_path, variables=alone)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of wandb's outlives a training by more than its last words."""
    yield
    end = time.monotonic() + 15
    while found := wandb_processes():
        assert time.monotonic() < end, found
        time.sleep(0.2)


def wandb_processes() -> list[str]:
    found = subprocess.run(
        ["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
    )
    words = ("wandb-core", "mpitrain.record.loggers.process")
    return [line for line in found.stdout.splitlines() if any(w in line for w in words)]


def chosen(points: Points, like: Points) -> Points:
    return {name: of for name, of in points.items() if name in like}


def test_what_loggers_have_is_what_the_record_has(runs: Runs) -> None:
    (runs.folder / "examples").symlink_to(ROOT / "examples")
    words = (*ALL[:4], TEXTFILE, *ALL[4:], "--wandb-all-ranks")
    done = runs.run("mine", 2, *words, **OFFLINE)
    assert done.status == 0, done.out + done.err
    assert "warning: " not in done.err
    folder = runs.dir("mine")
    record = logger_files.from_record(folder)
    assert len(record["train/loss"]) == NUM_STEPS
    assert chosen(logger_files.from_csv(folder), record) == record
    assert chosen(logger_files.from_tensorboard(folder), record) == as_floats(record)
    files = logger_files.wandb_files(folder)
    assert len(files) == 2
    run_id = json.loads((folder / "run.json").read_text())["id"]
    heads = []
    for file in files:
        assert chosen(logger_files.from_wandb(file), record) == record
        records = logger_files.wandb_records(file)
        runs_of = [it.run for it in records if it.WhichOneof("record_type") == "run"]
        heads.append((runs_of[0].run_id, runs_of[0].display_name))
        assert {it.run_group for it in runs_of} == {"mine"}
        exits = [it.exit for it in records if it.WhichOneof("record_type") == "exit"]
        assert [it.exit_code for it in exits] == [0]
    assert sorted(heads) == [
        (run_id, "mine-rank-0"),
        (f"{run_id}-rank-1", "mine-rank-1"),
    ]
    assert done.out.count("wandb: offline") == 1
    (image,) = logger_files.accumulator(folder).Images("train/images/0")
    assert image.step == 0
    config = (folder / "config.yaml").read_text()
    assert f"log:\n- csv\n- tensorboard\n- wandb\n- {TEXTFILE}\n" in config
    # A custom logger, in thirty lines.
    assert len((ROOT / "examples/custom_logger.py").read_text().splitlines()) <= 30
    lines = (folder / "metrics.prom").read_text().splitlines()
    assert f'val_loss{{run="mine"}} {record["val/loss"][-1][1]!r}' in lines


def test_without_log_nothing_of_it_is_there(runs: Runs) -> None:
    watch = runs.folder / "sitecustomize.py"
    watch.write_text(
        "import atexit, os, sys\n"
        "def tell():\n"
        "    if 'mpitrain.tools.train.run' in sys.modules:\n"
        "        bad = {'tensorboard', 'wandb', 'google.protobuf',\n"
        "               'torch.utils.tensorboard'} & set(sys.modules)\n"
        "        open(f'modules-{os.getpid()}', 'w').write(repr(sorted(bad)))\n"
        "atexit.register(tell)\n"
    )
    path = f"{runs.folder}:{ROOT}/tests/jobs:{ROOT}"
    done = runs.run("plain", 1, "--epochs", "1", PYTHONPATH=path)
    assert done.status == 0, done.out + done.err
    found = [file.read_text() for file in runs.folder.glob("modules-*")]
    assert found == ["[]"]
    assert not (runs.dir("plain") / "tensorboard").exists()


@pytest.mark.parametrize("who", ["rank", slow("mpirun")])
def test_a_run_that_is_killed_and_gone_on_with_has_each_step_once(
    who: str, runs: Runs
) -> None:
    often = (*ALL, "--checkpoint-every-steps", "4")
    folder = runs.dir("cut")
    job = runs.start("cut", 2, *often, STEP_SECONDS="1", **OFFLINE)
    # A logger whose library is still being imported ends soon after its rank.
    job.wait_until(lambda: have_losses(folder) and wandb_has_losses(folder))
    job.wait_until(lambda: runs.newest("cut") >= 4)
    time.sleep(0.5)
    if who == "rank":
        subprocess.run(["kill", "-KILL", str(job.ranks()[0])], check=True)
    else:
        job.process.send_signal(signal.SIGKILL)
    assert job.end() != 0
    done = runs.run("cut", 2, *often, **OFFLINE)
    assert done.status == 0, done.out + done.err
    assert runs.resumed_at("cut")[0] >= 4
    record = logger_files.from_record(folder)
    steps = list(range(1, NUM_STEPS + 1))
    assert [step for step, _ in record["train/loss"]] == steps
    assert chosen(logger_files.from_csv(folder), record) == record
    # A validation that is repeated at the step of the checkpoint comes twice.
    board = logger_files.from_tensorboard(folder)
    board = {name: list(dict.fromkeys(of)) for name, of in board.items()}
    assert chosen(board, record) == as_floats(record)
    # W&B may hear of a step twice; the same run, and the same number.
    first, second = logger_files.wandb_files(folder)
    assert first.name == second.name
    both = logger_files.from_wandb(first, second)["train/loss"]
    assert dict(both) == dict(record["train/loss"])


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A server that takes connections, and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def assert_key_is_nowhere(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            assert KEY.encode() not in file.read_bytes(), file


def test_a_server_that_never_answers_holds_up_nothing(
    runs: Runs, silent_server: str
) -> None:
    began = time.monotonic()
    to_it = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": silent_server}
    done = runs.run("silent", 2, *ALL, **to_it)
    assert done.status == 0, done.out + done.err
    assert time.monotonic() - began < 40
    assert "wandb: offline, " in done.out
    assert "; `wandb sync runs/silent/wandb/offline-run" in done.out
    assert "warning: " not in done.err
    folder = runs.dir("silent")
    record = logger_files.from_record(folder)
    assert chosen(logger_files.from_wandb(offline_file(folder)), record) == record
    assert_key_is_nowhere(folder)


def offline_file(run_dir: Path) -> Path:
    """The one of the second try: the first, at the server, has left one, too."""
    (found,) = [
        file
        for file in logger_files.wandb_files(run_dir)
        if file.parent.name.startswith("offline-")
    ]
    return found


REFUSING = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        if sys.argv[1] == "hangs":
            time.sleep(1000)
        self.send_response(401); self.end_headers(); self.wfile.write(b"no such key")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_a_server_that_will_not_have_us_holds_up_nothing(how: str, runs: Runs) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", REFUSING, how], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    try:
        to_it = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
        done = runs.run("refused", 2, *ALL, **to_it)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert done.status == 0, done.out + done.err
    assert "wandb: offline, " in done.out
    assert "warning: " not in done.err
    folder = runs.dir("refused")
    record = logger_files.from_record(folder)
    assert chosen(logger_files.from_wandb(offline_file(folder)), record) == record
    assert_key_is_nowhere(folder)


def test_without_a_key_it_is_offline_and_asks_for_none(runs: Runs) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", REFUSING, "refuses"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    try:
        done = runs.run("keyless", 1, *ALL, "--epochs", "1", WANDB_BASE_URL=url)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert done.status == 0, done.out + done.err
    assert "wandb: offline, No API key configured" in done.out


def have_losses(run_dir: Path) -> bool:
    """Whether both files have the loss of a step."""
    found = (logger_files.from_csv, logger_files.from_tensorboard)
    are_there = all((run_dir / it).exists() for it in ("metrics.csv", "tensorboard"))
    return are_there and all("train/loss" in read(run_dir) for read in found)


def wandb_has_losses(run_dir: Path) -> bool:
    files = logger_files.wandb_files(run_dir)
    return any(b"train/loss" in it.read_bytes() for it in files)


def test_a_disk_that_is_full_ends_loggers_and_no_training(runs: Runs) -> None:
    with small_disk(runs.folder / "runs", "4m") as disk:
        job = runs.start("full", 2, *ALL, *SAVING, STEP_SECONDS="1", **OFFLINE)
        job.wait_for_checkpoint()
        job.wait_until(lambda: have_losses(runs.dir("full")))
        # The file of csv has room in its last block until a validation adds columns.
        words = "--log {} failed and is disabled: OSError: [Errno"
        both = [words.format(name) for name in ("csv", "tensorboard")]

        def are_disabled() -> bool:
            # A checkpoint that finds no room gives back what it had written.
            fill(disk)
            return all(it in job.said() for it in both)

        job.wait_until(are_disabled)
        (disk / "ballast").unlink()
        assert job.end(120) == 0, job.said()
        for it in both:
            assert job.said().count(it) == 1, job.said()
        assert "Traceback" not in job.said()
        record = logger_files.from_record(runs.dir("full"))
        assert len(record["train/loss"]) == NUM_STEPS
        # What is there can be read.
        for found in (logger_files.from_csv, logger_files.from_tensorboard):
            assert found(runs.dir("full"))["train/loss"]

"""What a job on one node listens on, and who may knock there."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
from launcher import Mpi, mpirun
from resume_jobs import Runs

LISTENERS = """
import json
from pathlib import Path
import psutil
import mpitrain
from mpitrain.mpi.implementation import start_mpi
import torch, torch.distributed as dist

comm = start_mpi()

def listeners():
    own = psutil.Process()
    return sorted(
        tuple(c.laddr)
        for process in [own, *own.children(recursive=True)]
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    )

comm.allreduce(1)
found = {}
for backend in ("mpi4py", "gloo"):
    of_mpi = listeners()
    with mpitrain.init(device="cpu", backend=backend) as world:
        dist.all_reduce(torch.ones(1))
        dist.new_group()
        comm.allreduce(1)
        found[backend] = {"before": of_mpi, "after": listeners()}
        comm.allreduce(1)
Path(f"listeners-{world.rank}").write_text(json.dumps(found))
"""

SCANNED = """
import os, random, socket, threading, time
from collections import deque
import psutil
import mpitrain

done = threading.Event()
knocks = 0

def scan():
    global knocks
    own = psutil.Process()
    while not (found := [
        c.laddr for c in own.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.ip == "127.0.0.1"
    ]):
        time.sleep(0.001)
    kept = deque()
    rubbish = random.Random(1)
    while not done.is_set() and knocks < 20_000:
        try:
            sock = socket.create_connection(found[0], 0.5)
            knocks += 1
            match knocks % 4:
                case 0: sock.sendall(rubbish.randbytes(rubbish.randint(1, 5000)))
                case 1: sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                case 2: sock.sendall(bytes(1000))
                case 3: pass  # and says nothing
            kept.append(sock)
            if len(kept) > 300:
                kept.popleft().close()
        except OSError:
            pass
        time.sleep(0.0005)

if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    threading.Thread(target=scan, daemon=True).start()
with mpitrain.init(device="cpu", timeout_seconds=60) as world:
    import torch, torch.distributed as dist
    total = torch.ones(1)
    for _ in range(100):
        dist.all_reduce(total)
        total /= world.world_size
    dist.new_group()  # asks the store again
    done.set()
    if world.rank == 0:
        print(f"went on after {knocks} knocks: {total.item()}")
"""


def test_on_one_node_nothing_of_ours_listens_outside(mpi: Mpi, tmp_path: Path) -> None:
    """Nor does Open MPI where it is told; docs/reference/network.md names its ports."""
    (tmp_path / "script.py").write_text(LISTENERS)
    told = {"OMPI_MCA_btl": "self,sm"} if mpi.name == "openmpi-5" else {}
    done = mpirun(mpi, 2, "script.py", cwd=tmp_path, **told)
    assert done.status == 0, done.err
    for rank in range(2):
        files = json.loads((tmp_path / f"listeners-{rank}").read_text())
        for backend, found in files.items():
            ours = [at for at in found["after"] if at not in found["before"]]
            if backend == "gloo":
                assert ours, "gloo listens somewhere"
            elif rank == 0:
                assert len(ours) == 2, "the store and the watchdog"
            else:
                assert ours == []
            checked = found["after"] if told else ours
            assert {address for address, _ in checked} <= {"127.0.0.1"}


def test_a_port_scanner_does_not_break_the_start(openmpi: Mpi, tmp_path: Path) -> None:
    """It knocks at the store's port from the moment that it is bound."""
    (tmp_path / "script.py").write_text(SCANNED)
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "went on after" in done.out
    assert ": 1.0" in done.out
    knocks = int(done.out.partition("went on after ")[2].split()[0])
    assert knocks > 20


def test_a_stray_byte_does_not_stop_a_training_on_one_node(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """Open MPI's TCP would wait for the rest of it, in the middle of MPI's progress."""
    runs = Runs(mpi=openmpi, folder=tmp_path)
    job = runs.start("knocked", 2, "--hang-timeout", "15", STEP_SECONDS="0.1")
    job.wait_for_checkpoint()
    at = [
        connection.laddr
        for pid in job.ranks()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    with ExitStack() as stack:
        for address in at:
            sock = stack.enter_context(socket.create_connection(address, 5))
            sock.sendall(b"G")
        assert job.end() == 0, job.said()
    assert {address.ip for address in at} == {"127.0.0.1"}, "the store alone"

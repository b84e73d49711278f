"""Torch's own tests of a CPU backend, on ours: what torch's installed package has.

    mpirun -np 4 --oversubscribe python tests/torch_suite.py [--backend gloo] [names...]

Each test has a new default group, of the backend asked for. The tests are told that it
is gloo, so they skip what gloo has not. Rank zero prints a line of JSON for each; for
mpi4py it ends with 1 where others failed than EXPECTED says.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import json
import os
import shutil
import socket
import sys
import tempfile
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
GROUP_SECONDS = 20
TEST_SECONDS = 60

EXPECTED = {
    "test_all_to_all_cuda": "needs a GPU, and does not say so",
    "test_all_to_all_cuda_complex": "needs a GPU, and does not say so",
    "test_all_to_all_full_group_cuda": "needs a GPU, and does not say so",
    "test_barrier_timeout_global": "a second rendezvous of processes that live on",
    "test_batch_isend_irecv_mixed_backend_err": "makes a group of NCCL",
    "test_batch_isend_irecv_op_err": "needs a GPU, and does not say so",
    "test_ddp_logging_data_cpu": "DDP notes backends of others as 'custom'",
    "test_get_backend": "expects the name gloo",
    "test_monitored_barrier_gloo": "expects gloo's words",
    "test_monitored_barrier_gloo_rank_0_timeout": "expects gloo's words",
    "test_monitored_barrier_gloo_subgroup": "expects gloo's words",
}
"""Which of the tests fail here, and why."""


def prepare() -> None:
    """Set what the tests read as they are imported."""
    shared = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    if WORLD.rank == 0:
        atexit.register(shutil.rmtree, shared, ignore_errors=True)
    for folder in ("barrier", "init_dir", "test_dir"):
        (Path(shared) / folder).mkdir(exist_ok=True)
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(WORLD.size),
        RANK=str(WORLD.rank),
        TEMP_DIR=shared,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(WORLD.bcast(free_port() if WORLD.rank == 0 else None)),
    )


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def run(name: str, backend: str) -> str:
    """Run one test on all ranks; return how it ended on this one."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    class Own(TestCase, distributed_test.DistributedTest._DistTestBase):
        rank = WORLD.rank
        world_size = str(WORLD.size)
        file_name = f"{os.environ['TEMP_DIR']}/{name}"
        init_method = f"file://{file_name}"

    seconds = timedelta(seconds=GROUP_SECONDS)
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True)
    try:
        distributed_test.Barrier.barrier_id = 0
        dist.init_process_group(
            backend,
            init_method=Own.init_method,
            rank=WORLD.rank,
            world_size=WORLD.size,
            timeout=seconds,
        )
        dist.barrier()
        getattr(Own(name), name)()
        dist.barrier()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as left:
        return f"skipped: {left.code}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:300]} ({place.name})"
    else:
        return "passed"
    finally:
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def main() -> None:
    """Run all tests, or those named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mpi4py")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    prepare()
    import torch

    import mpitrain.backend  # noqa: F401 - torch learns of it

    torch.manual_seed(0)  # models are made as the tests are imported
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    names = args.names or [n for n in sorted(dir(base)) if n.startswith("test_")]
    ended: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for name in names:
        if WORLD.rank == 0:
            print(f"{name} ...", file=sys.stderr, flush=True)
            for file in (Path(os.environ["TEMP_DIR"]) / "barrier").iterdir():
                file.unlink()
        WORLD.barrier()
        ends = WORLD.gather(run(name, args.backend))
        if ends is None:
            continue
        kinds = {end.partition(":")[0] for end in ends}
        kind = kinds.pop() if kinds <= {"passed"} or kinds <= {"skipped"} else "failed"
        ended[kind].append(name)
        print(json.dumps({"test": name, "end": kind, "ranks": sorted(set(ends))}))
        sys.stdout.flush()
    if WORLD.rank > 0:
        return
    print(", ".join(f"{len(tests)} {kind}" for kind, tests in ended.items()))
    if args.backend == "mpi4py":
        differ = set(ended["failed"]) ^ (set(EXPECTED) & set(names))
        if differ or not (ended["passed"] or args.names):
            sys.exit(f"not as expected: {sorted(differ)}")


if __name__ == "__main__":
    main()

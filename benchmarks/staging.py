"""The time to bring an environment to all nodes: by `stage`, and by ssh one by one.

    python benchmarks/staging.py
    python benchmarks/staging.py --hosts 4 8 16 --megabits 100 --megabytes 60

The nodes are virtual hosts (tests/cluster/hosts.py) whose links are limited by `tc`. So
root on Linux is needed. The first column is the time that one link takes to carry the
environment. The second time of `stage` is that of a job that finds the copies. All
hosts share the cores of this machine, which 16 of them keep busy.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "jobs"), str(ROOT / "tests")]

from cluster.hosts import VirtualHosts, virtual_hosts  # noqa: E402
from cluster.test_stage import slow_links, stage  # noqa: E402
from record import about, write  # noqa: E402
from stage_environment import make_environment  # noqa: E402


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--megabits", type=int, default=100, help="of each link")
    parser.add_argument("--megabytes", type=int, default=60, help="of the environment")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    report = about(f"benchmarks/staging.py {' '.join(sys.argv[1:])}".rstrip())
    report["seconds"] = {}
    print("nodes  one link   stage   stage again   ssh, one by one   seconds")
    for count in asked.hosts:
        with tempfile.TemporaryDirectory() as name, virtual_hosts(count) as hosts:
            folder = Path(name)
            env = make_environment(
                folder / "env", size=asked.megabytes << 20, num_files=2000
            )
            size = sum(it.lstat().st_size for it in env.rglob("*") if it.is_file())
            link = size * 8e-6 / asked.megabits
            with slow_links(hosts, asked.megabits):
                first, again = (staged(hosts, folder, env) for _ in range(2))
                by_ssh = one_by_one(hosts, folder, env)
            report["seconds"][count] = {
                "one_link": round(link, 1),
                "stage": first,
                "stage_again": again,
                "ssh_one_by_one": round(by_ssh, 1),
            }
            print(
                f"{count:5} {link:9.1f} {first:7.1f} {again:13.1f} {by_ssh:17.1f}",
                flush=True,
            )
    write(report, asked.json)


def staged(hosts: VirtualHosts, folder: Path, env: Path) -> float:
    """Return the seconds that `stage` says."""
    done = stage(hosts, folder, env)
    said = re.search(rf"on {len(hosts.names)} nodes in ([\d.]+) s", done.stdout)
    if done.returncode or said is None:
        raise SystemExit(done.stdout)
    return float(said[1])


def one_by_one(hosts: VirtualHosts, folder: Path, env: Path) -> float:
    """Return the seconds to copy by tar and ssh from the first host to the others."""
    first, *others = hosts.names
    started = time.perf_counter()
    for name in others:
        there = folder / "ssh" / name
        there.mkdir(parents=True)
        copy = f"tar -C {env} -c . | ssh {name} tar -C {there} -x"
        done = hosts.run(first, ["sh", "-c", copy], timeout_seconds=300)
        if done.returncode:
            raise SystemExit(done.stdout)
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "ssh")
    return seconds


if __name__ == "__main__":
    main()

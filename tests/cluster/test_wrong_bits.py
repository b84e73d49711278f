"""A host that computes wrongly is left out; a NaN of two hosts is found on a third."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .hosts import LOGIN, VirtualHosts

SCRIPT = Path(__file__).parents[1] / "jobs/wrong_bits.py"
REPLAYED = SCRIPT.with_name("replayed.py")


def test_a_host_that_computes_wrongly_is_left_out(
    hosts: VirtualHosts, folder: Path
) -> None:
    first, bad, _ = hosts.names
    shutil.copy(SCRIPT, folder)
    listed = "".join(f"{name} slots=1\n" for name in hosts.names)
    (folder / "hosts").write_text(listed)
    python, path = ".venv/bin/python", f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    variables = {"PYTHONPATH": str(folder), "PATH": path, "STEP_SECONDS": "0.05"}
    start = [".venv/bin/mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    start += ["--bind-to", "none", "-x", "PATH", "-x", "PYTHONPATH", "-x"]
    start += ["STEP_SECONDS", python, "-m", "mpitrain", "run", "--device", "cpu"]
    start += ["wrong_bits.py"]
    supervise = [python, "-m", "mpitrain", "supervise", "--restarts", "3", "--"]

    def run(*words: str) -> str:
        done = hosts.run(
            first, ["env", *words], cwd=folder, timeout_seconds=170, environ=variables
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    said = run(*supervise, *start, "run", "gradient", bad, "14")
    (line,) = {it for it in said.splitlines() if re.match(r"\[rank .*ComputeError", it)}
    assert re.match(rf"\[rank 1/3 {bad}\] ComputeError: step 16: it has other", line)
    assert re.search(rf"{bad}, rank", said.partition("supervise: restart")[0])
    after = said.partition("supervise: restart 1")[2]
    assert f"{bad}, rank" not in after, after
    assert "on 2 ranks" in after
    run(start[0], "-np", "1", *start[1:], "good", "none", "0", "0")
    one, other = ((folder / it / "model.pt").read_bytes() for it in ("run", "good"))
    assert one == other


# In CI the ranks are those of one host: tests/jobs/test_replay.py.
@pytest.mark.slow
def test_a_nan_of_two_hosts_is_found_by_one_process(
    hosts: VirtualHosts, folder: Path
) -> None:
    shutil.copy(REPLAYED, folder)
    (folder / "hosts").write_text("".join(f"{it} slots=4\n" for it in hosts.names[:2]))
    python, path = ".venv/bin/python", f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    variables = {"PYTHONPATH": str(folder), "PATH": path, "NAN_AT": "123"}
    script = ["run", "--device", "cpu", "replayed.py", "runs/bad"]
    start = [".venv/bin/mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    start += ["--bind-to", "none", "-x", "PATH", "-x", "PYTHONPATH", "-x", "NAN_AT"]
    start += [python, "-m", "mpitrain", *script]
    replay = [python, "-m", "mpitrain", "replay", "runs/bad", "--until", "nan"]
    said = [
        hosts.run(
            host, ["env", *words], cwd=folder, timeout_seconds=120, environ=variables
        ).stdout
        for host, words in ((hosts.names[0], start), (LOGIN, [*replay, "--", *script]))
    ]
    assert "on 8 ranks" in said[0]
    assert "NonFiniteError: the loss is nan" in said[0]
    assert "inputs or targets are not finite: sample 123 (micro-batch" in said[1]
    assert "steps are as recorded, to the bit" in said[1]

"""`--verify-every`: a rank that computes wrongly is named, and no other one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launcher import Mpi, mpirun, supervise

pytestmark = pytest.mark.usefixtures("warm_starts")

SCRIPT = str(Path(__file__).with_name("wrong_bits.py"))
RUN = ("-m", "mpitrain", "run", "--device", "cpu", SCRIPT)
STATUS = 77


def test_a_rank_with_a_flipped_bit_ends_the_job_with_a_status_of_its_own(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """tests/mpi/test_verification.py has all that may be wrong."""
    done = mpirun(openmpi, 3, *RUN, "run", "gradient", "1", "14", cwd=tmp_path)
    (line,) = done.ours
    assert re.match(r"\[rank 1/3 \S+\] ComputeError: step 16: it has other bits", line)
    assert "The last step that was verified is 11" in done.err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed"
    assert done.status == STATUS


@pytest.mark.slow
def test_supervise_resumes_from_what_is_verified(
    openmpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host cannot be left out: here the fault comes in the first start alone."""
    variables = {"VERIFY_EVERY": "16", "EPOCHS": "4", "STEP_SECONDS": "0.05"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "once.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r})\n"
        "from pathlib import Path\nimport mpitrain, torch, wrong_bits\n"
        "with mpitrain.init() as world:\n"
        "    kind = 'none' if Path('struck').exists() else 'weight'\n"
        "    torch.distributed.barrier()\n"
        "    if world.is_rank_zero: Path('struck').touch()\n"
        "    wrong_bits.train('run', kind, '1', '18')\n"
    )
    done = supervise(openmpi, tmp_path, ["--restarts", "2"], *RUN[:-1], "once.py")
    assert done.status == 0, done.err
    assert "step 32: its copy of 4.weight is not that of the 2 others" in done.err
    assert "The last step that was verified is 15" in done.err
    assert "resuming from run/checkpoints/step-00000010-epoch-1" in done.out
    left = {it.name for it in (tmp_path / "run/checkpoints").iterdir()}
    assert {"step-00000020-epoch-2.unverified"} <= left
    done = mpirun(openmpi, 3, *RUN, "good", "none", "0", "0", cwd=tmp_path)
    one, other = ((tmp_path / it / "model.pt").read_bytes() for it in ("run", "good"))
    assert one == other


@pytest.mark.slow
def test_a_device_that_is_wrong_now_and_then_is_found_by_check(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 3, SCRIPT, "check", "1", cwd=tmp_path)
    assert done.status == 1, done.err
    rows = {it["name"]: it["found"] for it in json.loads(done.out)["findings"]}
    assert re.match(r"rank 1 on \S+ had other bits \d+ of", rows["unstable-compute"])
    names = [it["name"] for it in json.loads(done.out)["findings"]]
    assert names.count("unstable-compute") == 1, names
    assert "wrong-compute" not in names

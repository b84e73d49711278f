"""`--verify-every`: a rank that computes wrongly is named, and no other one."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from launcher import Mpi, mpirun, slow, supervise

SCRIPT = str(Path(__file__).with_name("wrong_bits.py"))
RUN = ("-m", "mpitrain", "run", "--device", "cpu", SCRIPT)
STATUS = 77


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        slow("activation", 14, r"in micro-batch \d, "),
        ("gradient", 14, r"in micro-batch \d, the gradient of 4.weight"),
        slow("batch", 14, r"in micro-batch \d, the inputs"),
        slow("weight", 16, r"its copy of 4.weight is not that of the 2 others"),
        slow(
            "state", 16, r"its copy of exp_avg of 0.weight is not that of the 2 others"
        ),
    ],
)
@pytest.mark.parametrize("rank", [1, slow(0)])
def test_a_flipped_bit_is_named_within_so_many_steps(
    rank: int, kind: str, step: int, expected: str, openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 3, *RUN, "run", kind, str(rank), str(step), cwd=tmp_path)
    (line,) = done.ours
    found = re.match(r"\[rank (\d)/3 \S+\] ComputeError: step (\d+): (.*)", line)
    assert found is not None, line
    assert int(found[1]) == rank
    assert int(found[2]) == 16, "of 12, 16, 20 the first after 14"
    assert re.search(expected, found[3]), line
    assert "The last step that was verified is 11" in done.err
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed"
    assert done.status == STATUS


def test_two_ranks_cannot_be_told_apart_by_their_copies(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 2, *RUN, "run", "weight", "1", "14", cwd=tmp_path)
    assert "no majority of the ranks has one copy: that of 4.weight differs" in done.err
    assert done.status == STATUS


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("once",), "rank 1/2 H] ComputeError: step 16: it has other bits than rank 0"),
        slow(
            (),
            "rank 0/2 H] ComputeError: step 16: rank 0 on H and rank 1 on H differ in",
        ),
    ],
)
def test_of_two_ranks_one_that_was_wrong_once_is_named(
    flags: tuple[str, ...], expected: str, openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("run", "gradient", "1", "16", "two", *flags)
    done = mpirun(openmpi, 2, *RUN, *words, cwd=tmp_path)
    assert done.status == STATUS
    (line,) = done.ours
    assert expected.replace("H", socket.gethostname()) in line
    if flags:
        assert "a second computation agrees with rank 0" in line


def test_without_bitwise_the_copies_are_compared(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("weight", "2", "14", "plain")
    done = mpirun(openmpi, 3, *RUN, "run", *words, cwd=tmp_path)
    assert done.status == STATUS
    assert re.search(
        r"\[rank 2/3 \S+\] ComputeError: step 16: its copy of 4.w", done.err
    )
    done = mpirun(
        *(openmpi, 3, "-m", "mpitrain", "--epochs", "1", "--verify-every", "3"),
        *("--strategy", "fsdp"),
        cwd=tmp_path,
    )
    assert "--verify-every compares the copies of all ranks, found --strategy fsdp" in (
        done.err
    )
    assert done.status == 2


@pytest.mark.parametrize("flags", [("ema", "noise"), slow(("plain", "ema"))])
def test_there_is_no_false_alarm_and_no_other_bit(
    flags: tuple[str, ...], openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("none", "0", "0", *flags)
    for name, every in (("with", "1"), ("without", "1000")):
        done = mpirun(openmpi, 3, *RUN, name, *words, cwd=tmp_path, VERIFY_EVERY=every)
        assert done.status == 0, done.err
    one, other = (
        (tmp_path / it / "model.pt").read_bytes() for it in ("with", "without")
    )
    if "plain" not in flags:
        assert one == other


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

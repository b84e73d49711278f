"""A step of a run is computed again on a laptop, and what differs is named."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import Mpi, environment, mpirun, slow

from mpitrain.errors import UsageError
from mpitrain.tools.replay.config import ReplayConfig, read_request

pytestmark = pytest.mark.usefixtures("warm_starts")

HERE = Path(__file__).parent
SCRIPT = str(HERE / "replayed.py")
RUN = ("-m", "mpitrain", "run", "--device", "cpu", SCRIPT)


def mpitrain(
    *words: str, cwd: Path, stdin: str = "", **variables: str
) -> tuple[int, str]:
    """Run a command of ours in one process; return its status and what it said."""
    done = subprocess.run(
        ["timeout", "-k", "5", "170", sys.executable, "-m", "mpitrain", *words],
        cwd=cwd,
        env=environment(**variables),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def content_of(run_dir: Path) -> dict[str, str]:
    files = [it for it in run_dir.rglob("*") if it.is_file()]
    return {str(it): hashlib.sha256(it.read_bytes()).hexdigest() for it in files}


AGAIN = ("--", "run", "--device", "cpu", SCRIPT)


@pytest.fixture(scope="module")
def good(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    done = mpirun(openmpi, 2, *RUN, "runs/good", cwd=folder)
    assert done.status == 0, done.err
    return folder


def test_a_nan_in_one_sample_of_three_ranks_is_found_on_one(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 3, *RUN, "runs/bad", cwd=tmp_path, NAN_AT="123")
    assert done.status != 0
    before = content_of(tmp_path / "runs")
    words = ("replay", "runs/bad", "--until", "nan", "--save", "batch.pt", *AGAIN)
    status, said = mpitrain(*words, "runs/bad", cwd=tmp_path, NAN_AT="123")
    assert status == 0, said
    assert "inputs or targets are not finite: sample 123 (micro-batch" in said
    assert "first that is not finite: output of 0 (Linear)" in said
    assert "steps are as recorded, to the bit" in said
    assert content_of(tmp_path / "runs") == before, "it writes nothing"
    # What it saves is of plain PyTorch.
    saved = torch.load(tmp_path / "batch.pt", weights_only=True)
    of_sample = next(it for it in saved["micro_batches"] if 123 in it["samples"])
    row = of_sample["samples"].index(123)
    assert of_sample["inputs"][row].isnan().tolist() == [
        *([False] * 3),
        True,
        *([False] * 6),
    ]
    assert saved["model"]["0.weight"].isfinite().all()


@pytest.mark.parametrize("num_ranks", [slow(1), 3])
def test_a_step_is_computed_again_to_the_bit(
    num_ranks: int, openmpi: Mpi, good: Path
) -> None:
    words = (
        "-m",
        "mpitrain",
        "replay",
        "runs/good",
        "--step",
        "18",
        "--layers",
        *AGAIN,
    )
    done = mpirun(openmpi, num_ranks, *words, "runs/good", cwd=good)
    assert done.status == 0, done.out + done.err
    assert (
        f"from runs/good/checkpoints/step-00000010-epoch-1, on {num_ranks} rank"
        in done.out
    )
    assert "8 steps are as recorded, to the bit" in done.out
    assert "5 (Linear)" in done.out
    assert "5.weight" in done.out


def test_what_is_not_as_recorded_is_named(good: Path) -> None:
    words = ("replay", "runs/good", "--step", "20", "--from", "10", *AGAIN, "runs/good")
    status, said = mpitrain(*words, cwd=good, CHANGED_FROM="15")
    assert status == 1
    assert "step 15 is not as recorded: train_loss" in said
    assert "\nReplayError: step 15 is not as recorded" in said, said


def test_one_sample_and_the_debugger(good: Path) -> None:
    words = ("replay", "runs/good", "--step", "3")
    status, said = mpitrain(*words, "--micro-batch", "5", *AGAIN, "runs/good", cwd=good)
    assert status == 0, said
    samples = [line.split()[1] for line in said.splitlines() if line[:9] == "  sample "]
    assert len(samples) == 4, "an eighth of 32"
    status, said = mpitrain(
        *(*words, "--sample", samples[2], "--pdb", *AGAIN, "runs/good"),
        cwd=good,
        stdin="p (batch.inputs.shape, type(model).__name__)\nq\n",
    )
    assert "micro-batch 5" in said
    assert "(torch.Size([4, 10]), 'Sequential')" in said
    assert status == 0, said


@pytest.mark.parametrize(
    ("run", "flags", "words", "expected"),
    [
        ("runs/good", {}, [], "expected --step N, or --until nan"),
        ("runs/none", {"step": 1}, [], "runs/none is no run of a training"),
        ("runs/good", {"step": 4}, [], "runs/good is of a script. Type:"),
        (
            *("runs/good", {"step": 9, "from_step": 5}, ["run", SCRIPT]),
            "has no checkpoint of step 5",
        ),
    ],
)
def test_what_cannot_be_replayed_is_said_before_the_start(
    run: str,
    flags: dict[str, int],
    words: list[str],
    expected: str,
    good: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(good)
    with pytest.raises(UsageError, match=re.escape(expected)):
        read_request(ReplayConfig(run=Path(run), **flags), words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        slow(["--step", "99"], "--step 99: the training has 20 steps"),
        slow(["--until", "nan"], "all losses and gradients are finite"),
        (["--step", "1", "--sample", "999"], "sample 999 is not in step 1"),
    ],
)
def test_what_the_script_does_not_have_is_said(
    flags: list[str], expected: str, good: Path
) -> None:
    before = content_of(good / "runs")
    words = ("replay", "runs/good", *flags, *AGAIN, "runs/good")
    status, said = mpitrain(*words, cwd=good)
    assert expected in said
    assert status in (1, 2) or "sample 999" in expected
    assert "Traceback" not in said, said
    assert content_of(good / "runs") == before


@pytest.mark.slow
def test_a_training_of_the_command_is_replayed_to_rounding(
    openmpi: Mpi, tmp_path: Path
) -> None:
    flags = ("--epochs", "2", "--name", "mine", "--optimizer", "adam")
    done = mpirun(openmpi, 3, "-m", "mpitrain", *flags, cwd=tmp_path)
    assert done.status == 0, done.err
    status, said = mpitrain("replay", "runs/mine", "--step", "30", cwd=tmp_path)
    assert status == 0, said
    assert "from runs/mine/checkpoints/step-00000023-epoch-1, on 1 rank" in said
    assert "7 steps are as recorded, to 0.001, relative" in said
    words = ("replay", "runs/mine", "--step", "30", "--", "--lr", "0.5")
    status, said = mpitrain(*words, cwd=tmp_path)
    assert status == 1
    assert "other flags: lr: None -> 0.5" in said


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "other",
            "replayed from step 10: step 15 differs first, in micro-batch 0: the "
            "output of 3 (Scale)",
        ),
        slow(".", "the runs are equal: what differs is not their code"),
    ],
)
def test_diff_names_the_layer_of_a_changed_line(
    code: str, expected: str, openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 2, *RUN, "runs/a", cwd=tmp_path)
    assert done.status == 0, done.err
    other = tmp_path / "other"
    other.mkdir()
    changed = (
        Path(SCRIPT)
        .read_text()
        .replace('get("CHANGED_FROM", "1000")', 'get("CHANGED_FROM", "15")')
    )
    (other / "replayed.py").write_text(changed)
    (tmp_path / "replayed.py").write_text(Path(SCRIPT).read_text())
    done = mpirun(
        *(openmpi, 3, "-m", "mpitrain", "run", "--device", "cpu"),
        *("other/replayed.py", "runs/b"),
        cwd=tmp_path,
    )
    assert done.status == 0, done.err
    words = ("diff", "runs/a", "runs/b", "--replay")
    script = ("--", "run", "--device", "cpu", "replayed.py", "x")
    status, said = mpitrain(*words, "--with", code, *script, cwd=tmp_path)
    assert status == 1
    assert expected in said

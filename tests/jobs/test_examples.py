"""The commands of `examples/README.md`, taken from the page and run on small files."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from example_files import write_all, write_tiles
from launcher import ROOT, Done, Mpi, environment, mpirun, slow

from mpitrain.record.reading import Run

pytestmark = pytest.mark.usefixtures("warm_starts")

PAGE = (ROOT / "examples/README.md").read_text()

SMALLER = {
    r"256 --epochs 5 --seed": "24 --dry-run --seed",
    r"--epochs \d+": "--epochs 2",
    r"--trials \d+": "--trials 4",
    r"--global-batch-size \d+": "--global-batch-size 20",
    r"mnist cifar100 hub": "mnist hub",
    # Of CIFAR the published files alone are read.
    r"--data cifar100": "--data folder --data-dir data/hymenoptera_data",
    r"--image-size 128": "--image-size 32",
    r"--image-size 224": "--image-size 56",
    r"--lr 1e-3": "--lr 3e-2",
}
"""What is changed in the page's commands, so that they take seconds."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One command that was run."""

    command: str
    done: Done
    epochs: list[dict[str, Any]]
    """What the run wrote down of each epoch; none for scripts."""
    result: dict[str, Any]

    def last(self, name: str) -> float:
        """A value of the last epoch."""
        return float(self.epochs[-1][name])


def sections(page: str) -> dict[str, list[str]]:
    """Return each section's commands, lines that go on joined."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        lines = text.replace("\\\n", "").splitlines()
        commands = [line.strip() for line in lines if line.startswith("    ")]
        if commands:
            found[title] = commands
    return found


def test_the_commands_of_a_page_are_found() -> None:
    page = "# A\ntext\n\n    python x \\\n        --y\n    z\n\n## B\nnothing\n"
    assert sections(page) == {"A": ["python x         --y", "z"]}


def run(command: str, name: str, mpi: Mpi, home: Path, *more: str) -> Ran:
    """Run a command of the page, in small, with some flags more if it is ours."""
    for found, smaller in SMALLER.items():
        command = re.sub(found, smaller, command)
    words = shlex.split(command)
    is_ours = "-m mpitrain --" in command
    more = (*more, "--name", name) if is_ours else ()
    cache = home / "torch"
    variables = {"TORCH_HOME": str(cache)} if cache.exists() else {}
    if words[0] == "mpirun":
        start = words.index("python") + 1
        assert words[1:start] == ["-np", words[2], "--oversubscribe", "python"], command
        done = mpirun(mpi, 2, *words[start:], *more, cwd=home, **variables)
    else:
        assert words[0] == "python", command
        ended = subprocess.run(
            [sys.executable, *words[1:], *more],
            cwd=home,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=180,
        )
        done = Done(
            status=ended.returncode,
            out=ended.stdout,
            err=ended.stderr,
            ended=time.time(),
        )
    lines: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    if is_ours and done.status == 0:
        folder = home / "runs" / (name + "-dry-run" * ("--dry-run" in words))
        written = (folder / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in written]
        result = json.loads((folder / "result.json").read_text())
    epochs = [line for line in lines if line["event"] == "epoch"]
    return Ran(command=command, done=done, epochs=epochs, result=result)


def check_fetch(ran: list[Ran], home: Path) -> None:
    assert "mnist: data/MNIST/raw, 240 samples to train" in ran[0].done.out
    assert "dinov2_vitl14: weights default are in the cache" in ran[0].done.out


def check_mnist_cnn(ran: list[Ran], home: Path) -> None:
    for one in ran:
        assert one.epochs[-1]["train_loss"] < one.epochs[0]["train_loss"]
        assert one.last("val_accuracy") > 0.5


def check_resnet50(ran: list[Ran], home: Path) -> None:
    on_ranks, alone, by_dp = ran
    assert "resnet50 on mnist: 240 samples" in on_ranks.done.out
    assert "ResNet: 23,5" in on_ranks.done.out
    assert (on_ranks.result["world_size"], alone.result["world_size"]) == (2, 1)
    if not torch.cuda.is_available():
        assert by_dp.done.status == 2
        assert "over the GPUs of one process, found none" in by_dp.done.err


def check_resnet18(ran: list[Ran], home: Path) -> None:
    folder, packed, encoded, _, pixels = ran
    assert "24 samples to train, 12 to validate, 2 classes" in folder.done.out
    assert "train: 24 images of 2 classes" in packed.done.out
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert encoded.last(name) == pytest.approx(folder.last(name), rel=1e-5)
    assert pixels.last("train_loss") == pytest.approx(folder.last("train_loss"), 0.5)


def told(ran: Ran, name: str) -> list[float]:
    """What the epochs' lines on the screen say of a value."""
    return [float(found) for found in re.findall(rf" {name} (\S+)", ran.done.out)]


def check_unet(ran: list[Ran], home: Path) -> None:
    losses, rmse = (told(ran[0], name) for name in ("val_loss", "val_rmse"))
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert rmse[-1] == pytest.approx(math.sqrt(losses[-1]), rel=0.1)
    assert "last.weight" in torch.load(home / "unet.pt", weights_only=True)


def check_dinov2(ran: list[Ran], home: Path) -> None:
    from_hub, from_clone = ran
    for one in ran:
        assert [e["stage"] for e in one.epochs] == ["probe"] * 5 + ["finetune"] * 2
        assert "fsdp, bf16" in one.done.out
        probe = one.epochs[4]
        assert probe["val_accuracy"] >= 0.5
        assert f"probe 5/7 | step 10 | train_loss {probe['train_loss']:.4f}" in (
            one.done.out
        )
        assert one.last("train_loss") < probe["train_loss"]
    assert "head new (2 classes from 32 features)" in from_hub.done.out
    assert "weights from dinov2_vitl14_pretrain.pth: 41 tensors" in from_clone.done.out
    for name in ("train_loss", "val_loss"):
        assert from_clone.last(name) == pytest.approx(from_hub.last(name), rel=1e-5)


def check_custom(ran: list[Ran], home: Path) -> None:
    model, logger, trainer, script, alone = ran
    assert logger.result["status"] == "finished"
    assert model.result["val_accuracy"] > 0.9
    assert "2 ranks, loss 0.00" in script.done.out
    for name in ("train_loss", "val_loss", "val_mean_error"):
        values = told(trainer, name)
        assert len(values) == 20
        assert values == pytest.approx(told(alone, name), rel=0.02)
        assert values[-1] < 0.1
    assert "0.weight" in torch.load(home / "custom_model.pt", weights_only=True)


def check_any(ran: list[Ran], home: Path) -> None:
    script, command, *_ = ran
    losses = told(script, "val_loss")
    assert len(told(script, "val_miou")) == len(losses) == 3
    assert losses[-1] < losses[0]
    assert told(command, "val_loss")[:3] == losses  # and in the last line
    f1 = [it.values["f1"] for it in Run(home / "runs/text").metrics.epochs]
    assert max(f1) == f1[-1 - 3] > f1[-1 - 4]  # it has stopped early
    assert "val_f1" in (home / "runs/text/report.html").read_text()


def check_sweeps(ran: list[Ran], home: Path) -> None:
    for one in ran[:2]:
        assert "finished: 4/4 trials: 4 finished" in one.done.out
    assert "finished: 8/8 trials: 8 finished" in ran[2].done.out
    found = re.search(r"8 models: (.*)% each on average, (.*)% tog", ran[3].done.out)
    assert found is not None
    assert 100 > float(found[2]) > float(found[1]) - 5 > 0


CHECKS: dict[str, Callable[[list[Ran], Path], None]] = {
    "Other projects, custom code": check_fetch,
    "The CNN for MNIST": check_mnist_cnn,
    "ResNet-50 on MNIST": check_resnet50,
    "ResNet-18 on your images": check_resnet18,
    "Regression with a U-Net": check_unet,
    "DINOv2: probe, then fine-tune": check_dinov2,
    "Custom code": check_custom,
    "Any training": check_any,
    "Sweeps": check_sweeps,
}
"""What must come out of the commands of each section."""

IN_TEST_ALL = (
    "ResNet-50 on MNIST",
    "ResNet-18 on your images",
    "Regression with a U-Net",
    "DINOv2: probe, then fine-tune",
    "Custom code",
    "Any training",
    "Sweeps",
    "The CNN for MNIST",
)
"""The sections that take longest."""


@pytest.mark.parametrize(
    "title",
    [slow(title) if title in IN_TEST_ALL else title for title in sections(PAGE)],
)
def test_the_commands_of_a_section_run(
    title: str, openmpi: Mpi, tmp_path: Path
) -> None:
    write_all(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ran = [
        run(command, f"run-{number}", openmpi, tmp_path)
        for number, command in enumerate(sections(PAGE)[title])
    ]
    for one in ran:
        if "--strategy dp" not in one.command:
            assert one.done.status == 0, one.command + one.done.out + one.done.err
            assert one.done.ours == []
        if one.result:
            assert one.result["status"] == "finished"
            assert math.isfinite(one.result["val_loss"])
    CHECKS[title](ran, tmp_path)


@pytest.fixture
def custom_loss(tmp_path: Path) -> str:
    name = "custom_loss.py"
    (tmp_path / name).symlink_to(ROOT / "examples" / name)
    return f"runpy.run_path('{name}')"


@pytest.mark.slow
def test_a_notebook_may_run_the_cells_of_custom_loss_again(
    custom_loss: str, openmpi: Mpi, tmp_path: Path
) -> None:
    again = f"import runpy; [{custom_loss} for _ in range(2)]"
    ran = run(f'python -c "{again}"', "", openmpi, tmp_path)
    assert ran.done.status == 0, ran.done.err
    losses = told(ran, "val_loss")
    assert len(losses) == 40
    assert losses[:20] == losses[20:]


@pytest.mark.slow
def test_who_evaluates_when_fit_has_ended_the_ranks_is_told(
    custom_loss: str, openmpi: Mpi, tmp_path: Path
) -> None:
    after = f"import runpy; {custom_loss}['trainer'].evaluate()"
    ran = run(f'python -c "{after}"', "", openmpi, tmp_path)
    assert ran.done.status != 0
    assert "fit() has ended its ranks; expected a world=" in ran.done.err


def test_the_code_of_the_tutorial_runs(openmpi: Mpi, tmp_path: Path) -> None:
    text = (ROOT / "docs/tutorial/custom-model.md").read_text()
    for block in re.findall(r"```python\n# (my_.*?)```", text, re.DOTALL):
        name, _, code = block.partition("\n")
        (tmp_path / name).write_text(code)
    write_tiles(tmp_path / "here")
    own = [c for of in sections(text).values() for c in of if " my_" in c]
    assert own
    for number, command in enumerate(own):
        small = ("--epochs", "4", "--global-batch-size", "20")
        ran = run(command, f"run-{number}", openmpi, tmp_path, *small)
        assert ran.done.status == 0, command + ran.done.out + ran.done.err
        if "here" in command:
            assert "2 classes" in ran.done.out
            assert ran.epochs[-1]["train_samples"] == 60
            assert ran.last("val_samples") == 20
            assert ran.last("val_accuracy") > 0.9
        assert ran.last("train_loss") < ran.epochs[0]["train_loss"]


def test_the_table_names_what_is_there() -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("| ")]
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(table))
    anchors = {re.sub(r"[^a-z0-9 -]", "", t.lower()).replace(" ", "-") for t in CHECKS}
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors
        elif not link.startswith("http"):
            assert (ROOT / "examples" / link.partition("#")[0]).exists()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"pictures.py"}
    scripts |= {f"trainings/{p.name}" for p in (ROOT / "examples/trainings").iterdir()}
    assert scripts - {"trainings/__pycache__"} <= set(links)

"""What needs a GPU: ``make test-gpu``. Whole jobs, since CUDA starts but once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import Done, find, mpirun

from mpitrain.torch_compat import python_backend_error

HOST = "gloo" if python_backend_error() else "mpi4py"
NCCL = f"cpu:{HOST},cuda:nccl"

NO_GPU = "torch sees no GPU here"

SAME = ("test_trainer", "test_trainer_data", "test_nonfinite")
"""Properties that hold on any device."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / "runs" / name / "result.json").read_text())


def on_one_gpu(num_ranks: int, folder: Path, *words: str) -> Done:
    """Run a command of mpitrain on ranks that all have the first GPU."""
    return mpirun(
        find("openmpi-5"),
        num_ranks,
        *("-m", "mpitrain", *words, "--device", "cuda"),
        cwd=folder,
        CUDA_VISIBLE_DEVICES="0",
    )


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["train_loss"] for row in rows if row["event"] == "epoch"]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_ranks_on_one_gpu_train_as_on_the_cpu(num_ranks: int, tmp_path: Path) -> None:
    flags = ("--precision", "fp64", "--epochs", "3")
    for device in ("cpu", "cuda"):
        done = mpirun(
            find("openmpi-5"),
            num_ranks,
            *("-m", "mpitrain", "--name", device, "--device", device, *flags),
            cwd=tmp_path,
            CUDA_VISIBLE_DEVICES="0",
        )
        assert done.status == 0, done.err
    assert result(tmp_path, "cuda")["status"] == "finished"
    assert result(tmp_path, "cuda")["backend"] == (HOST if num_ranks > 1 else NCCL)
    if num_ranks > 1:
        assert done.err.count(f"up to {num_ranks} ranks share a GPU") == 1
        assert f"cuda:0 (shared by {num_ranks} ranks)" in done.out
    assert losses(tmp_path, "cuda") == pytest.approx(losses(tmp_path, "cpu"), rel=1e-7)


def test_a_gpu_for_each_rank_uses_nccl(tmp_path: Path) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip(f"{num_gpus} GPU here, two are needed: a matter of the GPU")
    done = mpirun(
        find("openmpi-5"), num_gpus, *("-m", "mpitrain", "--name", "r"), cwd=tmp_path
    )
    assert done.status == 0, done.err
    assert result(tmp_path, "r")["backend"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_trainer_is_that_of_one_process_by_hand(num_ranks: int) -> None:
    """The same properties as on the CPU, by the same files."""
    words = ("-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "-rs")
    done = mpirun(
        find("openmpi-5"),
        num_ranks,
        *words,
        *(f"tests/mpi/{name}.py" for name in SAME),
        cwd=Path(__file__).parents[2],
        timeout_seconds=900,
        CUDA_VISIBLE_DEVICES="0",
        MPITRAIN_TEST_DEVICE="cuda",
    )
    assert done.status == 0, done.out + done.err


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
def test_bitwise_computes_the_same_bits_on_any_number_of_ranks(
    model: str, tmp_path: Path
) -> None:
    flags = ("--bitwise", "--model", model, "--epochs", "2", "--precision", "bf16")
    digests = set()
    for num_ranks in (1, 2, 3):
        done = on_one_gpu(num_ranks, tmp_path, "--name", str(num_ranks), *flags)
        assert done.status == 0, done.err
        weights = (tmp_path / "runs" / str(num_ranks) / "model.pt").read_bytes()
        digests.add(hashlib.sha256(weights).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_check_calls_no_collective_that_ends_a_rank(
    num_ranks: int, tmp_path: Path
) -> None:
    done = on_one_gpu(num_ranks, tmp_path, "check", "--quick")
    assert done.status == 0, done.err
    assert "errors: 0" in done.out


def test_fsdp_on_a_shared_gpu_trains_or_is_refused(tmp_path: Path) -> None:
    done = on_one_gpu(2, tmp_path, "--strategy", "fsdp", "--epochs", "2")
    if HOST == "gloo":
        assert done.status == 2
        assert "gloo has no collectives of FSDP for GPUs" in done.err
    else:
        assert done.status == 0, done.err


def test_the_watchdog_ends_a_kernel_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import torch\n"
        "def build(num_classes, **options):\n"
        "    return Endless(num_classes)\n"
        "class Endless(torch.nn.Sequential):\n"
        "    def __init__(self, n):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, n))\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if self.calls == 20:\n"
        "            torch.cuda._sleep(1 << 50)\n"
        "        return super().forward(x)\n"
    )
    words = ("--model", "endless:build", "--hang-timeout", "5")
    done = on_one_gpu(2, tmp_path, *words)
    assert done.status == 76, done.err
    assert "no rank has made progress for 5 s" in done.err


def test_the_host_does_not_wait_for_the_gpu_in_a_step() -> None:
    from mpitrain.config import TrainConfig
    from mpitrain.tasks.image_classification.datasets.named import digits
    from mpitrain.train.trainer import Trainer

    class Checked(Trainer):
        """Torch raises where a step waits; not in the first, which has no momentum."""

        num_checked = 0

        def train_step(self, step: Any) -> None:
            if self.state.step >= 2:
                torch.cuda.set_sync_debug_mode("error")
                self.num_checked += 1
            try:
                super().train_step(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    for precision in ("fp32", "bf16"):
        data = digits()
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10)
        )
        settings = TrainConfig(
            epochs=2, lr=0.1, precision=precision, clip_grad_norm=1.0, ema_decay=0.9
        )
        trainer = Checked(model, data.train, data.val, settings)
        assert trainer.fit().accuracy > 0.5
        assert trainer.num_checked > 10


def test_a_step_that_is_not_finite_is_not_applied_and_named() -> None:
    from mpitrain.config import TrainConfig
    from mpitrain.errors import NonFiniteError
    from mpitrain.train.trainer import Trainer

    inputs = torch.randn(256, 8)
    inputs[77] = float("nan")
    data = torch.utils.data.TensorDataset(inputs, torch.arange(256) % 4)
    settings = TrainConfig(epochs=1, lr=0.1, global_batch_size=16, seed=1)
    trainer = Trainer(torch.nn.Linear(8, 4), data, None, settings)
    with pytest.raises(NonFiniteError, match=r"in step .* samples .*\b77\b"):
        trainer.fit()
    weights = trainer.engine.full_state_dict().values()
    assert all(it.isfinite().all() for it in weights)


def test_a_small_set_lies_on_the_gpu(tmp_path: Path) -> None:
    from mpitrain.config import TrainConfig
    from mpitrain.tasks.image_classification.datasets.named import digits
    from mpitrain.train.trainer import Trainer

    data = digits()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    trainer = Trainer(
        model, data.train, data.val, TrainConfig(epochs=1, lr=0.1, warmup_epochs=1)
    )
    assert trainer.fit().accuracy > 0.5
    assert trainer.engine.data.train_loader.samples.inputs.is_cuda

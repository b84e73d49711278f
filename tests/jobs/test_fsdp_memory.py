"""What a rank holds of a model that is sharded, when it is saved, read and gathered."""

from __future__ import annotations

import json
from pathlib import Path

from launcher import Mpi, mpirun

MEGABYTES = 200
SCRIPT = """
import json, re, sys
from pathlib import Path
import torch
from torch import nn
import mpitrain
from mpitrain.tools.train import callbacks

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", status)[1]) / 1000

peaks = {}

class Peak:
    def __init__(self, name):
        self.name = name
    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.before = memory("VmRSS")
    def __exit__(self, *_):
        peaks[self.name] = memory("VmHWM") - self.before

class Trainer(mpitrain.Trainer):
    def set_up(self):
        with Peak("set_up"):
            return super().set_up()

class Load(mpitrain.Callback):
    def setup(self, trainer):
        for name in ("imports", "load") * Path("weights.safetensors").exists():
            with Peak(name):
                mpitrain.load_weights(trainer.model, "weights.safetensors")

class ModelFile(callbacks.ModelFile):
    def on_fit_end(self, trainer):
        with Peak("model_file"):
            super().on_fit_end(trainer)

class Checkpointer(mpitrain.Checkpointer):
    def setup(self, trainer):
        with Peak("restore"):
            super().setup(trainer)
    def on_train_end(self, trainer):
        with Peak("save"):
            super().on_train_end(trainer)

torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(1250, 2500, bias=False), nn.ReLU(),
                              nn.Linear(2500, 1250, bias=False))
with torch.device(sys.argv[2]):
    model = nn.Sequential(*(block() for _ in range(8)), nn.Linear(1250, 2))
data = torch.utils.data.TensorDataset(torch.randn(4, 1250), torch.arange(4) % 2)
config = mpitrain.TrainConfig(
    epochs=int(sys.argv[1]), global_batch_size=4, strategy="fsdp", lr=1e-3,
)
with mpitrain.init(device="cpu") as world:
    from torch.distributed.fsdp import fully_shard
    fully_shard(nn.Linear(2, 2))  # imports 100 MB
    loss = lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none")
    resume = "runs/1" if config.epochs == 2 else "auto"
    saves = Checkpointer(
        f"runs/{config.epochs}", every_epochs=None, every_minutes=None, resume=resume
    )
    used = [Load(), saves, ModelFile(Path(f"model-{config.epochs}.pt"))]
    trainer = Trainer(model, data, None, config, loss=loss, callbacks=used)
    trainer.fit()
    with Peak("gather"):
        state = trainer.state_dict()
    Path(f"peaks-{world.rank}.json").write_text(json.dumps(peaks))
    if world.is_rank_zero:
        from safetensors.torch import save_file
        save_file(state, "weights.safetensors")
        written = torch.load(f"model-{config.epochs}.pt")
        assert all(map(torch.equal, state.values(), written.values()))
        assert list(state) == list(written)
"""


def peaks_of(openmpi: Mpi, folder: Path, *words: str) -> list[dict[str, float]]:
    done = mpirun(
        openmpi,
        *(2, "script.py", *words),
        cwd=folder,
        MALLOC_MMAP_THRESHOLD_="65536",  # what is freed is given back at once
    )
    assert done.status == 0, done.out + done.err
    files = (folder / f"peaks-{rank}.json" for rank in (0, 1))
    return [json.loads(file.read_text()) for file in files]


def test_no_rank_holds_more_than_its_shard_or_one_whole_model(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    # The second, built on meta, loads weights, and then the checkpoint of the first.
    for epochs, device in (("1", "cpu"), ("2", "meta")):
        zero, one = peaks_of(openmpi, tmp_path, epochs, device)
        # The copy that is written: the shards of the weights and of their momentum.
        (folder,) = (tmp_path / f"runs/{epochs}/checkpoints").iterdir()
        sizes = [(folder / f"rank-{rank}.bin").stat().st_size / 1e6 for rank in (0, 1)]
        assert max(sizes) < 1.1 * MEGABYTES
        assert max(zero["save"], one["save"]) < 1.25 * MEGABYTES
        # The state_dict that rank zero gets, and one weight.
        assert zero["gather"] < 1.25 * MEGABYTES
        assert one["gather"] < 0.25 * MEGABYTES
        assert max(zero["restore"], one["restore"]) < 0.25 * MEGABYTES
        assert max(zero["model_file"], one["model_file"]) < 0.25 * MEGABYTES
        assert zero["gather"] > 0.8 * MEGABYTES  # it is measured at all
    for peaks in (zero, one):
        # Half the model, and a block of an eighth of it.
        assert 0.4 * MEGABYTES < peaks["set_up"] < 0.75 * MEGABYTES
        assert peaks["load"] < 0.25 * MEGABYTES

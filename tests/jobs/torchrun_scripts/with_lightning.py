"""Lightning's Trainer."""

import os
import sys

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader, TensorDataset

world_size = int(os.environ["WORLD_SIZE"])


class Small(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world_size,
    strategy="ddp",
    max_epochs=2,
    default_root_dir=sys.argv[1],
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
environment = trainer.strategy.cluster_environment
assert isinstance(environment, TorchElasticEnvironment), environment
trainer.fit(Small(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
assert trainer.world_size == torch.distributed.get_world_size() == world_size
assert trainer.global_step == 2 * (32 // 4 // world_size + (world_size == 3))
print(f"done {trainer.global_rank}/{trainer.world_size}", flush=True)

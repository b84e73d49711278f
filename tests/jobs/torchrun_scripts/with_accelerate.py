"""Hugging Face Accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
assert torch.distributed.get_backend() == "gloo"
assert torch.distributed.get_world_size() == accelerator.num_processes
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen = 0
for (inputs,) in loader:
    optimizer.zero_grad()
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    seen += len(accelerator.gather_for_metrics(inputs))
assert seen == 32, seen
accelerator.end_training()
print(f"done {accelerator.process_index}/{accelerator.num_processes}", flush=True)

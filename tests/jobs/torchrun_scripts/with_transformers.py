"""Hugging Face's Trainer, with a model made here."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = torch.arange(8) % 4 + index % 4
        return {"input_ids": tokens, "labels": tokens}


arguments = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    max_steps=3,
    per_device_train_batch_size=2,
    save_steps=3,
    report_to=[],
    disable_tqdm=True,
)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
)
trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
trainer.train()
world_size = torch.distributed.get_world_size()
assert arguments.world_size == world_size
assert arguments.parallel_mode.value == "distributed", arguments.parallel_mode
assert trainer.state.global_step == 3
print(f"done {arguments.process_index}/{world_size}", flush=True)

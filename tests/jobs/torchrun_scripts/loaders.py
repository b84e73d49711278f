"""A data set and its items are classes of the script; workers are other processes."""

import pickle
import sys
from dataclasses import dataclass

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


@dataclass
class Item:
    value: int


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return Item(index)


def first(items):
    return items[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    assert pickle.loads(pickle.dumps(Item(3))) == Item(3)
    loader = DataLoader(
        Numbers(), num_workers=2, multiprocessing_context=sys.argv[1], collate_fn=first
    )
    assert list(loader) == [Item(index) for index in range(6)]
    dist.barrier()
    print(f"done {dist.get_rank()}/{dist.get_world_size()}", flush=True)

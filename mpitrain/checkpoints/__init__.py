"""What a training goes on from: written whole or not at all, read without running it.

`layout` says which files there are and whether they are whole, `storage` how
torch.distributed.checkpoint reads and writes them, `saving` writes while a training
goes on, `loading` finds what to go on from.
"""

"""Checkpoints: atomic, verified, readable on any number of ranks, without pickle.

`checkpointer` is the public callback. `manager` writes checkpoints in the background,
`reader` finds and reads them, `dcp` adapts torch.distributed.checkpoint to our files,
`layout` and `format` say where these are and what they hold.
"""

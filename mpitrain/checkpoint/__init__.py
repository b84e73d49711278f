"""Checkpoints: atomic, verified, readable on any number of ranks, without pickle.

`checkpointer` is the public callback. `manager` writes checkpoints in the background,
`reader` finds and reads them, `storage` is the files of their tensors,
`layout` and `format` say where these are and what they hold.
"""

"""Checkpoints: atomic, verified, readable on any number of ranks, without pickle.

`checkpointer` is the public callback. `manager` writes checkpoints in the background,
`resume` finds and checks them, `storage` writes and reads their tensors,
`layout` and `format` say where these are and what they hold.
"""

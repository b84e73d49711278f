"""Training. Read `loop` first; `config` is what was asked, `run` the whole of it."""

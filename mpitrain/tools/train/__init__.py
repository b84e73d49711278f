"""``python -m mpitrain``: composes what a script could compose itself."""

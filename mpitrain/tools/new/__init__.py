"""``python -m mpitrain new``: a small project to begin with."""

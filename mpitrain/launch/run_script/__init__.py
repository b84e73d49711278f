"""`python -m mpitrain run`: a user's own script, module or program on every rank."""

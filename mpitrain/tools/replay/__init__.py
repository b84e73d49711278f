"""`python -m mpitrain replay`: compute a step of a run again, and look into it."""

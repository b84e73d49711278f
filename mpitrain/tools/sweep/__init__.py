"""``python -m mpitrain sweep``: many trainings in one job, chosen by Optuna."""

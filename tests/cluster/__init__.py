"""Whole jobs on virtual hosts: real sshd, real SLURM, and qsub's face over it."""

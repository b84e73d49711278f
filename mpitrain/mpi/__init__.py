"""Ranks by MPI alone: the world, collectives that raise on all ranks or none."""

"""From mpirun to a ready process group: `init` has the stages in their order."""

"""From mpirun to a ready process group: `init` has the steps in their order."""

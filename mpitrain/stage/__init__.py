"""`stage`: rank zero reads the environment, and MPI carries it to every node."""

"""Jobs of SLURM and PBS: scripts, chains, `supervise`, host files, nodes, sites."""

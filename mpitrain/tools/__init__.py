"""The commands; those of jobs, such as `jobscript` and `supervise`, are in `jobs`."""

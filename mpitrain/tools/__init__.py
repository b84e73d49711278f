"""The commands; `command` starts those of all ranks, `jobs` has those of jobs."""

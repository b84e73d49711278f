"""What a run leaves behind: `recorder`, `rank_times`, `loggers`, and their files."""

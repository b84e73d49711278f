"""What helps before and after a training: each module is one subcommand."""

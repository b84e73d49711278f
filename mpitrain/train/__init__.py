"""Training: `trainer` has the loop; `engine` what it works with."""

"""How a training is spread over the ranks: one class for each ``--strategy``."""

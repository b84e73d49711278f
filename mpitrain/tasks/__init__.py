"""What is trained: one class for each kind of training, below the loop that runs it."""

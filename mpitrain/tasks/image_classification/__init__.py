"""The built-in task: images or other tensors, and a label for each."""

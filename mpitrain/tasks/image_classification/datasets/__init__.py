"""Data sets of images with labels, by name."""

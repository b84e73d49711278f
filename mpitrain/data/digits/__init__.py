"""The embedded data set: `digits.npz`, its source and how it was made."""

"""``python -m mpitrain``: see `mpitrain.cli`."""

from mpitrain.cli import console

if __name__ == "__main__":
    console()

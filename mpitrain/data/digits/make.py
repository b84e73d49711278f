"""Make ``digits.npz`` from scikit-learn's copy of the UCI digits.

Not needed to use mpitrain; kept so that the file can be made again, byte by byte:

    pip install scikit-learn numpy && python mpitrain/data/digits/make.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SPLIT_SEED = 20261120
"""Permutes the samples before the split: the tail of the original is other writers'."""

NUM_TRAIN = 1437
"""The first so many of the permuted samples train; the other 360 validate."""


def main() -> None:
    """Write the file beside this script."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.Generator(np.random.PCG64(SPLIT_SEED)).permutation(
        len(digits.target)
    )
    np.savez_compressed(
        Path(__file__).with_name("digits.npz"),
        images=digits.images.astype(np.uint8),
        labels=digits.target.astype(np.uint8),
        permutation=order.astype(np.uint16),
        split_seed=np.int64(SPLIT_SEED),
        num_train=np.int64(NUM_TRAIN),
    )


if __name__ == "__main__":
    main()

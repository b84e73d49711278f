"""The names of classes whose labels are numbers in a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpitrain.data.tables import check_labels
from mpitrain.errors import DataError


def name_classes(
    labels: npt.NDArray[np.int64], names: Sequence[str] | None, where: str
) -> tuple[str, ...]:
    """Return the name of each class.

    Args:
        labels: Of all training samples, int64 `(N,)`, N from 1.
        names: Of the classes, by label; ``None``: the labels are their names.
        where: The labels' place, for the error.

    Raises:
        DataError: A label has no name, or a class no training sample.

    >>> name_classes(np.array([1, 0, 2, 1]), None, "train")
    ('0', '1', '2')
    """
    num_classes = len(names) if names else max(int(labels.max()) + 1, 1)
    check_labels(labels, len(labels), num_classes, where)
    found = np.unique(labels)
    if (
        len(found) < num_classes
    ):  # seen before a name is made for each of 10**12 classes
        absent = next((i for i, label in enumerate(found) if i != label), len(found))
        name = f" ({names[absent]!r})" if names else ""
        raise DataError(
            f"{where}: no training sample of class {absent}{name}, found "
            f"{len(found)} classes from {found[0]} to {found[-1]}. Expected each label "
            f"from 0 to {num_classes - 1} at least once."
        )
    return tuple(names) if names else tuple(str(i) for i in range(num_classes))

"""ArrayDataset: samples that are rows of tensors and numpy arrays."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from .converted import check_leaf, row_of_leaf
from .structure import flatten


class ArrayDataset(Dataset[Any]):
    """Samples that are the rows of arrays.

    Args:
        data: a tensor or numpy array (memory maps too), or one of these in `converted`, or a dict,
            list, tuple or named tuple of such, in any nest. All have the same size in the first
            dimension, the samples.

    A sample has the same containers, with a tensor for each array: a view of a tensor's row, a
    copy of a numpy array's or of what is converted.

    Raises:
        TypeError: an array is neither, or of a type that torch does not have, or cannot become what
            `converted` was asked for.
        ValueError: there is none, or their first dimensions differ, or it cannot be normalized so.

    Example:
        >>> dataset = ArrayDataset({"image": np.load("x.npy", mmap_mode="r"), "label": labels})
    """

    def __init__(self, data: object) -> None:
        self.data = data
        self.structure, self.leaves = flatten(data)
        if not self.leaves:
            raise ValueError("ArrayDataset: no array was given")
        first = self.leaves[0]
        for name, array in self.leaves:
            check_leaf(array, name)
            if len(array) != len(first[1]):
                raise ValueError(
                    f"ArrayDataset: {name} has {len(array)} rows, {first[0]} has {len(first[1])}"
                )

    def __len__(self) -> int:
        return len(self.leaves[0][1])

    def __getitem__(self, index: int) -> Any:
        return self.structure.sample(row_of_leaf(array, index) for _, array in self.leaves)

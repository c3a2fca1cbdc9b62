"""Samples that are copied into their batch as soon as the dataset has made them.

torch collects all samples of a batch and then stacks them. The first samples have left the cache by
then. Here a large tensor of a sample is copied into its row of the batch at once, and the memory
that it had, which is still in the cache, is free for the next sample.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from ..._torch.tensors import uses_of
from ..deliver.batch_buffers import BatchBuffers, BufferRows, why_not_plain

LARGE = 1 << 16  # bytes of a tensor that is worth it
CONTAINERS = (tuple, list, dict)  # of tensors; in others they stay as they are


class Rows:
    """Copies the large tensors of samples into the rows of their batch.

    Only tensors that nothing else refers to are copied early. Any other one may be written until
    torch would stack it, when the last sample is there.

    Args:
        buffers: lend the memory, and know the rows when they are collated.
        count: of samples.
    """

    def __init__(self, buffers: BatchBuffers, count: int) -> None:
        self._buffers = buffers
        self._count = count
        self._rows: dict[object, BufferRows] = {}  # by key within a sample

    def fetch(self, dataset: Any, indices: list[object]) -> list[object]:
        """The samples, with rows for the tensors that were copied."""
        samples: list[object] = []
        for number, index in enumerate(indices):
            holder = [dataset[index]]
            self._place_all_in(holder, number)
            samples.append(holder.pop())
            if not self._rows:  # nor will later samples have one
                samples += [dataset[index] for index in indices[1:]]
                break
        return samples

    def _place_all_in(self, holder: list[Any], number: int) -> None:
        """Puts rows in the place of the tensors of the only item of a list."""
        kind = type(holder[0])
        if kind is torch.Tensor:
            self._place(holder, 0, number)
        elif kind in CONTAINERS and _references(holder, 0) == _ALONE[kind]:
            items = dict(holder[0]) if kind is dict else list(holder[0])
            holder.clear()  # the sample, whose items are now ours as far as they were only its own
            for key in items if kind is dict else range(len(items)):
                self._place(items, key, number)
            holder.append(items if kind is not tuple else tuple(items))

    def _place(self, holder: Any, key: Any, number: int) -> None:
        """Puts a row in the place of a tensor."""
        tensor = holder[key]
        if (
            type(tensor) is not torch.Tensor
            or why_not_plain(tensor) is not None
            or tensor.nbytes < LARGE
            or not tensor.untyped_storage().resizable()  # NumPy's, or shared
        ):
            return
        form = tensor.shape, tensor.dtype
        del tensor
        if _references(holder, key) != _ALONE[torch.Tensor]:
            return
        if not number:
            self._rows[key] = BufferRows(self._buffers, self._count)
        row = self._rows[key].room(number, *form) if key in self._rows else None
        if row is not None:
            holder[key] = row.copy_(holder[key])


def _references(holder: Any, key: Any) -> tuple[object, ...]:
    """How often an item, and a tensor's storage, is referred to, by all that can be asked."""
    item = holder[key]
    if type(item) is not torch.Tensor:
        return (sys.getrefcount(item),)
    storage = item.untyped_storage()
    return (
        sys.getrefcount(item),
        weakref.getweakrefcount(item),
        sys.getrefcount(storage),
        weakref.getweakrefcount(storage),
        *uses_of(item),
    )


# of items that only their holder has; what that comes to differs from Python to Python
_ALONE = {
    torch.Tensor: _references([torch.empty(1)], 0),
    tuple: _references([(object(),)], 0),
    list: _references([[object()]], 0),
    dict: _references([{0: object()}], 0),
}

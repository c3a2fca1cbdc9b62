"""Memory of batches that is also mapped page-locked, for copies to a device."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

__all__ = ["OwnsLockedMemory", "ask_for_locked_memory", "page_locked"]


class OwnsLockedMemory(Protocol):
    """Has memory with two mappings, one of which is page-locked."""

    def locked(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        """The bytes of a storage where they are page-locked; None if they are not."""


_owners: weakref.WeakSet[OwnsLockedMemory] = weakref.WeakSet()


def ask_for_locked_memory(owner: OwnsLockedMemory) -> None:
    """Lets `page_locked` ask `owner`, as long as it lives."""
    _owners.add(owner)


def page_locked(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same elements where they are page-locked, if an owner of such memory has them.

    Nothing but a copy to the device may see it: its block is used again when it and all tensors of
    the batch are gone, whatever else still reads it.
    """
    if tensor.is_conj() or tensor.is_neg():
        return None  # the block holds other elements
    storage = tensor.untyped_storage()
    for owner in list(_owners):
        block = owner.locked(storage)
        if block is not None:
            where = tensor.storage_offset(), tensor.shape, tensor.stride()
            same = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return same.set_(block.untyped_storage(), *where)
    return None

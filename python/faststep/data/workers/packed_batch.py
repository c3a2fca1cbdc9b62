"""How a batch gets to the main process: tensors in blocks of the arena, the rest pickled."""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from ... import _C
from ..._torch.tensors import storage_record_of
from ..deliver.batch_buffers import tensor_over, why_not_plain
from ..types import Array
from .arena import arena_of

SMALL = 1 << 14  # bytes of an array that is part of the pickle
WASTE = 2  # a storage is sent whole if that is at most so many times what a tensor shows of it


class PackedBatch:
    """A batch on its way from a worker. Unpickled in the main process it is the batch.

    Args:
        key: of the arena.
        payload: the pickle.
        blocks: (number, bytes) of the blocks that it refers to.
        otherwise: why tensors were left to torch, and how many.
    """

    def __init__(
        self, key: int, payload: bytes, blocks: list[tuple[int, int]], otherwise: dict[str, int]
    ) -> None:
        self._parts = (key, payload, blocks, otherwise)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        _, payload, blocks, otherwise = self._parts
        return (_unpack, self._parts) if blocks or otherwise else (pickle.loads, (payload,))


class _Reference:
    """Stands for a block in the pickle; two tensors over one storage refer to it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _opened, (self.number,)


class _Opening(threading.local):
    blocks: list[torch.Tensor]


_opening = _Opening()


def _unpack(
    key: int, payload: bytes, blocks: list[tuple[int, int]], otherwise: dict[str, int]
) -> object:
    arena = arena_of(key)
    arena.unpin_what_no_child_sees()
    arena.in_blocks += len(blocks)
    arena.otherwise.update(otherwise)
    _opening.blocks = [arena.memory.hold(block, size) for block, size in blocks]
    try:
        return pickle.loads(payload)
    finally:
        del _opening.blocks


def _opened(number: int) -> torch.Tensor:
    return _opening.blocks[number]


def _array_over(block: torch.Tensor, dtype: Any, shape: tuple[int, ...], order: Any) -> object:
    return block.numpy().view(dtype).reshape(shape, order=order)


class _Contents:
    """The blocks that the pickle of a batch refers to, with its tensors and arrays."""

    def __init__(self, memory: _C.Arena, stacked: dict[int, int]) -> None:
        self.memory = memory
        self.stacked = stacked
        self.blocks: list[tuple[int, int]] = []
        self.leaving: list[tuple[int, int]] = []  # places of stacked blocks in it; addresses
        self.otherwise: Counter[str] = Counter()
        self._whole: dict[int, _Reference] = {}  # by storage; others may begin at its address

    def put_tensor(self, tensor: torch.Tensor) -> object:
        """Puts a tensor into a block; returns how to remake it. NotImplemented: left to torch."""
        storage = tensor.untyped_storage()
        item, offset = tensor.element_size(), tensor.storage_offset()
        size, stride = tuple(tensor.shape), tensor.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        whole = storage_record_of(tensor)
        if whole in self._whole:
            reference = self._whole[whole]
        elif storage.nbytes() <= WASTE * span * item:
            reference = self._put(storage.data_ptr(), storage.nbytes())
            self._whole[whole] = reference
        elif span <= WASTE * tensor.numel():
            reference = self._put(tensor.data_ptr(), span * item)
            offset = 0
        else:
            self.otherwise["few elements of a large storage"] += 1
            return NotImplemented
        return tensor_over, (reference, tensor.dtype, offset, size, stride)

    def _put(self, address: int, size: int) -> _Reference:
        block = self.stacked.pop(address, None)  # once: a block has one reference
        if block is None:
            block = self.memory.put(address, size)
        else:
            self.leaving.append((len(self.blocks), address))
        self.blocks.append((block, size))
        return _Reference(len(self.blocks) - 1)

    def put_array(self, array: Array) -> object:
        """How to make a packed array again."""
        reference = self._put(array.ctypes.data, array.nbytes)
        order = "C" if array.flags.c_contiguous else "F"
        return _array_over, (reference, array.dtype, array.shape, order)

    def give_back(self) -> None:
        """Take back what was put into blocks: it is not sent after all."""
        stacked = {place for place, _ in self.leaving}
        for place, (block, _) in enumerate(self.blocks):
            if place not in stacked:
                self.memory.give_back(block)

    def replace_kept(self) -> None:
        """Once the batch is gone: if somebody kept a tensor over a block, a copy of it is sent.

        Raises:
            MemoryError: there is none for the copy; the batch is lost, and its blocks are free.
        """
        for number, (place, address) in enumerate(self.leaving):
            block, size = self.blocks[place]
            if self.memory.sent(block):
                continue
            try:
                self.blocks[place] = self.memory.put(address, size), size
            except MemoryError:
                self.give_back()
                for ready, _ in self.leaving[:number]:
                    self.memory.give_back(self.blocks[ready][0])
                for waiting, _ in self.leaving[number + 1 :]:
                    if self.memory.sent(self.blocks[waiting][0]):
                        self.memory.give_back(self.blocks[waiting][0])
                raise


class _Pickler(pickle.Pickler):
    """Pickles a batch as torch's queue does, but for plain CPU tensors and large arrays."""

    dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table  # which would make one for each

    def __init__(self, file: io.BytesIO, contents: _Contents) -> None:
        super().__init__(file)
        self._contents = contents

    def reducer_override(self, obj: object) -> Any:
        try:
            if isinstance(obj, torch.Tensor):
                reason = why_not_plain(obj)
                if reason is None and obj.is_shared():  # type: ignore[no-untyped-call]
                    reason = "in shared memory already"
                if reason is None:
                    return self._contents.put_tensor(obj)
            elif _is_large_array(obj):
                return self._contents.put_array(obj)
            else:
                return NotImplemented
        except MemoryError as error:
            reason = str(error)
        if reason:
            self._contents.otherwise[reason] += 1
        return NotImplemented


def _is_large_array(obj: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(obj) is numpy.ndarray
        and obj.nbytes >= SMALL
        and not obj.dtype.hasobject
        and obj.dtype.isnative  # a pickle makes it so, and torch takes no other
        and (obj.flags.c_contiguous or obj.flags.f_contiguous)
    )


def pack(
    key: int,
    memory: _C.Arena,
    batch: list[object],
    stacked: dict[int, int],
    leaving: Sequence[list[object]] = (),
) -> PackedBatch:
    """The packed batch of a batch, in a worker.

    Args:
        batch: a list with the batch, which is emptied: a block that was stacked leaves as it is
            unless somebody else still has a tensor over it.
        stacked: the blocks that tensors of the batch may lie in, by address.
        leaving: lists of tensors over these blocks, which are emptied, too.

    Raises:
        pickle.PicklingError and others: something in the batch cannot be pickled.
    """
    file = io.BytesIO()
    contents = _Contents(memory, stacked)
    try:
        _Pickler(file, contents).dump(batch[0])
    except BaseException:
        contents.give_back()
        raise
    for place, _ in contents.leaving:
        memory.send(contents.blocks[place][0])
    for tensors in (batch, *leaving):
        tensors.clear()
    contents.replace_kept()
    return PackedBatch(key, file.getvalue(), contents.blocks, dict(contents.otherwise))

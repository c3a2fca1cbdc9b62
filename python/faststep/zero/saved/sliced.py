"""A whole parameter's state, with the part of this rank, for torch.distributed.checkpoint.

It knows parts of tensors as boxes: ranges of indices in every dimension. What a rank owns of a
parameter is one range of its memory, which at most two boxes per dimension make up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch.tensors import new_wrapper
from ...optim.base import FusedOptimizer
from ...optim.codes import check_scales, fit_codes, with_scales_of
from ...optim.masters import StateFormats
from ..layout.slots import Slot

_aten = torch.ops.aten


class SlicedState(Tensor):
    """A tensor of the parameter's shape that holds the elements of this rank alone.

    torch.distributed.checkpoint saves and loads it part by part, without gathering. Whatever else
    would read or write it raises an error.
    """

    param_name: str
    # Where this rank's range of the parameter's memory begins, and its elements; None for no range.
    part: tuple[int, Tensor] | None

    @staticmethod
    def __new__(
        cls,
        name: str,
        size: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        part: tuple[int, Tensor] | None,
    ) -> SlicedState:
        """Of a parameter with this size and these strides."""
        made = new_wrapper(cls, torch.Size(size), device="cpu", dtype=dtype, strides=tuple(strides))
        assert isinstance(made, SlicedState)
        made.param_name = name
        made.part = part
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        own = 0 if self.part is None else self.part[1].numel()
        return (
            f"SlicedState(of {self.param_name!r}, size={tuple(self.size())}, dtype={self.dtype}, "
            f"{own} elements on this rank)"
        )

    def __reduce_ex__(self, _: Any) -> Any:
        size, strides = tuple(self.size()), self.stride()
        return SlicedState, (self.param_name, size, strides, self.dtype, self.part)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        change = _CHANGES.get(func)
        if change is not None and isinstance(args[0], SlicedState):
            return args[0]._changed(change, kwargs or {})
        held = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, SlicedState)]
        name = held[0].param_name if held else "a parameter"
        raise RuntimeError(
            f"{func} on a state of {name!r}: this rank has a slice of it, which "
            "torch.distributed.checkpoint's save, load and async_save (with checkpoint_id=, or a "
            "DefaultStager) take. For whole states use StateDictOptions(full_state_dict=True), or "
            "state_dict() of the optimizer"
        )

    def _changed(
        self, change: Callable[[Tensor, dict[str, Any]], Tensor], options: dict[str, Any]
    ) -> SlicedState:
        """The same with another part."""
        part = None if self.part is None else (self.part[0], change(self.part[1], options))
        dtype = options.get("dtype") or self.dtype
        return SlicedState(self.param_name, self.size(), self.stride(), dtype, part)

    # ---- what torch.distributed.checkpoint asks, by the names of its protocol

    def _boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """The offsets and elements of each box."""
        if self.part is None:
            return
        begin, values = self.part
        start = values.storage_offset()
        for offsets, sizes in boxes_of(begin, values.numel(), self.size(), self.stride()):
            yield offsets, values.as_strided(sizes, self.stride(), start)
            start += math.prod(sizes)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), values.size())
            for offsets, values in self._boxes()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, values in self._boxes():
            if offsets == tuple(index.offset):
                return values
        raise ValueError(f"this rank has no part of {index.fqn!r} at {tuple(index.offset)}")


_CHANGES: dict[Any, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    _aten.detach.default: lambda values, _: values.detach(),
    _aten.alias.default: lambda values, _: values,
    _aten.clone.default: lambda values, _: values.clone(),
    _aten.new_empty.default: lambda values, _: torch.empty_like(values),
    _aten._to_copy.default: lambda values, options: values.to(options.get("dtype"), copy=True),
}


def boxes_of(
    begin: int, count: int, sizes: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that make up a range of a tensor's memory, in the order of memory.

    They are given by their offsets and sizes. Each is one piece of memory. `strides` are those of a
    tensor without gaps.
    """
    if not math.prod(sizes):
        yield (0,) * len(sizes), tuple(sizes)
        return
    order = sorted(
        (dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: -strides[dim]
    )
    for offsets, lengths in _cut(begin, begin + count, [sizes[dim] for dim in order]):
        where, extent = [0] * len(sizes), [1] * len(sizes)
        for dim, offset, length in zip(order, offsets, lengths, strict=True):
            where[dim], extent[dim] = offset, length
        yield tuple(where), tuple(extent)


def _cut(begin: int, end: int, sizes: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The same for a row-major tensor, as offsets and lengths."""
    if not sizes:
        yield [], []
        return
    inner = sizes[1:]
    row = math.prod(inner)
    while begin < end:
        first, inside = divmod(begin, row)
        rows = 0 if inside else (end - begin) // row
        if rows:
            yield [first, *[0] * len(inner)], [rows, *inner]
            begin += rows * row
            continue
        stop = min(end, (first + 1) * row)
        for offsets, lengths in _cut(inside, stop - first * row, inner):
            yield [first, *offsets], [1, *lengths]
        begin = stop


def cut_state(
    fused: FusedOptimizer, formats: StateFormats, slot: Slot, state: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the state of a whole parameter, by its part of the parameter.

    Raises:
        ValueError: the state has scales that are not those of its codes.
    """
    check_scales(state)
    if slot.part is None:
        return {}
    values, numbers = slot.part.values, ("step", *fused._numbers)
    fit = fit_codes(state, formats.code_dtypes_of(values), slot.param)
    shard = formats.shard_of(values) if fit else None
    state = with_scales_of(state, shard, values.numel())
    made = formats.fitting({k: _part_of(v, slot, k in numbers) for k, v in state.items()}, values)
    return {values: made} if made else {}


def _part_of(value: Any, slot: Slot, is_number: bool) -> Any:
    """A part of a state that has the parameter's shape, a copy of another one."""
    if isinstance(value, SlicedState):
        return value.part and value.part[1]
    if not isinstance(value, Tensor):
        return value
    return (value if is_number or value.shape != slot.shape else slot.cut(value)).clone()

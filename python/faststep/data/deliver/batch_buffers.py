"""Memory of a batch, lent to the dataset that makes the samples: collating then copies nothing.

A loader that collates by torch's default_collate lends memory while it fetches a batch. A dataset
that makes several samples at once writes its tensors there. The collate function sees by the
addresses that they are the rows of one batch, in order, and returns that batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ... import _C
from ..._torch.data_loader import collate_stacking_by, collate_tensors, collates_as_default
from ..resume.loader_stand_in import asked_ahead
from ..types import Loader

_here = threading.local()  # .buffers: of the loader that this thread fetches for


def tensor_over(
    block: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor over the bytes of a block: its storage, but not a view."""
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    where = (offset, size) if stride is None else (offset, size, stride)
    return tensor.set_(block.untyped_storage(), *where)


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """Why torch has to handle a tensor; "" if it has no elements, None if it is a plain one."""
    if type(tensor) is not torch.Tensor:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "not a dense tensor"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    if tensor.requires_grad:
        return "requires a gradient"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated tensor"
    return None if tensor.numel() else ""


class Samples(list[Any]):
    """Samples that are rows of one batch. A worker empties the list when the batch has left."""


class BatchBuffers:
    """Lends memory for batches to the datasets that a loader asks.

    Args:
        take: makes a uint8 tensor of so many bytes, or raises MemoryError.
    """

    def __init__(self, take: Callable[[int], torch.Tensor]) -> None:
        self.take = take
        self._batches: dict[int, torch.Tensor] = {}  # those that are lent, by address

    def begin(self) -> None:
        """Lends to the datasets that this thread reads from, from this call on."""
        _here.buffers = self

    def forget(self) -> None:
        """Forgets what was lent and did not come back as a batch: its borrower keeps it."""
        self._batches.clear()

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Lends, within the context, to the datasets that this thread reads from."""
        before = getattr(_here, "buffers", None)
        self.begin()
        try:
            yield
        finally:
            _here.buffers = before
            self.forget()

    def lend(
        self, shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Memory for a batch of this shape; None if there is none."""
        count = int(torch.Size(shape).numel())
        if not count:
            return None
        try:
            memory = self.take(count * dtype.itemsize)
        except MemoryError:  # torch's way to collate has its own memory, and its own error
            return None
        batch = tensor_over(memory, dtype, 0, shape, stride)
        self._batches[batch.data_ptr()] = batch
        return batch

    def whole(self, rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The batch that was lent, if `rows` are all of its rows, in their order."""
        batch = self._batches.get(rows[0].data_ptr()) if why_not_plain(rows[0]) is None else None
        if batch is None or len(batch) != len(rows):
            return None
        form = batch.shape[1:], batch.stride()[1:], batch.dtype
        start, step = batch.data_ptr(), batch.stride(0) * batch.element_size()
        for i, row in enumerate(rows):
            if (
                type(row) is not torch.Tensor
                or row.layout is not torch.strided
                or row.data_ptr() != start + i * step
                or (row.shape, row.stride(), row.dtype) != form
                or row.requires_grad
                or row.is_conj()
                or row.is_neg()
            ):
                return None
        return self._batches.pop(start)

    def stack(self, rows: Any, *, collate_fn_map: object = None) -> torch.Tensor:
        """torch's function for a list of tensors."""
        whole = self.whole(rows)
        return collate_tensors(rows) if whole is None else whole

    def __call__(self, samples: object) -> object:
        """torch's default_collate, where samples may be rows of a batch that was lent."""
        return collate_stacking_by(self.stack)(samples)


class BufferRows:
    """The rows of one batch while they are made. The first decides on their form.

    Args:
        buffers: whose memory it is.
        count: of rows.
        channels_last: rows of three dimensions lie in memory as (height, width, channels).
    """

    def __init__(self, buffers: BatchBuffers, count: int, channels_last: bool = False) -> None:
        self._buffers = buffers
        self._count = count
        self._channels_last = channels_last
        self._batch: torch.Tensor | None = None
        self._form: tuple[tuple[int, ...], torch.dtype] | None = None

    def room(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Row `place`, to be written; None if the first had another form, or without memory."""
        form = tuple(shape), dtype
        if self._form is None:
            self._form = form
            self._batch = self._buffers.lend((self._count, *shape), self._stride(shape), dtype)
        return None if self._batch is None or form != self._form else self._batch[place]

    def _stride(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if not self._channels_last or len(shape) != 3:
            return None
        channels, height, width = shape
        return channels * height * width, 1, width * channels, channels

    def put(self, place: int, value: object) -> object:
        """`value` as row `place`; `value` itself if it is no plain tensor of the rows' form."""
        if not isinstance(value, torch.Tensor) or why_not_plain(value) is not None:
            return value
        row = self.room(place, value.shape, value.dtype)
        if row is None:
            return value
        if row.data_ptr() != value.data_ptr():
            copy_image(value, row)
        return row


def copy_image(image: torch.Tensor, out: torch.Tensor) -> None:
    """out.copy_(image). RGB bytes to planes take a tenth of torch's time."""
    pixels = image.permute(1, 2, 0) if image.dim() == 3 and len(image) == 3 else None
    if (
        pixels is not None
        and image.dtype == out.dtype == torch.uint8
        and pixels.is_contiguous()
        and out.is_contiguous()
    ):
        _C.split_channels(pixels, out)
    else:
        out.copy_(image)


def new_rows(count: int, channels_last: bool = False) -> BufferRows | None:
    """Rows for `count` samples of one batch; None if no loader lends memory."""
    buffers = getattr(_here, "buffers", None)
    return None if buffers is None else BufferRows(buffers, count, channels_last)


def buffering_by(buffers: BatchBuffers | None) -> contextlib.AbstractContextManager[None]:
    """`buffers.lending()`, or nothing where there is none."""
    return contextlib.nullcontext() if buffers is None else buffers.lending()


def buffering_collate(loader: Loader) -> BatchBuffers | None:
    """The collate function that lends memory, for a loader without worker processes.

    None if nothing would be lent. Only datasets with a true `fills_rows`, and torch's Subsets of
    these, ask for memory. Only with default_collate does no other code see their samples.
    """
    dataset = loader.dataset
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    if not (hasattr(type(dataset), "fills_rows") and dataset.fills_rows):
        return None
    if not collates_as_default(loader.collate_fn, ()):
        return None
    own = loader._faststep
    if own.skip_errors:
        return None
    if own.slots is None:
        own.slots = _C.Slots()
    slots: _C.Slots = own.slots
    slots.keep(3 + asked_ahead(loader))
    form = torch.empty(0, dtype=torch.uint8, device="cpu")
    return BatchBuffers(lambda size: slots.empty(form, size))

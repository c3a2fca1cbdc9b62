"""Compose: the transforms of a batch in one pass over its pixels."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ..._torch.optim import is_capturing
from ..arrays.in_place import ImageRows
from ..arrays.structure import Structure
from ..types import State
from .framing import Framing, Offset
from .geometry import Geometry
from .mixing import Labels, Mix
from .pixels import Normalize, ToFloat

SLOTS_KEPT = 3  # the batch that is made, the one in use, and one that autograd still has


class Compose:
    """Transforms of a batch of images, folded into one description and done in one pass.

    The random numbers of all samples are drawn first. Then one pass makes the result, without an
    image in between, on torch's threads. Its memory is used again when no tensor needs it. The
    result is the same for any number of threads and any instruction set, and on CUDA.

    Args:
        transforms: in the order in which they apply. Geometry (crops, flips, one resize) in any
            order; at most one each of Normalize and ToFloat; one of OneHot, MixUp, CutMix and
            RandomChoice as the last. Without ToFloat the result is float32 and contiguous.
        fields: for batches in containers, the keys of images and labels: (0, 1) in lists and
            tuples and ("image", "label") in dicts where nothing is said.

    Raises:
        TypeError, ValueError: `transforms` cannot be folded; says which and why.
    """

    def __init__(
        self,
        transforms: Sequence[Geometry | Normalize | ToFloat | Labels],
        fields: tuple[object, object] | None = None,
    ) -> None:
        self.transforms = tuple(transforms)
        self.fields = fields
        self._slots: _C.Slots | None = None
        self._format = ToFloat()
        self._normalize = Normalize((0.0,), (1.0,))
        self._labels: Labels | None = None
        self._geometry: list[Geometry] = []
        if fields is not None and len(fields) != 2:
            raise ValueError(f"fields must be the keys of images and labels, not {fields!r}")
        for i, transform in enumerate(self.transforms):
            self._add(transform, f"transforms[{i}]")
        for kind in (ToFloat, Normalize, Labels):
            if sum(isinstance(t, kind) for t in self.transforms) > 1:
                raise ValueError(f"transforms has more than one {kind.__name__}")

    def _add(self, transform: object, name: str) -> None:
        if self._labels is not None:
            raise ValueError(f"{name}, {transform!r}, comes after {self._labels!r}")
        if isinstance(transform, ToFloat):
            self._format = transform
        elif isinstance(transform, Normalize):
            self._normalize = transform
        elif isinstance(transform, Labels):
            self._labels = transform
        elif not isinstance(transform, Geometry):
            raise TypeError(f"{name} is a {type(transform).__name__}, not one of these transforms")
        else:
            if transform.resizes and any(t.resizes for t in self._geometry):
                raise ValueError(f"{name}, {transform!r}: images can be resized only once")
            self._geometry.append(transform)

    def __repr__(self) -> str:
        return f"Compose({list(self.transforms)!r})"

    def __getstate__(self) -> State:
        """For pickle and copy: without what belongs to this process."""
        return {**vars(self), "_slots": None}

    def __call__(
        self,
        batch: object,
        labels: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Any:
        """The transformed images, with the labels if there are any, or the batch with both in it.

        Args:
            batch: images, (N, C, H, W) uint8 or float32 with any strides, on the CPU or on CUDA; or
                a list, tuple, named tuple or dict that holds them and perhaps labels.
            labels: (N,) integers or (N, num_classes) floats; needed only for transforms of them.
            generator: of the random numbers; torch's default one if None. They are drawn by one
                torch.rand(rows, N, dtype=torch.float64), with these rows in the order of the
                transforms: RandomHorizontalFlip 1, RandomCrop 2 (top, left), RandomResizedCrop 22
                (10 areas, 10 ratios, top, left); and, of which the first sample's are used, MixUp
                1, CutMix 3 (share, row, column), RandomChoice 1 and those of the longest.

        Returns:
            Images (N, C, h, w) as ToFloat says; labels (N, num_classes) float32, or as they were.

        Raises:
            TypeError, ValueError: an argument cannot be used; names it.
        """
        if isinstance(batch, (Tensor, ImageRows)):
            images, changed = self._transform(batch, labels, generator)
            return images if labels is None else (images, changed)
        if labels is not None:
            raise TypeError("labels are given twice: batch is not a tensor")
        return self._in_container(batch, generator)

    def _in_container(self, batch: Any, generator: torch.Generator | None) -> object:
        is_mapping = isinstance(batch, Mapping)
        if not is_mapping and not isinstance(batch, (list, tuple)):
            raise TypeError(f"batch is a {type(batch).__name__}, not images or a container of them")
        keys = self._keys(is_mapping)
        try:
            images = batch[keys[0]]
        except (LookupError, TypeError):
            raise ValueError(f"batch has no images: no {keys[0]!r} in it; see `fields`") from None
        labels = None
        if self._labels is not None:
            try:
                labels = batch[keys[1]]
            except (LookupError, TypeError):
                raise ValueError(f"batch has no labels: no {keys[1]!r} in it") from None
        images, labels = self._transform(images, labels, generator)
        changed = {keys[0]: images} | ({} if labels is None else {keys[1]: labels})
        if is_mapping:
            return {**batch, **changed}
        items: Any = [*batch]
        for key, value in changed.items():
            items[key] = value
        if isinstance(batch, list):
            return items
        make = getattr(type(batch), "_make", tuple)
        return make(items)

    def _keys(self, is_mapping: bool) -> tuple[object, object]:
        return self.fields or (("image", "label") if is_mapping else (0, 1))

    def leaf_of_images(self, structure: Structure) -> int | None:
        """Where a loader's batches have the images, and nothing else; None if it is not known."""
        if structure.kind is None:
            return 0
        images, labels = map(structure.leaf_at, self._keys(structure.kind is dict))
        return None if images == labels else images

    def _transform(
        self, batch: Tensor | ImageRows, labels: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        images, rows = (batch.images, batch.rows) if isinstance(batch, ImageRows) else (batch, None)
        self._check(images)
        images = images.resolve_neg()
        count = len(images if rows is None else rows)
        self._check_labels(labels, count)
        channels, height, width = images.shape[1:]
        framing = Framing(height, width)
        steps: list[Geometry | Labels] = [*self._geometry]
        steps += [] if self._labels is None else [self._labels]
        uniforms = sum(step.uniforms for step in steps)
        # an empty batch draws nothing, and has no first sample
        u = torch.rand(
            uniforms, max(count, 1), dtype=torch.float64, device="cpu", generator=generator
        )
        taken = 0
        mix = Mix()
        for step in steps:
            numbers = u[taken : taken + step.uniforms, :count]
            taken += step.uniforms
            if isinstance(step, Geometry):
                step.apply(framing, numbers)
            elif count:
                mix = step.mix(numbers, *framing.whole_size)
        out = self._out(images, count, framing.whole_size)
        unit = 1.0 if images.is_floating_point() else 1 / 255
        factors = self._normalize.factors(channels, unit)
        samples = _samples(framing, mix, count, rows)
        buffer = None if images.is_cpu else images.new_empty(samples.numel(), dtype=torch.int32)
        _C.transform_images(images, out, samples, *factors, buffer, framing.antialias)
        if labels is not None and self._labels is not None:
            labels = self._labels.apply(labels, mix)
        return out, labels

    def _check(self, images: Tensor) -> None:
        if not isinstance(images, Tensor):
            raise TypeError(f"images is a {type(images).__name__}, not a tensor")
        if images.dim() != 4:
            raise ValueError(f"images must be (N, C, H, W), not {tuple(images.shape)}")
        if images.dtype not in (torch.uint8, torch.float32):
            raise TypeError(f"images must be uint8 or float32, not {images.dtype}")
        if images.requires_grad:
            raise ValueError("images requires a gradient, and transforms have none: detach() it")
        if not images.is_cpu and is_capturing():
            raise RuntimeError("transforms cannot be captured into a CUDA graph")

    def _check_labels(self, labels: Tensor | None, count: int) -> None:
        if self._labels is None:
            return
        if not isinstance(labels, Tensor):
            raise ValueError(f"{type(self._labels).__name__} needs labels, a tensor")
        if labels.dim() == 0 or len(labels) != count:
            raise ValueError(f"labels must be {count}, not {tuple(labels.shape)}")

    def _out(self, images: Tensor, count: int, size: tuple[int, int]) -> Tensor:
        """Memory for the result."""
        channels = images.shape[1]
        options: dict[str, Any] = {
            "dtype": self._format.dtype,
            "memory_format": self._format.memory_format,
        }
        if not images.is_cpu:
            return torch.empty((count, channels, *size), device=images.device, **options)
        if self._slots is None:
            self._slots = _C.Slots()
            self._slots.keep(SLOTS_KEPT)
        form = torch.empty((0, channels, *size), device="cpu", **options)
        return self._slots.empty(form, count)


def _samples(framing: Framing, mix: Mix, count: int, rows: Tensor | None) -> Tensor:
    """A row for each sample, as csrc/base/image_sample.h has it."""
    flip: Offset = 0 if framing.flip is None else framing.flip
    partner: Offset = 0 if not mix.mixes else torch.arange(count, device="cpu").roll(1)
    weights = struct.unpack("=ii", struct.pack("=ff", mix.own, mix.other))
    source: Offset = torch.arange(count, device="cpu") if rows is None else rows
    words: list[Offset] = [*framing.source, *framing.grid, *framing.first, flip, partner, source]
    words += [*weights, *mix.box]
    same = torch.tensor([0 if isinstance(w, Tensor) else w for w in words], device="cpu")
    table = same.to(torch.int32)[:, None].repeat(1, count)
    for place, word in zip(table, words, strict=True):
        if isinstance(word, Tensor):
            place.copy_(word)
    return table.t().contiguous()

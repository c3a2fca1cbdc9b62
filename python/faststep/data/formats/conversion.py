"""`convert`: any of the formats as memory-mapped arrays, so that C threads can read them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from ..arrays.array_dataset import ArrayDataset
from ..arrays.converted import Converted
from ..arrays.structure import Structure, flatten
from .columns_out import FieldWriter
from .common import FormatError, PathLike, naming
from .detect import format_of
from .detect import open as open_any
from .images import resized
from .manifest import structure_to_json, write_manifest
from .mapped import MappedArrays
from .results import Destination

BLOCK_BYTES = 1 << 23
BATCH = 64

Report = Callable[[int, int | None], None]


def convert(
    source: PathLike | Dataset[Any],
    destination: PathLike,
    *,
    force: bool = False,
    image_size: int | None = None,
    report: Report | None = None,
    **options: object,
) -> int:
    """Writes a dataset to a directory of .npy files with a manifest, which `open` reads back.

    Args:
        source: what `open` takes, .npz files included, or a dataset: map-style, or iterable and
            read once.
        destination: the directory. It is there with all that belongs to it, or not at all. If the
            program is killed a hidden directory beside it, ".NAME-" and more, is left.
        force: replace an earlier result of this function: the files that its manifest names.
            Whatever else is in the directory stays there.
        image_size: resize images, which are uint8 tensors (3, height, width), by their shorter side
            and cut out the middle: a square of this size. A sample without any is an error.
            Default None: they stay as they are.
        report: called with the samples that are written, and their number or None if not known.
        **options: for `open`.

    Samples are tensors, numpy arrays, numbers, str or bytes, in any nest of dict, list and tuple.
    Fields of one shape become rows of an array; a field that varies in its first dimension, as
    tokens, text and bytes do, becomes its values one after another, and where each begins.

    Returns:
        The number of samples.

    Raises:
        FileExistsError: there is something at `destination`; with `force`, no earlier result, or
            one with a damaged manifest.
        FormatError: the source is damaged, empty, or a field cannot be written; names the sample.
    """
    place = Destination(os.fspath(destination), force)
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        dataset = _open_source(name, options)
    elif options:
        raise TypeError(f"convert: {sorted(options)} are for open, and the source is a dataset")
    else:
        name, dataset = type(source).__name__, source
    try:
        place.make_folder()
        count = _write(dataset, name, place, image_size, report or (lambda done, total: None))
        place.take()
    except BaseException:
        place.leave()
        raise
    return count


def _open_source(path: str, options: dict[str, object]) -> Dataset[object]:
    if os.path.isfile(path) and format_of(path).name == "npz":
        options = {"read": True, **options}
    return open_any(path, **options)


def _write(
    dataset: Dataset[object], name: str, place: Destination, image_size: int | None, report: Report
) -> int:
    writers = _Writers(place)
    try:
        arrays = _array_parts(dataset) if image_size is None else None
        if arrays is not None:
            structure, count = _write_blocks(arrays, writers, report)
        else:
            samples = _samples(dataset, _length(dataset), image_size, name)
            structure, count = _write_samples(samples, _length(dataset), name, writers, report)
        if structure is None:
            raise FormatError(f"{name}: there is no record in it")
        with naming(name):
            saved = structure_to_json(structure)
        write_manifest(place.folder, count, saved, [writer.finish() for writer in writers])
    finally:
        for writer in writers:
            writer.close()
    return count


class _Writers(list[FieldWriter]):
    """A writer for each field, once the first sample is known."""

    def __init__(self, place: Destination) -> None:
        super().__init__()
        self._place = place

    def begin(self, leaves: list[tuple[str, object]]) -> None:
        """Adds the writers. No file has the name of one that stays in the destination."""
        taken = {name.partition(".")[0] for name in self._place.others}
        for name, _ in leaves:
            stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name.removeprefix("data")).strip("_")[:80]
            stem = first = stem or "data"
            number = 1
            while stem in taken:
                stem, number = f"{first}_{number}", number + 1
            taken.add(stem)
            self.append(FieldWriter(self._place.folder, stem, name))


def _array_parts(dataset: Dataset[object]) -> list[ArrayDataset] | None:
    """The datasets whose arrays can be copied, one after another, without a look at samples."""
    parts: list[Any] = [*dataset.datasets] if type(dataset) is ConcatDataset else [dataset]
    if any(type(part) not in (ArrayDataset, MappedArrays) for part in parts):
        return None  # what else there is, a subclass too, may make other samples of its arrays
    if any(isinstance(array, Converted) for part in parts for _, array in part.leaves):
        return None
    forms = [(part.structure, _forms(part)) for part in parts]
    return parts if all(form == forms[0] for form in forms) else None


def _forms(dataset: ArrayDataset) -> list[object]:
    return [(array.dtype, tuple(array.shape[1:])) for _, array in dataset.leaves]


def _write_blocks(
    parts: list[ArrayDataset], writers: _Writers, report: Report
) -> tuple[Structure | None, int]:
    total, count = sum(map(len, parts)), 0
    for part in parts:
        if not len(part):
            continue
        if not writers:
            writers.begin(part.leaves)
        largest = max(array[:1].nbytes for _, array in part.leaves)
        step = max(1, BLOCK_BYTES // max(1, largest))
        for start in range(0, len(part), step):
            for writer, (_, array) in zip(writers, part.leaves, strict=True):
                writer.add_block(array[start : start + step])
            report(count + min(start + step, len(part)), total)
        count += len(part)
    return (parts[0].structure if count else None), count


def _write_samples(
    samples: Generator[object, None, None],
    total: int | None,
    name: str,
    writers: _Writers,
    report: Report,
) -> tuple[Structure | None, int]:
    structure: Structure | None = None
    count = 0
    with contextlib.closing(samples):
        for sample in samples:
            where = f"{name}: record {count}"
            form, leaves = flatten(sample)
            if structure is None:
                structure = form
                with naming(name):
                    structure_to_json(form)
                writers.begin(leaves)
            elif form != structure:
                fields = ", ".join(field for field, _ in leaves)
                raise FormatError(f"{where} has other fields than those before: {fields}")
            for writer, (_, value) in zip(writers, leaves, strict=True):
                writer.add(value, where)
            count += 1
            report(count, total)
    return structure, count


def _length(dataset: Any) -> int | None:
    return None if isinstance(dataset, IterableDataset) else len(dataset)


def _samples(
    dataset: object, length: int | None, image_size: int | None, name: str
) -> Generator[object, None, None]:
    """All samples in their order, images of one size if asked for."""
    for number, sample in enumerate(_read(dataset, length)):
        if image_size is None:
            yield sample
        else:
            structure, leaves = flatten(sample)
            if not any(_is_image(value) for _, value in leaves):
                fields = ", ".join(f"{field} ({_kind(value)})" for field, value in leaves)
                raise FormatError(
                    f"{name}: record {number}: image_size is for images, uint8 tensors (3, height, "
                    f"width), and there is none: {fields}"
                )
            with naming(f"{name}: record {number}"):
                sized = [resized(v, image_size) if _is_image(v) else v for _, v in leaves]
            yield structure.sample(iter(sized))


def _is_image(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.dtype == torch.uint8 and value.dim() == 3 and len(value) == 3


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _read(dataset: Any, length: int | None) -> Iterator[object]:
    if length is None:
        yield from dataset
    elif hasattr(dataset, "__getitems__"):
        for start in range(0, length, BATCH):
            yield from dataset.__getitems__(list(range(start, min(start + BATCH, length))))
    else:
        for index in range(length):
            yield dataset[index]

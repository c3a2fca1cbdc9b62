"""The plan by which C threads gather batches: a dataset as the tree of csrc/io/table.h."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from array import array
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from ... import _C
from .array_dataset import ArrayDataset
from .columns import Column, ColumnDataset, NotArrays, column_of
from .converted import column_of_leaf
from .in_place import InPlace, images_of, row_numbers
from .structure import LEAF, Structure

ROWS, CHOSEN, JOINED = 0, 1, 2  # kinds of nodes
NO_INDICES = torch.empty(0, dtype=torch.int64, device="cpu")
MOST_THREADS = 4  # without num_workers: more do not help memory that two or three saturate


def _is(dataset: object, base: type) -> bool:
    """True if the dataset reads its samples as `base` does: a subclass may do it differently."""
    if not isinstance(dataset, base):
        return False
    many = getattr(dataset, "__getitems__", None)  # torch asks the object
    names = ("__getitem__", "__len__")
    return all(getattr(type(dataset), name) is getattr(base, name) for name in names) and (
        getattr(many, "__func__", many) is getattr(base, "__getitems__", None)
    )


class GatherPlan:
    """The columns of a dataset, and which of their rows are its samples.

    Args:
        dataset: of a loader.

    Raises:
        NotArrays: it has samples that are not rows of arrays; says which and why.
    """

    gather: _C.Gather  # its threads, once it is started

    def __init__(self, dataset: Dataset[object]) -> None:
        self.structure = LEAF
        self.names: list[str] = []
        self.forms: tuple[Column, ...] = ()
        self.mapped = False
        self.in_place: InPlace | None = None
        self._dataset = dataset
        self._columns: list[Column] = []
        self._nodes: list[tuple[object, ...]] = []
        self._owners: list[object] = []
        self._add(dataset, "dataset")
        self.row_bytes = self._row_bytes()
        watched = (column.watched for column in self._columns)
        self._counting = [t for t in watched if t is not None and not t.is_inference()]

    def versions(self) -> list[int]:
        """Numbers that torch's operators increase when they write to the tensors."""
        return [tensor._version for tensor in self._counting]

    @property
    def gathered(self) -> tuple[Column, ...]:
        """The columns that the threads gather. A field that stays in place gives row numbers."""
        if self.in_place is None:
            return self.forms
        field = self.in_place.field
        return (*self.forms[:field], row_numbers(), *self.forms[field + 1 :])

    def leave_in_place(self, field: int) -> None:
        """Gathers row numbers instead of a field of images, if a Compose can read the images."""
        of_rows = [node for node in self._nodes if node[0] == ROWS]
        images = images_of(self.forms[field]) if len(of_rows) == 1 else None
        if images is not None:
            self.in_place = InPlace(field, images)
            self.row_bytes = self._row_bytes()

    def _row_bytes(self) -> int:
        """Bytes of a sample in a batch."""
        prototypes = [form.prototype for form in self.gathered]
        return sum(math.prod(p.shape[1:]) * p.element_size() for p in prototypes)

    def start(self, slots: _C.Slots, workers: int) -> GatherPlan:
        """Starts the threads of this plan, or of a new one of the same dataset if tensors moved.

        Raises:
            NotArrays: as the constructor.
        """
        plan = self
        while True:
            plan.gather = plan._threads(slots, workers)
            if all(column.is_current for column in plan._columns):
                return plan
            in_place, structure, plan = plan.in_place, plan.structure, GatherPlan(self._dataset)
            if in_place is not None and plan.structure == structure:
                plan.leave_in_place(in_place.field)

    def _threads(self, slots: _C.Slots, workers: int) -> _C.Gather:
        """One thread per worker, as far as there are cores.

        The consumer copies too, and needs a core. Threads that wait for a file need none.
        """
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        threads = min(cores if self.mapped else max(1, cores - 1), workers or MOST_THREADS)
        fields = tuple(form.spec for form in self.gathered)
        nodes = tuple(self._nodes)
        return _C.Gather(slots, fields, nodes, threads, self.mapped, tuple(self._owners))

    def _add(self, dataset: Any, name: str) -> tuple[int, int]:
        """Adds the nodes of a dataset; returns the number of its own, and its length."""
        if _is(dataset, TensorDataset):
            return self._add_tensors(dataset, name)
        if _is(dataset, ArrayDataset):
            columns = tuple(column_of_leaf(array, f"{name}.{n}") for n, array in dataset.leaves)
            return self._add_rows(columns, dataset.structure, [n for n, _ in dataset.leaves], name)
        if isinstance(dataset, ColumnDataset) and _is(dataset, dataset._reads_rows_as()):
            structure, names = dataset._structure()
            rows = [self._add_rows(found, structure, names, name) for found in dataset._columns()]
            return self._add_joined(rows)
        if _is(dataset, Subset):
            return self._add_subset(dataset, name)
        if _is(dataset, ConcatDataset):
            parts = [
                self._add(part, f"{name}.datasets[{i}]") for i, part in enumerate(dataset.datasets)
            ]
            if [*itertools.accumulate(length for _, length in parts)] != dataset.cumulative_sizes:
                raise NotArrays(f"a part of {name} has changed its length")
            return self._add_joined(parts)
        raise NotArrays(f"{name} is a {type(dataset).__name__}, which is not known to be arrays")

    def _add_node(self, length: int, *node: object) -> tuple[int, int]:
        self._nodes.append(node)
        return len(self._nodes) - 1, length

    def _add_tensors(self, dataset: TensorDataset, name: str) -> tuple[int, int]:
        names = [f"tensors[{i}]" for i in range(len(dataset.tensors))]
        columns = tuple(
            column_of(tensor, f"{name}.{n}")
            for n, tensor in zip(names, dataset.tensors, strict=True)
        )
        if not columns:
            raise NotArrays(f"{name}.tensors is empty")
        if len({column.length for column in columns}) > 1:
            raise NotArrays(f"{name}.tensors have changed their lengths")
        structure = Structure(tuple, (), (LEAF,) * len(columns))
        return self._add_rows(columns, structure, names, name)

    def _add_rows(
        self, columns: tuple[Column, ...], structure: Structure, names: list[str], name: str
    ) -> tuple[int, int]:
        if not self.forms:
            self.forms, self.structure, self.names = columns, structure, names
        elif structure != self.structure:
            raise NotArrays(f"{name} has samples of another structure than the datasets before")
        for field, column, form in zip(names, columns, self.forms, strict=True):
            if column.form != form.form:
                raise NotArrays(f"{name}.{field} has another shape or type than in those before")
        self.mapped |= any(column.mapped for column in columns)
        self._columns += columns
        self._owners += (column.owner for column in columns)
        places = tuple((column.address, column.stride, column.watched) for column in columns)
        return self._add_node(columns[0].length, ROWS, columns[0].length, places)

    def _add_joined(self, parts: list[tuple[int, int]]) -> tuple[int, int]:
        if len(parts) == 1:
            return parts[0]
        return self._add_node(
            sum(length for _, length in parts), JOINED, tuple(number for number, _ in parts)
        )

    def _add_subset(self, dataset: Subset[object], name: str) -> tuple[int, int]:
        child, _ = self._add(dataset.dataset, f"{name}.dataset")
        indices: Any = dataset.indices
        if type(indices) is range:
            step = (0, indices.start, indices.step)
            return self._add_node(len(indices), CHOSEN, child, len(indices), *step)
        chosen = _as_int64(indices, f"{name}.indices")
        self._owners.append(chosen)
        node = (CHOSEN, child, len(chosen), chosen.data_ptr(), 0, 0)
        return self._add_node(len(chosen), *node)


def _as_int64(indices: Any, name: str) -> torch.Tensor:
    """A copy of the indices: the threads read them, and the user may change them.

    Raises:
        NotArrays: they are not integers that can be read without Python's help.
    """
    kind, numpy = type(indices), sys.modules.get("numpy")
    if kind in (list, tuple) and {*map(type, indices)} <= {int}:
        with contextlib.suppress(OverflowError):
            copied = array("q", indices)
            return torch.frombuffer(copied, dtype=torch.int64) if copied else NO_INDICES
    elif kind is torch.Tensor:
        if (indices.dtype, indices.dim(), indices.device.type) == (torch.int64, 1, "cpu"):
            return torch.clone(indices, memory_format=torch.contiguous_format)
    elif numpy and kind is numpy.ndarray and indices.ndim == 1 and indices.dtype.kind == "i":
        return torch.from_numpy(indices.astype("int64"))
    raise NotArrays(f"{name} are not a list, range, tensor or array of plain integers")

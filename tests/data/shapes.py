"""Kinds of datasets and batches, for comparisons with torch's loader."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

Point = namedtuple("Point", ["x", "y"])


class Mapped(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make = make
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Batched(Mapped):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class Streamed(IterableDataset[Any]):
    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make = make
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.count))


def number(i: int) -> int:
    return i


def text(i: int) -> str:
    return f"sample {i}"


def tensor(i: int) -> torch.Tensor:
    return torch.full((4,), float(i))


def varying(i: int) -> torch.Tensor:
    return torch.full((i % 5 + 1,), i)


def array(i: int) -> Any:
    return np.full(4, i)


def pair(i: int) -> tuple[torch.Tensor, int]:
    return tensor(i), i


def point(i: int) -> Point:
    return Point(tensor(i), i)


def record(i: int) -> dict[str, Any]:
    return {"x": tensor(i), "y": i, "name": text(i)}


def nested(i: int) -> dict[str, Any]:
    return {"a": {"b": (i, [tensor(i), float(i)])}}


def lists(i: int) -> list[list[int]]:
    return [[i, i + 1], [i + 2, i + 3]]


def maybe(i: int) -> int | None:
    return None if i % 3 else i


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def padded_with_lengths(samples: list[torch.Tensor]) -> dict[str, Any]:
    return {"x": padded(samples), "lengths": [len(sample) for sample in samples]}


# name: the kind of dataset, what makes a sample, and options of the loader
SHAPES: dict[str, tuple[Callable[[Callable[[int], Any], int], Any], Any, dict[str, Any]]] = {
    "numbers": (Mapped, number, {}),
    "strings": (Mapped, text, {}),
    "tensors": (Mapped, tensor, {}),
    "arrays": (Mapped, array, {}),
    "tuples": (Mapped, pair, {}),
    "namedtuples": (Mapped, point, {}),
    "dicts": (Mapped, record, {}),
    "nested": (Mapped, nested, {}),
    "lists of lists": (Mapped, lists, {}),
    "lists as they are": (Mapped, lists, {"collate_fn": as_list}),
    "with None": (Mapped, maybe, {"collate_fn": as_list}),
    "varying lengths": (Mapped, varying, {"collate_fn": as_list}),
    "padded": (Mapped, varying, {"collate_fn": padded}),
    "padded with lengths": (Mapped, varying, {"collate_fn": padded_with_lengths}),
    "a batch at a time": (Batched, pair, {}),
    "shuffled": (Mapped, number, {"shuffle": True}),
    "one by one": (Mapped, tensor, {"batch_size": None}),
    "one by one, shuffled": (Mapped, pair, {"batch_size": None, "shuffle": True}),
    "stream": (Streamed, number, {}),
    "stream of tuples": (Streamed, pair, {"drop_last": True}),
    "stream of strings": (Streamed, text, {}),
    "stream, one by one": (Streamed, tensor, {"batch_size": None}),
}

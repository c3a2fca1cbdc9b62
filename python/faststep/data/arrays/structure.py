"""Samples made of several arrays: dicts, lists, tuples and named tuples, in any nest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Structure:
    """The containers around the leaves of a sample. A leaf itself has `kind` None."""

    kind: type | None
    keys: tuple[object, ...] = ()  # of a dict
    children: tuple[Structure, ...] = ()

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if its batch is a list of all leaves."""
        return self.kind in (list, tuple) and all(child.kind is None for child in self.children)

    def leaf_at(self, key: object) -> int | None:
        """The number of the leaf that is `batch[key]`; None where that is none."""
        if self.kind is dict:
            places = [i for i, name in enumerate(self.keys) if name == key]
        else:
            length = len(self.children)
            places = [key % length] if isinstance(key, int) and -length <= key < length else []
        if not places or self.children[places[0]].kind is not None:
            return None
        return sum(child.leaves for child in self.children[: places[0]])

    @property
    def leaves(self) -> int:
        return 1 if self.kind is None else sum(child.leaves for child in self.children)

    def container_types(self) -> set[type]:
        found = {self.kind} if self.kind is not None else set()
        return found.union(*(child.container_types() for child in self.children))

    def sample(self, leaves: Iterator[object]) -> object:
        """A sample, in the containers it came in."""
        return self._build(leaves, tuple)

    def batch(self, leaves: Iterator[object]) -> object:
        """A batch, in the containers that torch's default_collate makes: tuples become lists."""
        return self._build(leaves, list)

    def _build(
        self, leaves: Iterator[object], of_tuple: Callable[[list[object]], object]
    ) -> object:
        if self.kind is None:
            return next(leaves)
        built = [child._build(leaves, of_tuple) for child in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, built, strict=True))
        if self.kind is list:
            return built
        return of_tuple(built) if self.kind is tuple else self.kind(*built)


LEAF = Structure(None)


def flatten(data: Any, name: str = "data") -> tuple[Structure, list[tuple[str, Any]]]:
    """The structure of `data`, and its leaves with their names: `data['image']`, `data[0]`."""
    kind = type(data)
    if kind is dict:
        parts = [(f"{name}[{key!r}]", value) for key, value in data.items()]
        keys = tuple(data)
    elif kind in (list, tuple) or (isinstance(data, tuple) and hasattr(data, "_fields")):
        parts = [(f"{name}[{i}]", value) for i, value in enumerate(data)]
        keys = ()
    else:
        return LEAF, [(name, data)]
    flat = [flatten(value, part) for part, value in parts]
    return (
        Structure(kind, keys, tuple(structure for structure, _ in flat)),
        [leaf for _, leaves in flat for leaf in leaves],
    )

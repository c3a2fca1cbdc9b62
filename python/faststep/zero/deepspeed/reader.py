"""Reads a configuration of DeepSpeed key by key, and knows which keys nobody has read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

Path = str | os.PathLike[str]

AUTO = "auto"
_NUMBER = (int, float)
_WORDS = {bool: "true or false", int: "an integer", dict: "an object", str: "a string"}


class Reader:
    """A configuration.

    Args:
        config: a file of JSON, or what it would have.
    """

    def __init__(self, config: Path | Mapping[str, Any]) -> None:
        self.name = "the configuration" if isinstance(config, Mapping) else os.fspath(config)
        self.values = dict(config) if isinstance(config, Mapping) else _loaded(config)
        self._read: set[str] = set()

    def error(self, key: str, problem: str) -> ValueError:
        """What to raise for a value."""
        return ValueError(f"{self.name}: {key} {problem}")

    def raw(self, key: str) -> Any:
        """A value as it is written; None if there is none."""
        found: Any = self.values
        path = key.split(".")
        for number, name in enumerate(path):
            if not isinstance(found, Mapping):
                where = ".".join(path[:number])
                raise self.error(where, f"must be an object, not {found!r}")
            found = found.get(name)
            if found is None:
                return None
        return found

    def take(self, key: str, default: Any, *kinds: type) -> Any:
        """A value of one of these types, read; the default if there is none, or it is "auto"."""
        value = self.raw(key)
        if value is None or value == AUTO:
            return default
        is_bool = isinstance(value, bool)
        if not isinstance(value, kinds) or (is_bool and bool not in kinds):
            words = "a number" if kinds == _NUMBER else " or ".join(_WORDS[k] for k in kinds)
            raise self.error(key, f"must be {words}, not {value!r}")
        self.mark(key)
        return value

    def number(self, key: str, default: Any) -> Any:
        """One of them that is a number."""
        return self.take(key, default, *_NUMBER)

    def mark(self, key: str) -> None:
        """Note that a value, or all in a section, is heeded."""
        self._read.add(key)

    def section(self, key: str, strict: bool) -> dict[str, Any]:
        """A section's values, each of which is read.

        With `strict` ValueError for one that is "auto".
        """
        found: dict[str, Any] = dict(self.take(key, {}, dict))
        for name in found if strict else ():
            if found[name] == AUTO:
                raise self.error(
                    f"{key}.{name}",
                    'is "auto", which only transformers\' Trainer fills in: write a value',
                )
        return found

    def unread(self) -> tuple[str, ...]:
        """The keys that were not read, dotted; a section of which none was read is one of them."""
        return tuple(self._unread(self.values, ""))

    def _unread(self, values: Mapping[str, Any], above: str) -> Iterator[str]:
        for name, value in values.items():
            key = above + name
            if key in self._read or value is None:
                continue
            if isinstance(value, Mapping) and any(one.startswith(f"{key}.") for one in self._read):
                yield from self._unread(value, f"{key}.")
            else:
                yield key


def _loaded(path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        twice = next((key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"{os.fspath(path)}: {twice} is there twice")
        return found

    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file, object_pairs_hook=once)
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)} must have an object, not {values!r:.40}")
    return values

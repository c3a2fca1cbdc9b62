"""The result of `convert`: a directory of .npy files, and a manifest that describes them.

A field is one file of rows ("rows"), or items one after another with a file of the places where
the value of each sample begins ("ragged", "text", "bytes").
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from ..arrays.structure import LEAF, Structure
from .common import PathLike, naming, open_regular, position
from .mapped import MappedArrays, map_npy, reopened, viewed_as

MANIFEST = "faststep.json"
FORMAT, VERSION = "faststep arrays", 1
WRITTEN = re.compile(r"[A-Za-z0-9_-]+(\.offsets)?\.npy")  # what names of files are like
KINDS = ("rows", "ragged", "text", "bytes")
CONTAINERS = {"dict": dict, "list": list, "tuple": tuple}


def structure_to_json(structure: Structure) -> Any:
    """The containers of a sample for a manifest; None for a leaf.

    Raises:
        TypeError: a container, or a key of a dict, is of another type than a manifest can hold.
    """
    if structure.kind is None:
        return None
    kind = structure.kind.__name__
    if CONTAINERS.get(kind) is not structure.kind:
        raise TypeError(f"samples have a {kind}; dict, list and tuple can be kept")
    if not all(isinstance(key, str) for key in structure.keys):
        raise TypeError(f"samples have the keys {structure.keys}; only texts can be kept")
    children = [structure_to_json(child) for child in structure.children]
    return {"kind": kind, "keys": list(structure.keys), "children": children}


def _structure_of(saved: Any) -> Structure:
    if saved is None:
        return LEAF
    children = tuple(_structure_of(child) for child in saved["children"])
    keys = tuple(saved["keys"])
    if saved["kind"] == "dict" and len({*keys}) != len(children):
        raise ValueError(f"a dict has the keys {keys} for {len(children)} values")
    return Structure(CONTAINERS[saved["kind"]], keys, children)


def write_manifest(
    folder: str, length: int, structure: object, fields: list[dict[str, Any]]
) -> None:
    """Writes the manifest beside the arrays, and waits until the disk has it."""
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        head = {"format": FORMAT, "version": VERSION, "length": length}
        json.dump({**head, "sample": structure, "fields": fields}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


class RaggedArrays(Dataset[Any]):
    """Samples with a field that varies in length: token sequences, texts, encoded images.

    A sample has the containers of the source, with a tensor, str or bytes for each field.
    """

    def __init__(self, path: str, structure: Structure, fields: list[_Field]) -> None:
        self.path = path
        self.structure = structure
        self.fields = fields

    def __len__(self) -> int:
        return self.fields[0].length

    def __getitem__(self, index: int) -> Any:
        at = position(index, len(self), self.path)
        return self.structure.sample(self._value(field, at) for field in self.fields)

    def _value(self, field: _Field, at: int) -> Any:
        with naming(f"{self.path}: field {field.name!r}, record {at}"):
            return field.value(at)

    def form(self) -> list[tuple[str, str, int]]:
        """Name, kind and number of the values of each field."""
        return [(field.name, field.kind, field.length) for field in self.fields]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return reopened, (open_manifest, (self.path,), self.form())


class _Field:
    """A field of a manifest, with its files mapped."""

    def __init__(self, folder: str, saved: dict[str, Any], length: int) -> None:
        self.name, self.kind, self.length = saved["name"], saved["kind"], length
        if self.kind not in KINDS:
            raise ValueError(f"field {self.name!r} is of the kind {self.kind!r}")
        path = _inside(folder, saved["file"])
        self.items = map_npy(path)
        if saved["dtype"] is not None and self.items.dtype.name != saved["dtype"]:
            dtype = getattr(torch, saved["dtype"])
            if not isinstance(dtype, torch.dtype) or dtype.itemsize != self.items.itemsize:
                raise ValueError(
                    f"field {self.name!r} is of the type {saved['dtype']!r}, its file has "
                    f"{self.items.dtype}"
                )
            self.items = viewed_as(self.items, dtype)
        rows = length
        if self.kind != "rows":
            self.offsets = map_npy(_inside(folder, saved["offsets"]))
            if self.offsets.dtype.name != "int64" or self.offsets.shape != (length + 1,):
                raise ValueError(f"{saved['offsets']} does not have {length + 1} offsets")
            rows = int(self.offsets[-1])
        if not self.items.ndim or len(self.items) != rows:
            raise ValueError(f"{saved['file']} has the shape {self.items.shape}, not {rows} rows")

    def value(self, at: int) -> Any:
        import numpy

        if self.kind == "rows":
            part = self.items[at]
        else:
            start, end = int(self.offsets[at]), int(self.offsets[at + 1])
            if not 0 <= start <= end <= len(self.items):
                raise ValueError(f"items {start} to {end} are not inside its file")
            part = self.items[start:end]
        if isinstance(part, torch.Tensor):
            return part.clone()
        if self.kind == "bytes":
            return part.tobytes()
        if self.kind == "text":
            return part.tobytes().decode("utf-8")
        return torch.from_numpy(numpy.array(part))


def _inside(folder: str, name: str) -> str:
    if not name or os.path.basename(name) != name:
        raise ValueError(f"{name!r} is not the name of a file beside the manifest")
    return os.path.join(folder, name)


def _read(folder: str) -> dict[str, Any]:
    with open_regular(os.path.join(folder, MANIFEST)) as file:
        saved = json.load(file)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(f"this is no manifest of {FORMAT}")
    if saved["version"] != VERSION:
        raise ValueError(f"version {saved['version']}; this faststep reads {VERSION}")
    return saved


def files_of(folder: str) -> list[str]:
    """The files beside the manifest in `folder` which it says were written with it.

    Raises:
        FormatError: the manifest is damaged, or names a file that is not of `convert`'s.
    """
    path = os.path.join(folder, MANIFEST)
    names: list[str] = []
    with naming(path, AttributeError, RecursionError):
        for field in _read(folder)["fields"]:
            names += [field["file"], *([field["offsets"]] if "offsets" in field else [])]
        for name in names:
            if not WRITTEN.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a file that belongs to it")
    return names


def open_manifest(path: PathLike) -> MappedArrays | RaggedArrays:
    """Open the result of `convert`: an ArrayDataset unless a field varies in length.

    Raises:
        FormatError: the manifest or a file is damaged.
    """
    folder = os.fspath(path)
    name = os.path.join(folder, MANIFEST)
    with naming(name, AttributeError, RecursionError):
        saved = _read(folder)
        if type(saved["length"]) is not int or saved["length"] < 0:
            raise ValueError(f"the length is {saved['length']!r}")
        structure = _structure_of(saved["sample"])
        fields = [_Field(folder, field, saved["length"]) for field in saved["fields"]]
        if not fields or structure.leaves != len(fields):
            raise ValueError(f"{len(fields)} fields for {structure.leaves} places in a sample")
        if any(field.kind != "rows" for field in fields):
            return RaggedArrays(folder, structure, fields)
        data = structure.sample(field.items for field in fields)
        return MappedArrays(data, open_manifest, folder)

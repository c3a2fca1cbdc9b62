"""``python -m faststep consolidate``: the weights of a checkpoint as one safetensors file."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .console import CommandError, ProgressBar

HELP = "write the weights of a checkpoint as one safetensors file, without its optimizer"
NAMES = ("model", "state_dict", "model_state_dict", "module")  # of the model in a checkpoint
EXTRA = "_extra_state"  # ends the name under which a module saves what is no tensor
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip

Keys = tuple[str, ...]  # those of the dicts, from the outermost to the innermost


class Weight(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Entries = dict[Keys, Weight | None]  # None for what is no tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``consolidate``."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder of torch.distributed.checkpoint, of any number of ranks, or a file of "
        "torch.save; the index of such a folder is a pickle, which can run code",
    )
    parser.add_argument("out", metavar="OUT", help="the .safetensors file to write or replace")
    parser.add_argument(
        "--key",
        help="where the model's state dict is in the checkpoint: app.model for "
        "{'app': {'model': ...}}, '' for the whole checkpoint; default: it is looked for",
    )


def run(arguments: argparse.Namespace) -> None:
    """Find the model, and write one tensor after the other."""
    source, out = Path(arguments.checkpoint), Path(arguments.out)
    if out.is_dir() or not out.parent.is_dir():
        problem = "is a folder" if out.is_dir() else "is in a folder that does not exist"
        raise CommandError(f"{out} {problem}")
    if out.exists() and source.exists() and out.samefile(source):
        raise CommandError(f"{out} is the checkpoint itself")
    with _naming(source):
        entries = _entries_of_folder(source) if source.is_dir() else _entries_of_file(source)
    prefix = _model_in(source, entries, arguments.key)
    inside = {keys[len(prefix) :]: one for keys, one in entries.items() if _is_in(keys, prefix)}
    weights = {keys[0]: one for keys, one in inside.items() if len(keys) == 1 and one is not None}
    left_out = sorted({keys[0] for keys in inside} - weights.keys())
    for name, one in weights.items():
        if one.dtype not in DTYPES:
            raise CommandError(f"{source}: safetensors has no type for {name!r}, {one.dtype}")
    _write(source, out, weights)
    size = sum(one.nbytes for one in weights.values()) / 1e6
    where = f"{'.'.join(prefix)!r} in {source}" if prefix else source
    print(f"{out}: {len(weights)} tensors, {size:.1f} MB, of {where}")
    if left_out:
        print(f"Left out, as they are no tensors: {', '.join(left_out)}")


@contextlib.contextmanager
def _naming(path: Path, what: str = "") -> Iterator[None]:
    """Report what torch raises for a damaged file, which may be any error, with the file's name."""
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CommandError(f"{path} cannot be read{what}: {said}") from error


def _is_in(keys: Keys, prefix: Keys) -> bool:
    return keys[: len(prefix)] == prefix


def _model_in(source: Path, entries: Entries, key: str | None) -> Keys:
    """The keys of the model's state dict: of a dict that has tensors, and is no optimizer's."""
    holders: dict[Keys, int] = {}  # dicts, and how many tensors they have
    optimizers = set()
    for keys, weight in entries.items():
        if weight is not None:
            holders[keys[:-1]] = holders.get(keys[:-1], 0) + 1
        for depth, part in enumerate(keys):
            if part.partition(".")[0] == "param_groups":  # "param_groups.w.lr" in a flat one
                optimizers.add(keys[:depth])
    models = [
        keys
        for keys in holders
        if not any(part.endswith(EXTRA) for part in keys)
        and not any(_is_in(keys, optimizer) for optimizer in optimizers)
    ]
    if key is not None:
        found = [keys for keys in holders if ".".join(keys) == key]
    else:
        found = models if len(models) == 1 else [k for k in models if k and k[-1] in NAMES]
    if len(found) == 1:
        return found[0]
    there = "; ".join(f"{'.'.join(k)!r} has {holders[k]} tensors" for k in models) or (
        f"no tensors but an optimizer's; its keys are {sorted({k[0] for k in entries})}"
    )
    problem = "which model is not clear, pass --key" if key is None else f"no tensors in {key!r}"
    raise CommandError(f"{source}: {problem if models else 'there is no model'}: {there}")


# ---- checkpoints


def _entries_of_file(source: Path) -> Entries:
    """The content of a file of torch.save. Its tensors are mapped, and read when they are used."""
    content = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(content, Mapping):
        raise CommandError(f"{source} has a {type(content).__name__}, and no dict")
    entries: Entries = {}
    for keys, value in _leaves(content, ()):
        entries[keys] = None
        if isinstance(value, Tensor):
            shape, read = tuple(value.shape), _reader(source, keys[-1], value)
            entries[keys] = Weight(shape, value.dtype, read)
    return entries


def _leaves(content: Mapping[Any, Any], above: Keys) -> Iterator[tuple[Keys, Any]]:
    for key, value in content.items():
        keys = (*above, str(key))
        if isinstance(value, Mapping):
            yield from _leaves(value, keys)
        else:
            yield keys, value


def _reader(source: Path, name: str, value: Tensor) -> Callable[[], Tensor]:
    def read() -> Tensor:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            kind = f"a {type(value).__name__} of layout {value.layout}"
        elif value.is_meta or value.is_quantized:
            kind = "on the meta device" if value.is_meta else "quantized"
        else:
            return value.detach().resolve_neg()
        raise CommandError(f"{source}: {name!r} is {kind}, and no whole dense tensor")

    return read


def _entries_of_folder(source: Path) -> Entries:
    """The content of a torch.distributed.checkpoint folder, whose tensors are read one by one."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not (source / ".metadata").is_file():
        raise CommandError(
            f"{source} has no file .metadata: it is no torch.distributed.checkpoint, or saving "
            "has not come to its end"
        )
    reader = FileSystemReader(source)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    stored: dict[str, list[Any]] = {}
    for index, place in metadata.storage_data.items():
        stored.setdefault(index.fqn, []).append(place)

    def weight_of(key: str, saved: TensorStorageMetadata) -> Weight:
        def read() -> Tensor:
            _check_files(source, key, saved, stored.get(key, []))
            values = torch.empty(saved.size, dtype=saved.properties.dtype)
            planner = DefaultLoadPlanner()
            planner.set_up_planner({key: values}, metadata, is_coordinator=True)
            reader.read_data(planner.create_local_plan(), planner).wait()
            return values

        return Weight(tuple(saved.size), saved.properties.dtype, read)

    paths = metadata.planner_data or {}
    return {
        tuple(map(str, paths.get(key, (key,)))): weight_of(key, saved)
        if isinstance(saved, TensorStorageMetadata)
        else None
        for key, saved in metadata.state_dict_metadata.items()
    }


def _check_files(source: Path, key: str, saved: Any, places: Sequence[Any]) -> None:
    """Raise CommandError if a file that has a part of a tensor is missing or too short."""
    if len(places) != len(saved.chunks) or (
        sum(chunk.sizes.numel() for chunk in saved.chunks) != saved.size.numel()
    ):
        raise CommandError(f"{source}: parts of {key!r} were not saved")
    for place in places:
        file = source / place.relative_path
        if not file.is_file():
            raise CommandError(f"{file} is missing, which has a part of {key!r}")
        if file.stat().st_size < place.offset + place.length:
            raise CommandError(f"{file} is cut off in {key!r}")


# ---- safetensors


def _write(source: Path, out: Path, weights: dict[str, Weight]) -> None:
    """Write a file beside `out`, and let it take its place when it is complete.

    The format: 8 bytes with the size of a JSON header, the header, and the values. Wide types come
    first, so that each tensor is aligned.
    """
    order = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        shape, dtype, _ = weights[name]
        begin, end = end, end + weights[name].nbytes
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    beside = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    bar = ProgressBar(len(order))
    try:
        with open(beside, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for number, name in enumerate(order):
                with _naming(source, f" at {name!r}"):
                    values = weights[name].read().contiguous()
                file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
                del values
                bar.show(number + 1, "tensors")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(out)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error}") from error
    finally:
        beside.unlink(missing_ok=True)
        bar.close()

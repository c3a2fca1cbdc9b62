"""`open`: the dataset in a file or directory, whose format is told by its content."""

from __future__ import annotations

import inspect
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, Dataset

from .arrow import open_arrow
from .common import FormatError, PathLike, naming, open_regular, walked
from .hdf5 import open_hdf5
from .images import IMAGE_SUFFIXES, ImageFolder
from .json_lines import GZIP, JsonLinesDataset, JsonLinesStream, begins_json_lines
from .lmdb_files import LMDBDataset
from .manifest import MANIFEST, open_manifest
from .mapped import open_npy, open_npz, open_safetensors
from .parquet import ParquetDataset
from .shards import ShardedStream, shard_names
from .tars import TarDataset
from .tfrecord import TFRecordDataset, begins_a_record
from .zips import ZipDataset, is_zip

HEAD = 4096
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Notes that stand beside data, in folders of the Hugging Face hub and of Spark.
NOTES = re.compile(
    r"README.*|LICENSE.*|.*\.md|.*\.lock|state\.json|dataset_infos?\.json|_SUCCESS"
    r"|_(common_)?metadata"
)
SAVED, SPLITS = "state.json", "dataset_dict.json"  # of save_to_disk
HDF5 = b"\x89HDF\r\n\x1a\n"


def _is_tar(head: bytes, size: int) -> bool:
    block = head[:512]
    if len(block) < 512 or not block.strip(b"\0"):
        return False
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")  # checks its sum
    except tarfile.HeaderError:
        return False
    return True


def _in_gzip(
    fits: Callable[[bytes, int], bool], most: int | None = None
) -> Callable[[bytes, int], bool]:
    """The same for a file in gzip, of which at most so many bytes are unpacked."""

    def fits_unpacked(head: bytes, size: int) -> bool:
        if not head.startswith(GZIP):
            return False
        unpacking = zlib.decompressobj(31)
        try:
            begin = unpacking.decompress(head, most or len(head))
        except zlib.error:
            return False
        return fits(begin, len(begin) + (not unpacking.eof))

    return fits_unpacked


def _is_npz(head: bytes, size: int) -> bool:
    """A zip archive whose first file is an array; torch's own files are zip archives too."""
    length = int.from_bytes(head[26:28], "little")
    return head.startswith(b"PK\3\4") and head[30 : 30 + length].endswith(b".npy")


def _is_safetensors(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= size - 8


def _is_arrow_stream(head: bytes, size: int) -> bool:
    length = int.from_bytes(head[4:8], "little")
    return head.startswith(b"\xff\xff\xff\xff") and 8 <= length <= size - 8


class FileFormat(NamedTuple):
    """A format of files.

    Args:
        name: what messages call it.
        fits: whether a file that begins with these bytes, of this size, is of this format.
        opener: makes a dataset of a file's name.
        many: the function takes a list of files, too.
    """

    name: str
    fits: Callable[[bytes, int], bool]
    opener: Callable[..., Dataset[object]]
    many: bool = False

    def open(self, path: str | list[str], options: dict[str, object]) -> Dataset[Any]:
        """The dataset.

        Raises:
            TypeError: the format has no such option.
        """
        parameters = [*inspect.signature(self.opener).parameters.values()][1:]
        names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            names |= {*inspect.signature(ShardedStream).parameters} - {"paths"}
        if unknown := sorted(options.keys() - names):
            has = f"there are {', '.join(sorted(names))}" if names else "it has none"
            where = path if isinstance(path, str) else ", ".join(path[:3])
            raise TypeError(f"{where}: {self.name} has no option {', '.join(unknown)}; {has}")
        return self.opener(path, **options)


LMDB = FileFormat("LMDB", lambda head, size: head[16:20] == b"\xde\xc0\xef\xbe", LMDBDataset)
CONVERTED = FileFormat("a converted directory", lambda head, size: False, open_manifest)
FOLDERS = FileFormat("a folder of images", lambda head, size: False, ImageFolder)
FORMATS = [
    FileFormat("npy", lambda head, size: head.startswith(b"\x93NUMPY"), open_npy),
    FileFormat("npz", _is_npz, open_npz),
    FileFormat(
        "HDF5",
        lambda head, size: any(head[at : at + 8] == HDF5 for at in (0, 512, 1024, 2048)),
        open_hdf5,
    ),
    FileFormat("Parquet", lambda head, size: head.startswith(b"PAR1"), ParquetDataset, many=True),
    FileFormat("Arrow", lambda head, size: head.startswith(b"ARROW1"), open_arrow),
    FileFormat("Arrow stream", _is_arrow_stream, open_arrow),
    LMDB,
    FileFormat("tar", _is_tar, TarDataset, many=True),
    FileFormat("tar in gzip", _in_gzip(_is_tar, 512), TarDataset, many=True),
    FileFormat("TFRecord", lambda head, size: begins_a_record(head), TFRecordDataset, many=True),
    FileFormat("safetensors", _is_safetensors, open_safetensors),
    FileFormat("zip", is_zip, ZipDataset, many=True),
    FileFormat("JSON lines", begins_json_lines, JsonLinesDataset, many=True),
    FileFormat("JSON lines in gzip", _in_gzip(begins_json_lines), JsonLinesStream, many=True),
]


def open(path: PathLike | Sequence[PathLike], **options: object) -> Dataset[Any]:
    """The dataset in a file, a directory or a list of files, whatever its format.

    Args:
        path: one of these, or a pattern as "train-{000..041}.tar" or with * and ?. A file is
            `.npy`, `.npz`, safetensors, HDF5, Parquet, Arrow (file or stream), LMDB, tar
            (WebDataset), zip, TFRecord or JSON lines; a directory has folders of images, one for
            each class, an LMDB environment, files of one of these formats, or what `convert` or
            `save_to_disk` of Hugging Face's datasets wrote. The content decides, not the name.
        **options: for the class of the format, as `columns` or `transform`.

    Returns:
        An ArrayDataset where the samples lie in the file as rows of arrays (`.npy`, safetensors,
        Arrow and HDF5 without compression, converted ones), or a ConcatDataset of several: the
        DataLoader's C threads gather them. Else a dataset of the format's own class; tars, and
        JSON lines in gzip, are iterable.

    Raises:
        FormatError: it is none of these, or damaged; lists what was tried.
        TypeError: the format has no such option; lists those that it has.
        ImportError: the format's library is not installed; names the extra that brings it.
    """
    if isinstance(path, (str, bytes, os.PathLike)):
        name = os.fsdecode(path)
        if URL.match(name):
            raise FormatError(f"{name} is a URL: files must be in this machine's file system")
        if os.path.isdir(name):
            return _open_folder(name, options)
        if not os.path.exists(name) and (names := shard_names(name)) != [name]:
            return _open_files(names, options)
        return format_of(name).open(name, options)
    if not isinstance(path, Sequence):
        raise TypeError(f"path must be a path, or a list of paths, not {path!r}")
    return _open_files([os.fsdecode(part) for part in path], options)


def format_of(path: str) -> FileFormat:
    """The format of a file, by its content; FormatError where it is none that is known."""
    with open_regular(path) as file:
        head = file.read(HEAD)
        size = os.fstat(file.fileno()).st_size
    for kind in FORMATS:
        if kind.fits(head, size):
            return kind
    if not size:
        raise FormatError(f"{path}: the file is empty")
    hint = "; gzip data must be decompressed first" if head.startswith(GZIP) else ""
    raise FormatError(
        f"{path}: its content, which begins with {head[:16]!r}, is none of "
        f"{', '.join(kind.name for kind in FORMATS)}{hint}. Bare token files are for TokenDataset"
    )


def _open_files(paths: list[str], options: dict[str, object]) -> Dataset[object]:
    if not paths:
        raise FormatError("no file was given")
    kinds = [format_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind is not kinds[0]:
            raise FormatError(f"{path} is {kind.name}, but {paths[0]} is {kinds[0].name}")
    if kinds[0].many:
        return kinds[0].open(paths, options)
    parts = [kinds[0].open(path, options) for path in paths]
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _open_folder(path: str, options: dict[str, object]) -> Dataset[object]:
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    if MANIFEST in names:
        return CONVERTED.open(path, options)
    if "data.mdb" in names:
        return LMDB.open(path, options)
    if SPLITS in names:
        raise FormatError(f"{path} has several datasets: open one of its folders, {names}")
    folders = [name for name in names if os.path.isdir(os.path.join(path, name))]
    if folders and any(_has_an_image(os.path.join(path, name)) for name in folders):
        return FOLDERS.open(path, options)
    kept = [name for name in names if name not in folders and not NOTES.fullmatch(name)]
    if SAVED in names and (saved := _saved(os.path.join(path, SAVED))):
        kept, folders = saved, []
    files = [os.path.join(path, name) for name in kept]
    if folders or not files:
        raise FormatError(
            f"{path}: the directory holds neither {MANIFEST}, data.mdb, folders with images "
            f"({', '.join(IMAGE_SUFFIXES)}), nor only files: {names[:5]}"
        )
    return _open_files(files, options)


def _saved(path: str) -> list[str]:
    """The names of the files of a dataset that save_to_disk wrote; it may keep others beside."""
    with open_regular(path) as file, naming(path, RecursionError):
        state = json.load(file)
        files = state.get("_data_files", ()) if isinstance(state, dict) else ()
        return [os.path.basename(part["filename"]) for part in files]


def _has_an_image(folder: str) -> bool:
    names = (name for _, names in walked(folder) for name in names)
    return any(name.lower().endswith(IMAGE_SUFFIXES) for name in names)

"""LMDB environments, by lmdb."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from collections.abc import Sequence

import torch

from ..types import Handle, Transform
from .common import FormatError, PathLike, library, naming, open_regular, position
from .handles import IndexedDataset

META = struct.Struct("<16xII8xQI92xQQ")  # magic, version, map size, page size, last page, txn
MAGIC = 0xBEEFC0DE
DATABASE = 48  # bytes of a record that is a database

# A process may open an environment once only: datasets of the same path share it.
_open: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _after_fork() -> None:
    """In a child, lmdb refuses to open what its parent has open; without locks it may be closed."""
    global _lock
    _lock = threading.Lock()
    for environment in [*_open.values()]:
        environment.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)


class LMDBDataset(IndexedDataset):
    """Values of an LMDB environment, in the order of their keys.

    Args:
        path: the directory with data.mdb, or the file of an environment without one.
        keys: which records, in which order; None, the default, for all.
        transform: makes a sample of a value. Default: a sample is the value's bytes.

    The environment is opened read-only and without locks, in each process for itself: it must not
    be written to meanwhile. LMDB keeps no checksums.

    Raises:
        FormatError: it is damaged or cut off; when a record is read, that its key is not there.
        ImportError: lmdb is not installed.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        keys: Sequence[bytes | str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        library("lmdb", "lmdb")
        super().__init__(os.path.realpath(path), transform)
        _check_size(self.path)
        if keys is not None:
            chosen = [key.encode() if isinstance(key, str) else bytes(key) for key in keys]
        else:
            with self:
                chosen = self._all_keys()
        # in two blocks: workers would copy the pages of a million objects as they count references
        self._key_ends = torch.tensor([len(key) for key in chosen], dtype=torch.int64).cumsum(0)
        self._keys = b"".join(chosen)

    def _open_handle(self) -> object:
        lmdb = library("lmdb", "lmdb")
        with _lock, naming(self.path, lmdb.Error):
            environment = _open.get(self.path)
            if environment is None:
                environment = _open[self.path] = lmdb.open(
                    self.path,
                    subdir=os.path.isdir(self.path),
                    readonly=True,
                    lock=False,  # no table of readers, whose slots forks would spoil
                    readahead=False,
                    meminit=False,
                    max_dbs=1,  # to see whether a record is a database
                )
            return environment

    def _all_keys(self) -> list[bytes]:
        with (
            naming(self.path, library("lmdb", "lmdb").Error),
            self._handle().begin(buffers=True) as transaction,
            transaction.cursor() as cursor,
        ):
            keys = []
            for key, value in cursor:
                keys.append(bytes(key))
                self._refuse_database(keys[-1], value, transaction)
            return keys

    def _refuse_database(self, key: bytes, value: Handle, transaction: Handle) -> None:
        if len(value) != DATABASE:
            return
        with contextlib.suppress(library("lmdb", "lmdb").Error), _lock:
            self._handle().open_db(key, txn=transaction, create=False)
            raise FormatError(
                f"{self.path} holds named databases ({key!r}), and only records of the main one "
                "are read: copy one to an environment of its own"
            )

    def key(self, index: int) -> bytes:
        """The key of a record."""
        at = position(index, len(self), self.path)
        return self._keys[int(self._key_ends[at - 1]) if at else 0 : int(self._key_ends[at])]

    def __len__(self) -> int:
        return len(self._key_ends)

    def _read(self, places: Sequence[int]) -> list[object]:
        lmdb = library("lmdb", "lmdb")
        keys = [self.key(place) for place in places]
        values = []
        with naming(self.path, lmdb.Error), self._handle().begin() as transaction:
            for place, key in zip(places, keys, strict=True):
                with naming(f"{self.path}: record {place}, key {key!r}", lmdb.Error):
                    value = transaction.get(key)
                    if value is None:
                        raise ValueError("there is no such key")
                    self._refuse_database(key, value, transaction)
                values.append(value)
        return values


def _check_size(path: str) -> None:
    """True if the file has all its pages: reading a page beyond its end would end the process."""
    name = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
    with open_regular(name) as file, naming(name, struct.error):
        size = os.fstat(file.fileno()).st_size
        first = META.unpack(file.read(META.size))
        if first[0] != MAGIC or first[1] != 1:
            raise FormatError(f"{name}: this is no LMDB environment of version 1")
        file.seek(first[3])
        second = META.unpack(file.read(META.size))
        newest = max(first, second, key=lambda meta: meta[5])
        needed = (newest[4] + 1) * first[3]
        if size < needed:
            raise FormatError(
                f"{name}: {size} bytes, but its pages end at {needed}: it was cut off, or has "
                "pages that were never written, which `mdb_copy -c` leaves out"
            )

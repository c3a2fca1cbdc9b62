"""Errors that name the place, and libraries that are extras, for all formats."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from ..types import Handle

SHOWN = 200  # characters

PathLike = str | os.PathLike[str]


class FormatError(ValueError):
    """A file is not what it should be; the message names it and, if there is one, the sample."""


def library(name: str, extra: str) -> Handle:
    """The module `name`, which comes with an extra of faststep.

    Raises:
        ImportError: it is not installed; says how it is.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise  # it is there, and lacks something itself
        raise ImportError(
            f"this format needs {name.split('.')[0]}, which is not installed: "
            f"pip install 'faststep[{extra}]'",
            name=error.name,
        ) from None


@contextlib.contextmanager
def naming(place: str, *more: type[Exception]) -> Iterator[None]:
    """Lets errors of bad content become a FormatError that begins with `place`.

    A file that is missing or not permitted keeps its error, which names it.
    """
    bad_content: tuple[type[Exception], ...] = (
        ValueError,
        TypeError,
        OSError,
        EOFError,
        LookupError,
        OverflowError,
        *more,
    )
    try:
        yield
    except (FormatError, FileNotFoundError, PermissionError, ImportError):
        raise
    except bad_content as error:
        raise FormatError(f"{place}: {str(error) or type(error).__name__}") from error


def open_regular(path: str) -> BinaryIO:
    """A file for reading; never waits for somebody to write to a pipe.

    Raises:
        FormatError: it is a pipe, a device or anything else but a file.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = os.fstat(number).st_mode
    if not stat.S_ISREG(kind):
        os.close(number)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise FormatError(f"{path} is not a file, but a pipe, a socket or a device")
    return open(number, "rb")


def walked(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder from this one on, with the names of the files in it; links are followed.

    A link to a folder that it lies in itself is left out.

    Raises:
        OSError: a folder may not be read; names it.
    """

    def refuse(error: OSError) -> None:
        raise error

    above: dict[str, frozenset[tuple[int, int]]] = {}
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        found = os.stat(place)
        own = above.pop(place, frozenset()) | {(found.st_dev, found.st_ino)}
        inside = {name: os.stat(os.path.join(place, name)) for name in folders}
        folders[:] = [n for n in folders if (inside[n].st_dev, inside[n].st_ino) not in own]
        above |= {os.path.join(place, name): own for name in folders}
        yield place, names


def position(index: int, length: int, name: str) -> int:
    """The place from the start that an index means, which counts from the end if negative."""
    at = index + length if index < 0 else index
    if not 0 <= at < length:
        raise IndexError(f"{name}: no record {index} among {length}")
    return at


def check_unchanged(path: str, was: object, now: object) -> None:
    """Compares what a dataset knows of a file with the file as it is opened anew.

    Raises:
        FormatError: they differ.
    """
    if was != now:
        raise FormatError(
            f"{path}: the file is not what it was when the dataset was made: it had "
            f"{str(was)[:SHOWN]}, and has {str(now)[:SHOWN]}"
        )


def file_mark(file: str | int) -> tuple[int, int, int]:
    """Which file it is, its size and when it was written last, in nanoseconds."""
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def same_rows(path: str, lengths: dict[str, int], choice: str) -> int:
    """The length that all fields have.

    Raises:
        FormatError: there is no field, or they differ.
    """
    if not lengths:
        raise FormatError(f"{path}: there is no array in it")
    (first, rows), *rest = lengths.items()
    for name, others in rest:
        if others != rows:
            raise FormatError(
                f"{path}: {name!r} has {others} rows, {first!r} has {rows}: choose fields "
                f"of one length with {choice}=[...]"
            )
    return rows

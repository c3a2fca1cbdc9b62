"""Where the elements of an HDF5 array lie: in its own file, or in others that it names."""

from __future__ import annotations

from ..types import Handle
from .common import FormatError, library

__all__ = ["refuse_other_files"]

MOST_LINKS = 100  # on the way to one array


def refuse_other_files(file: object, name: str, path: str) -> None:
    """
    Raises:
        FormatError: the array is read from other files, through an external link, external storage
            or virtual sources; names one.
    """
    _refuse(file, name, f"{path}: {name!r}", set())


def _refuse(file: object, name: str, place: str, seen: set[str]) -> None:
    array = _found(file, name, place)
    if array is None or not hasattr(array, "shape") or array.name in seen:
        return
    seen.add(array.name)
    if array.external:
        raise _other(place, array.external[0][0], "external storage")
    for source in array.virtual_sources() if array.is_virtual else []:
        if source.file_name != ".":
            raise _other(place, source.file_name, "a virtual source")
        if "%" in source.dset_name:
            raise _other(place, source.dset_name, "virtual sources with a pattern as a name")
        _refuse(file, source.dset_name, place, seen)


def _found(file: object, name: str, place: str) -> Handle:
    """The object that a name stands for, link by link; None if there is nothing."""
    h5py = library("h5py", "hdf5")
    found, parts, links = file, name.split("/")[::-1], 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if not isinstance(found, h5py.Group):
            return None
        link = found.get(part, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise _other(place, link.filename, "an external link")
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MOST_LINKS:
                raise FormatError(f"{place}: links lead to links without end")
            if link.path.startswith("/"):
                found = file
            parts += link.path.split("/")[::-1]
        elif link is None:
            return None
        else:
            found = found[part]
    return found


def _other(place: str, source: str, kind: str) -> FormatError:
    return FormatError(
        f"{place} is read from another file, {source!r} ({kind}), which is refused unless asked "
        "for: open it with external=True"
    )

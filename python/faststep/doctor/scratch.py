"""Lets a program write to a folder that is thrown away, where there may be no namespaces.

Python's functions for files, torch.save and torch.load see a folder with all changes above the
files that are there. Code of libraries that writes otherwise is refused by the kernel (Landlock),
as is TCP without the network. Forks share the folder, as ranks of a script are.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import io
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of all architectures
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_WRITE_FILE = 1 << 1
_CHANGES = (_WRITE_FILE | 0b1_1111_1111 << 4, 1 << 13, 1 << 14)  # by version; refer, truncate
_NETWORK_FROM, _NETWORK = 4, 0b11  # version; TCP's bind and connect
_KEPT = ("/dev/", "/proc/", "/sys/")
_OF_LINKS = ("lstat", "readlink")  # functions that do not follow them
_libc = ctypes.CDLL(None, use_errno=True)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def is_available(network: bool) -> bool:
    """True if the kernel refuses what this module cannot lead elsewhere.

    Args:
        network: the program may use the network.
    """
    return _version() >= (1 if network else _NETWORK_FROM)


def enter(folder: str, network: bool) -> None:
    """Let this process and its children write nowhere but in a folder.

    Args:
        folder: an empty one.
        network: let them use TCP.

    Raises:
        OSError: the kernel refuses it.
    """
    temporary = os.path.join(folder, "tmp")
    os.mkdir(temporary)
    os.environ["TMPDIR"] = tempfile.tempdir = temporary
    _restrict(folder, network)
    _Overlay(folder).install()


# ---- the kernel


def _version() -> int:
    """That of Landlock; below 1 if there is none."""
    return int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def _restrict(folder: str, network: bool) -> None:
    changes = functools.reduce(int.__or__, _CHANGES[: _version()])
    rules = _call(_CREATE_RULESET, struct.pack("QQ", changes, 0 if network else _NETWORK), 16, 0)
    try:
        for place, allowed in (("/dev", _WRITE_FILE), ("/dev/shm", changes), (folder, changes)):
            at = os.open(place, os.O_PATH)
            try:
                _call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", allowed, at), 0)
            finally:
                os.close(at)
        _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _call(_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _call(number: int, *args: int | bytes) -> int:
    return _check(_libc.syscall(number, *(_word(one) for one in args)))


def _word(one: int | bytes) -> ctypes.c_char_p | ctypes.c_size_t:
    return ctypes.c_char_p(one) if isinstance(one, bytes) else ctypes.c_size_t(one)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# ---- Python


class _Overlay:
    """A folder with all changes, above the files that are there.

    A file is known by its path without links, as the program sees it: its name. It lies at that
    place, or in the folder, if the program has changed it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._changes = os.path.join(self._folder, "files")
        self._removals = os.path.join(self._folder, "removed")  # names of files that are there
        self._removed: list[str] = []  # as far as that was read
        self._read_until = 0  # bytes of it
        with open(self._removals, "ab"):
            pass  # let it be there
        self._busy = threading.local()  # `is_on` while Python's own functions are meant

    def install(self) -> None:
        """Put this in the place of Python's functions."""
        for name in ("stat", "access", "chdir", "statvfs", *_OF_LINKS):
            self._put(os, name, self._read)
        for name in ("truncate", "chmod", "chown", "utime"):
            self._put(os, name, self._write)
        for name in ("unlink", "remove", "rmdir"):
            self._put(os, name, self._remove)
        for name in ("rename", "replace"):
            self._put(os, name, self._rename)
        for name in ("listdir", "scandir"):
            self._put(os, name, self._scan)
        self._put(os, "mkdir", self._make)
        self._put(os, "symlink", self._symlink)
        self._put(os, "link", self._link)
        self._put(os, "open", self._open_by_flags)
        self._put(builtins, "open", self._open)
        io.open = builtins.open
        self._put(torch, "save", self._save)
        self._put(torch, "load", self._load)
        shutil._use_fd_functions = False  # type: ignore[attr-defined]  # paths of folders, please

    def _put(self, module: Any, name: str, action: Callable[..., Any]) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._busy, "is_on", False) or kwargs.get("dir_fd") is not None:
                return function(*args, **kwargs)
            return action(function, *args, **kwargs)

        setattr(module, name, wrapped)
        for supporting in (os.supports_follow_symlinks, os.supports_fd, os.supports_dir_fd):
            if function in supporting:
                supporting.add(wrapped)

    @contextmanager
    def _directly(self) -> Iterator[None]:
        self._busy.is_on = True
        try:
            yield
        finally:
            self._busy.is_on = False

    # ---- where files are

    def _name(self, path: Any, follow: bool = True) -> str | None:
        """None for what is no path, and for paths that are left alone."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        folder, last = os.path.split(os.path.abspath(os.fsdecode(path)))
        name = self._outside(os.path.join(os.path.realpath(folder), last))
        if name is None or (name.startswith(_KEPT) and not name.startswith("/dev/shm/")):
            return None
        place = self._place(name)
        if follow and os.path.islink(place):
            return self._name(os.path.join(os.path.dirname(name), os.readlink(place)))
        return name

    def _outside(self, path: str) -> str | None:
        """The name of what lies at a path, None if it is temporary."""
        if path == self._changes or path.startswith(self._changes + "/"):
            return path[len(self._changes) :] or "/"
        return None if path.startswith(self._folder + "/") else path

    def _place(self, name: str) -> str:
        changed = self._changes + name
        is_changed = os.path.lexists(changed) or os.path.isfile(os.path.dirname(changed))
        return changed if is_changed or self._is_removed(name) else name

    def _is_removed(self, name: str) -> bool:
        if os.path.getsize(self._removals) > self._read_until:
            with open(self._removals, "rb") as file:
                file.seek(self._read_until)
                added = file.read().rpartition(b"\0")[0]  # what another rank has written wholly
            self._read_until += len(added) + 1 if added else 0
            self._removed += map(os.fsdecode, filter(None, added.split(b"\0")))
        return any(name == one or name.startswith(one + "/") for one in self._removed)

    def _named(self, path: Any, follow: bool = True) -> str | None:
        with self._directly():
            return self._name(path, follow)

    def _place_of(self, path: Any, follow: bool = True) -> Any:
        name = self._named(path, follow)
        with self._directly():
            return path if name is None else self._place(name)

    def _writable(self, path: Any, keeps: bool, follow: bool = True) -> Any:
        """The place of a file that is written, with what is in it if that is kept."""
        name = self._named(path, follow)
        if name is None:
            return path
        with self._directly():
            changed, before = self._changes + name, self._place(name)
            folder, last = os.path.split(name)
            if not os.path.isdir(self._place(folder)):
                return os.path.join(self._place(folder), last)  # which will be refused
            if os.path.isdir(before) and not keeps:
                return before  # which will be refused too
            os.makedirs(self._changes + folder, exist_ok=True)
            if keeps and before != changed and os.path.isdir(before):
                shutil.copytree(before, changed, symlinks=True)
            elif keeps and before != changed and os.path.lexists(before):
                self._copy_once(before, changed)
        return changed

    def _copy_once(self, before: str, changed: str) -> None:
        """Copy a file, unless another rank has done so meanwhile, and may have changed it."""
        copy = tempfile.mktemp(dir=self._folder)
        shutil.copy2(before, copy, follow_symlinks=False)
        with suppress(FileExistsError):
            os.link(copy, changed, follow_symlinks=False)
        os.unlink(copy)

    def _hide(self, name: str | None) -> None:
        """Let a file that is there be seen no more."""
        with self._directly():
            if name is not None and os.path.lexists(name):
                with open(self._removals, "ab") as file:
                    file.write(os.fsencode(name) + b"\0")

    def _entries(self, name: str) -> dict[str, os.DirEntry[str]]:
        """Those of a folder."""
        found: dict[str, os.DirEntry[str]] = {}
        with self._directly():
            if os.path.isdir(name):
                for entry in os.scandir(name):
                    if not self._is_removed(os.path.join(name, entry.name)):
                        found[entry.name] = entry
            if os.path.isdir(self._changes + name):
                found.update((entry.name, entry) for entry in os.scandir(self._changes + name))
        return found

    # ---- what the functions do

    def _read(self, function: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        follow = kwargs.get("follow_symlinks", True) and function.__name__ not in _OF_LINKS
        return function(self._place_of(path, follow), *args, **kwargs)

    def _write(self, function: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        follow = kwargs.get("follow_symlinks", True)
        return function(self._writable(path, keeps=True, follow=follow), *args, **kwargs)

    def _load(self, function: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self._place_of(f), *args, **kwargs)

    def _save(self, function: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return function(obj, self._writable(f, keeps=False), *args, **kwargs)

    def _open(self, function: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "x" in mode:
            place = self._new(file)
        elif set(mode) & set("wa+"):
            place = self._writable(file, "w" not in mode)
        else:
            place = self._place_of(file)
        return function(place, mode, *args, **kwargs)

    def _open_by_flags(self, function: Any, path: Any, flags: int, *args: Any, **kw: Any) -> Any:
        creates = flags & os.O_CREAT
        if creates and flags & os.O_EXCL:
            place = self._new(path)
        elif flags & _WRITES and (creates or os.path.lexists(self._place_of(path))):
            place = self._writable(path, keeps=not (creates and flags & os.O_TRUNC))
        else:
            place = self._place_of(path)
        return function(place, flags, *args, **kw)

    def _make(self, function: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self._new(path), *args, **kwargs)

    def _remove(self, function: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        name, place = self._named(path, follow=False), self._place_of(path, follow=False)
        is_folder = os.path.isdir(place) and not os.path.islink(place)
        takes_folders = function.__name__ == "rmdir"
        if name is not None and is_folder and takes_folders and self._entries(name):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if name is None or place != name or not os.path.lexists(place):
            function(self._place_of(path, follow=False), *args, **kwargs)  # another may be faster
        elif is_folder != takes_folders:
            number = errno.EISDIR if is_folder else errno.ENOTDIR
            raise OSError(number, os.strerror(number), path)
        self._hide(name)

    def _rename(self, function: Any, src: Any, dst: Any, **kwargs: Any) -> None:
        name, place = self._named(src, follow=False), self._writable(src, True, follow=False)
        function(place, self._writable(dst, keeps=True, follow=False), **kwargs)
        self._hide(name)

    def _symlink(self, function: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        function(src, self._new(dst), *args, **kwargs)

    def _link(self, function: Any, src: Any, dst: Any, **kwargs: Any) -> None:
        function(self._writable(src, keeps=True, follow=False), self._new(dst), **kwargs)

    def _new(self, path: Any) -> Any:
        """The place of a file that is made, or that of one that is in its way."""
        before = self._place_of(path, follow=False)
        with self._directly():
            is_there = os.path.lexists(before)  # not what another rank has made since
        return before if is_there else self._writable(path, keeps=False, follow=False)

    def _scan(self, function: Any, path: Any = ".") -> Any:
        name = self._named(path)
        if name is None or not os.path.isdir(self._place_of(path)):
            return function(self._place_of(path))
        found = self._entries(name)
        return list(found) if function.__name__ == "listdir" else _Entries(found)


class _Entries(AbstractContextManager["_Entries"]):
    """As os.scandir gives them."""

    def __init__(self, entries: dict[str, os.DirEntry[str]]) -> None:
        self._left = iter(entries.values())

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._left

    def __next__(self) -> os.DirEntry[str]:
        return next(self._left)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._left = iter(())

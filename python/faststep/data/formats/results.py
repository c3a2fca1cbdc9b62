"""The directory of a result of `convert`. It replaces an earlier result and nothing else."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat

from .common import FormatError
from .manifest import MANIFEST, files_of

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # Linux's


class Destination:
    """The directory that a result is for, and the hidden one beside it where it is written.

    Args:
        destination: the directory; a link to one stands for it.
        force: whether an earlier result there is replaced.

    Attributes:
        folder: where to write, once it is made.
        others: names in the destination that are not of the earlier result; they stay.

    Raises:
        FileExistsError: there is something at `destination`, and with `force` no earlier result.
        FileNotFoundError: it would not lie in a directory.
    """

    folder = ""

    def __init__(self, destination: str, force: bool) -> None:
        self.target = os.path.realpath(destination)
        self._force = force
        self._identity: tuple[int, int] | None = None
        written = self._written()
        names = os.listdir(self.target) if os.path.isdir(self.target) else []
        self.others = {*names} - written

    def make_folder(self) -> None:
        """Makes the hidden directory."""
        self.folder = _hidden_beside(self.target)
        self._identity = _identity(self.folder)

    def _written(self) -> set[str]:
        """The files of an earlier result in the destination, by its manifest.

        Raises: as the class.
        """
        parent = os.path.dirname(self.target)
        if not os.path.isdir(parent):
            raise FileNotFoundError(f"{parent} is not a directory")
        if not os.path.lexists(self.target):
            return set()
        if not self._force:
            raise FileExistsError(f"{self.target} exists")
        if not os.path.isdir(self.target):
            raise _not_ours(self.target, "it is not a directory")
        names = os.listdir(self.target)
        if not names:
            return set()
        if not self._is_plain(MANIFEST):
            raise _not_ours(self.target, f"it has no {MANIFEST}")
        try:
            written = {MANIFEST, *files_of(self.target)}
        except FormatError as error:
            raise _not_ours(self.target, str(error)) from error
        for name in names:
            if os.path.ismount(os.path.join(self.target, name)):
                raise _not_ours(self.target, f"another file system is mounted at {name!r} in it")
        return {name for name in names if name in written and self._is_plain(name)}

    def _is_plain(self, name: str) -> bool:
        """True if the destination has a file of this name, and no link to one."""
        try:
            return stat.S_ISREG(os.lstat(os.path.join(self.target, name)).st_mode)
        except FileNotFoundError:
            return False

    def take(self) -> None:
        """Puts what was written in its place.

        Raises:
            FileExistsError: something else is there since.
            OSError: it cannot be put there; or a file that is not of the earlier result cannot be
                put into the directory of the new one, and then says where it is.
        """
        _sync(self.folder)
        written = self._written()
        if not os.path.lexists(self.target):
            os.rename(self.folder, self.target)
        else:
            if not _exchange(self.folder, self.target):
                self._replace()
            _sync(os.path.dirname(self.target))
            self._clear(written)
        _sync(os.path.dirname(self.target))

    def _replace(self) -> None:
        """Lets the two directories change places, one after the other."""
        between = _hidden_beside(self.target)
        try:
            os.rename(self.target, between)
            os.rename(self.folder, self.target)
            os.rename(between, self.folder)
        except BaseException:
            if not os.path.lexists(self.target):
                os.rename(between, self.target)
            elif os.path.lexists(self.folder):
                os.rmdir(between)
            raise

    def _clear(self, written: set[str]) -> None:
        """Removes the earlier result, which lies in `folder`; moves the rest to the new one."""
        for name in sorted({*os.listdir(self.folder)} - written):
            old, new = os.path.join(self.folder, name), os.path.join(self.target, name)
            try:
                if os.path.lexists(new):
                    raise FileExistsError(f"{new} exists")
                os.rename(old, new)
            except OSError as error:
                raise OSError(
                    f"{self.target} is the new result; {name!r}, which was beside the earlier one, "
                    f"is in {self.folder}, as it could not be moved: {error}"
                ) from error
        for name in written:
            os.unlink(os.path.join(self.folder, name))
        os.rmdir(self.folder)

    def leave(self) -> None:
        """Removes what was written, after an error; never what was in the destination."""
        if self._identity is not None and _identity(self.folder) == self._identity:
            shutil.rmtree(self.folder, ignore_errors=True)


def _not_ours(target: str, reason: str) -> FileExistsError:
    return FileExistsError(f"{target} was not made by this command, and is not replaced: {reason}")


def _identity(folder: str) -> tuple[int, int] | None:
    """The marks that tell a directory from another one at the same place; None without one."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _hidden_beside(target: str) -> str:
    parent, name = os.path.split(target)
    path = os.path.join(parent, f".{name}-{secrets.token_hex(4)}")
    os.mkdir(path)
    return path


def _sync(folder: str) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _exchange(one: str, other: str) -> bool:
    """Lets two files change places, at once; False where the system or its file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number), one, None, other)

"""Runs a program that may write wherever it likes, and leaves nothing behind.

The program runs in namespaces of its own: it sees the file system through an overlay in memory, its
processes end with it, and it has a network of its own, of which only the loopback is up. Where the
kernel lets this user make no namespaces, as in most containers, see `scratch`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

# Of a sandbox: namespaces, a folder for what is written (`scratch`), or none at all.
Kind = Literal["namespaces", "scratch", "none"]

_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18  # flags of mount(2)
_OWN = 0x00020000 | 0x08000000 | 0x20000000  # CLONE_NEWNS, _NEWIPC and _NEWPID, for unshare(2)
_AS_IT_IS = {"sysfs", "cgroup", "cgroup2"}  # kinds of file systems without files
_OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "MLFLOW_TRACKING_URI": "file:./mlruns"}


def sandboxed(command: Sequence[str], network: bool = False) -> list[str]:
    """The command that runs another one, which begins by calling `enter`, in namespaces."""
    kinds = ["--user", "--map-root-user", "--mount", "--pid", "--ipc", "--fork", "--kill-child"]
    return ["unshare", *kinds, *([] if network else ["--net"]), "--", *command]


def is_available() -> bool:
    """True if this system lets this user make a sandbox."""
    if shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory(prefix="faststep-") as empty:
        command = sandboxed([sys.executable, __file__, empty])
        try:
            done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def environment(variables: Mapping[str, str], network: bool) -> dict[str, str]:
    """The variables of a program inside: trackers of experiments stay on this machine."""
    return dict(variables) if network else {**variables, **_OFFLINE}


def leave_others() -> None:
    """Let this process go on in a child with namespaces of its own, inside of a sandbox.

    With the child all processes that it has started end, and then this one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_OWN):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


def enter(empty: str) -> None:
    """Let this process, inside of a sandbox, see all files through overlays in memory.

    Args:
        empty: an empty folder, where overlays are put together.

    Raises:
        OSError: the kernel refuses it.
    """
    folder = os.getcwd()
    kinds = _mounts()
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", empty, "tmpfs", 0)
    root = Path(empty, "root")
    _show("/", root, kinds, empty)
    _mount("tmpfs", str(root / "dev/shm"), "tmpfs", 0)
    os.chroot(root)
    os.chdir(folder)
    _start_loopback()


def _show(place: str, at: Path, kinds: Mapping[str, str], empty: str) -> None:
    """Make a folder visible at another place, whose files there are written in memory."""
    at.mkdir(parents=True, exist_ok=True)
    if place == "/proc":
        _mount("proc", str(at), "proc", 0)  # of the processes inside
    elif place == "/dev" or kinds.get(place) in _AS_IT_IS:
        _mount(place, str(at), None, _BIND | _REC)
    elif not any(inner.startswith(place.rstrip("/") + "/") for inner in kinds):
        upper, work = (Path(empty, kind, place.strip("/")) for kind in ("upper", "work"))
        for one in (upper, work):
            one.mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={_quoted(place)},upperdir={_quoted(str(upper))}"
        _mount(
            "overlay", str(at), "overlay", 0, f"{options},workdir={_quoted(str(work))},userxattr"
        )
    else:  # the kernel lets nobody see below what is mounted inside: one by one
        for entry in os.scandir(place):
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), at / entry.name)
            elif entry.is_dir() and os.access(entry.path, os.X_OK):
                _show(entry.path, at / entry.name, kinds, empty)
            elif entry.is_file() and os.access(entry.path, os.R_OK):
                shutil.copy2(entry.path, at / entry.name)


def _mounts() -> dict[str, str]:
    """The kinds of all file systems that are mounted, by their places."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        found[left.split()[4].encode().decode("unicode_escape")] = right.split()[0]
    return found


def _quoted(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    args = [text.encode() if text is not None else None for text in (source, target, kind)]
    if libc.mount(*args, ctypes.c_ulong(flags), options.encode() or None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {source} on {target}: {os.strerror(number)}")


def _start_loopback() -> None:
    up, loopback = 0x8914, b"lo"  # SIOCSIFFLAGS
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", loopback, 1)
        try:
            fcntl.ioctl(any_socket, up, request)
        except PermissionError:
            return  # the network is this machine's own


if __name__ == "__main__":
    enter(sys.argv[1])

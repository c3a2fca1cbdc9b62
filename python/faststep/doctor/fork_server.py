"""Starts runs of a script from a process that has imported torch, which takes seconds each time."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .._torch.compiler import import_compiler
from ..memory.activations import status

LONGEST = 1 << 20  # bytes of an order
MOST_READ = 65536  # bytes
ENDED = b"."
POLLED = 0.02  # seconds between two looks at whether a run has ended
PATIENCE = 5.0  # seconds in which a server ends what it has started
_SUBREAPER = 36  # of prctl(2): who becomes the parent of processes whose parents have ended
_TIDIES = re.compile(rb"resource_tracker|torch_shm_manager")  # programs that remove shared memory


class ForkServer:
    """A process that forks once for each order.

    Args:
        wrap: makes the command that runs another one in a sandbox.
        variables: the environment.
    """

    def __init__(
        self, wrap: Callable[[Sequence[str]], Sequence[str]], variables: Mapping[str, str]
    ) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "faststep.doctor.probe", str(theirs.fileno())]
        self._said: list[bytes] = []  # the newest of stderr
        with theirs:
            self._process = subprocess.Popen(
                wrap(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as what shows output would read it
                stderr=subprocess.PIPE,
                env=variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._readers = [
            threading.Thread(target=_drain, args=(stream, kept, self._lock), daemon=True)
            for stream, kept in ((self._process.stdout, None), (self._process.stderr, self._said))
        ]
        for one in self._readers:
            one.start()

    @property
    def is_alive(self) -> bool:
        """True if it can take an order."""
        return self._process.poll() is None

    def begin(self, order: Mapping[str, Any], answer: int | None) -> None:
        """Start a run.

        Args:
            order: that of `probe.main`, but for `answer`.
            answer: the file descriptor for it; None if nothing is asked.
        """
        self._said.clear()
        with contextlib.suppress(OSError):  # of a server that has ended, as `has_ended` says
            data = json.dumps({**order, "is_asked": answer is not None}).encode()
            socket.send_fds(self._socket, [data], [] if answer is None else [answer])

    def has_ended(self, seconds: float) -> bool:
        """True if the run has ended within this time, or the server."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def said(self) -> str:
        """The newest of what a run that has ended has said on stderr."""
        stream = self._process.stderr
        while True:
            with self._lock:  # nothing is between the pipe and what is kept
                if stream is None or stream.closed or not _waiting(stream):
                    return b"".join(self._said).decode(errors="replace")
            time.sleep(POLLED)

    def kill(self) -> None:
        """End the server and its run."""
        self._socket.close()  # which tells it
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:  # it imports still
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for one in self._readers:
            one.join(PATIENCE)


def _drain(stream: IO[bytes], kept: list[bytes] | None, lock: threading.Lock) -> None:
    """Read a stream to its end; the newest of it is kept."""
    text = b"."
    while text:
        select.select([stream], [], [])
        with lock:
            text = os.read(stream.fileno(), MOST_READ)
            if kept is not None:
                kept[:] = [*kept[-1:], text]
            if not text:
                stream.close()


def _waiting(stream: IO[bytes]) -> int:
    """How many bytes nobody has read."""
    return int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)


def serve(orders: int) -> dict[str, Any]:
    """Fork for each order that a socket brings; returns it in the child.

    What the child has started ends with it, and all of them when the socket is closed, as it is
    when the doctor is killed. `answer` and `shared` are added to the order: bytes of libraries
    that the child has not looked at.
    """
    import_compiler()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    connection = socket.socket(fileno=orders)
    while True:
        data, fds, _, _ = socket.recv_fds(connection, LONGEST, 1)
        if not data:
            os._exit(0)
        order: dict[str, Any] = json.loads(data)
        before = status("VmRSS")
        child = os.fork()
        if child == 0:
            connection.close()
            os.setsid()
            order["answer"] = fds[0] if order["is_asked"] else None
            return {**order, "shared": max(0, before - status("VmRSS"))}
        for one in fds:
            os.close(one)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if select.select([connection], [], [], POLLED)[0]:
                break  # it is closed
        if order["sandbox"] != "namespaces":  # which end all processes inside
            _end_others()
        with contextlib.suppress(OSError):
            connection.send(ENDED)


def _end_others() -> None:
    """End all that a run has left, but for programs that tidy up then, as long as they do."""
    tidied = time.monotonic() + PATIENCE / 2
    while children := _children():
        is_late = time.monotonic() > tidied
        for number, command in children:
            if is_late or not _TIDIES.search(command):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLLED)
        with contextlib.suppress(ChildProcessError):  # there are no more
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> list[tuple[int, bytes]]:
    """The numbers and the command lines of this process's children."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of one that has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return found

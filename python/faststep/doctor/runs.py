"""Runs of a script that are thrown away, each in a process and a sandbox of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

from ..run.program import Program
from . import sandbox
from .nodes import Nodes

__all__ = ["GRACE", "DoctorError", "Length", "Runs", "free_ports"]

MOST_READ = 65536  # characters
POLLED = 0.02  # seconds between two looks at whether a run has ended
GRACE = 20.0  # seconds to start and to end, beyond what a run may measure


class DoctorError(Exception):
    """Why there is no answer."""


class Length(NamedTuple):
    """How long a run measures, and the most of the time that is left that it may take."""

    seconds: float
    least_steps: int
    most: float = 1.0


class Runs:
    """Makes them, until the time is over.

    Args:
        program: the script.
        until: `time.monotonic()` of the end.
        network: let the script use the network.
        sandbox: the kind of sandbox that it runs in.
        ranks: the processes of the script.
        nodes: the machines of these, if there are several.
    """

    def __init__(
        self,
        program: Program,
        until: float,
        network: bool,
        sandbox: sandbox.Kind,
        ranks: int = 1,
        nodes: Nodes | None = None,
    ) -> None:
        self._program = program
        self._until = until
        self._network = network
        self._ranks = ranks
        self._nodes = nodes
        self._sandbox = sandbox
        self.started = 0.0  # seconds that a run takes beside measuring, as the first one has shown

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._until - time.monotonic()

    def measure(
        self,
        length: Length,
        change: dict[str, Any] | None = None,
        tries: bool = False,
        rounds: bool = False,
    ) -> dict[str, Any]:
        """The result of a run with a change.

        Args:
            length: how long it measures.
            change: `Changes` of `run`.
            tries: turn switches on and off after that.
            rounds: multiply all gradients by 1 + 2^-23 before each step.

        Raises:
            DoctorError: the script failed, or made no step in time.
        """
        begun = time.monotonic()
        most = max(5.0, self.left * length.most - 2.0)
        order = {
            "seconds": length.seconds,
            "least_steps": length.least_steps,
            "most_seconds": most,
            "tries": tries and self._ranks == 1,  # else all ranks would have to turn them
            "address": "127.0.0.1" if self._nodes is None else self._nodes.address,
            "ports": free_ports(2),
            "rounds": rounds,
            "change": change or {},
        }
        beside = contextlib.nullcontext() if self._nodes is None else self._nodes.running(order)
        with tempfile.TemporaryFile() as answer, beside:
            errors = self._run(order, answer.fileno())
            answer.seek(0)
            text = answer.read()
        if not text:
            raise DoctorError(f"the script ended without an answer:\n{errors[-2000:]}")
        found: dict[str, Any] = json.loads(text)
        if "error" in found:
            raise DoctorError(f"the script failed:\n{found['error']}{self._hint(found['error'])}")
        self.started = time.monotonic() - begun - sum(found["steps"])
        return found

    def follow(self) -> None:
        """Run the ranks of this machine as often as that of rank 0 does, until it has enough."""
        assert self._nodes is not None
        self._nodes.follow(lambda order, is_over: self._run(order, None, is_over))

    def _run(
        self,
        order: dict[str, Any],
        answer: int | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> str:
        """Run the ranks of this machine; returns the newest of what they say on stderr."""
        with tempfile.TemporaryDirectory(prefix="faststep-") as empty:
            order = {
                **order,
                "sandbox": self._sandbox,
                "empty": empty,
                "network": self._network,
                "answer": answer,
                "program": self._program,
                "ranks": self._ranks,
                "local": self._ranks if self._nodes is None else self._nodes.local,
                "is_first": True,
            }
            command = [sys.executable, "-m", "faststep.doctor.probe", json.dumps(order)]
            if self._sandbox == "namespaces":
                command = sandbox.sandboxed(command, self._network)
            return self._finish(command, answer, order["most_seconds"] + GRACE, is_over)

    def _hint(self, error: str) -> str:
        if self._sandbox != "scratch" or "ermission" not in error:
            return ""
        return (
            "Without namespaces only Python's own functions and torch.save may write files, and "
            "nothing may use TCP unless --network is passed. --in-place runs the script without a "
            "sandbox: each run then writes its files."
        )

    def _finish(
        self,
        command: list[str],
        answer: int | None,
        seconds: float,
        is_over: Callable[[], bool],
    ) -> str:
        """Run a command to its end, or until it is over; returns the newest of its stderr."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as what shows output would read it
            stderr=subprocess.PIPE,
            env=sandbox.environment(os.environ, self._network),
            pass_fds=() if answer is None else (answer,),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        said: list[str] = []
        readers = [
            threading.Thread(target=_drain, args=(stream, kept), daemon=True)
            for stream, kept in ((process.stdout, None), (process.stderr, said))
        ]
        for one in readers:
            one.start()
        end = time.monotonic() + seconds
        try:
            while process.poll() is None and not is_over():
                if time.monotonic() > end:
                    raise DoctorError(f"the script did not end within {seconds:.0f} s")
                time.sleep(POLLED)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for one in readers:
                one.join()
        return "".join(said)


def free_ports(count: int) -> list[int]:
    """Numbers of TCP ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in free]


def _drain(stream: TextIO | None, kept: list[str] | None) -> None:
    """Read a stream to its end; the newest of it is kept."""
    assert stream is not None
    while text := stream.read(MOST_READ):
        if kept is not None:
            kept[:] = [*kept[-1:], text]
    stream.close()

"""Runs of a script that are thrown away, each in a process and a sandbox of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple, TextIO

from ..run.changes import preloading
from ..run.program import Program
from . import sandbox

__all__ = ["DoctorError", "Runs"]

MOST_READ = 65536  # characters
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

    Attributes:
        until: as given; may be set.

    Args:
        program: the script.
        until: `time.monotonic()` of the end.
        network: let the script use the network.
        sandbox: the kind of sandbox that it runs in.
        ranks: the processes of the script.
    """

    def __init__(
        self,
        program: Program,
        until: float,
        network: bool,
        sandbox: sandbox.Kind,
        ranks: int = 1,
    ) -> None:
        self._program = program
        self.until = until
        self._network = network
        self._ranks = ranks
        self._sandbox = sandbox
        self.started = 0.0  # seconds that a run takes beside measuring, as the first one has shown

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.until - time.monotonic()

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
        with (
            tempfile.TemporaryDirectory(prefix="faststep-") as empty,
            tempfile.TemporaryFile() as answer,
        ):
            order = {
                "sandbox": self._sandbox,
                "empty": empty,
                "network": self._network,
                "answer": answer.fileno(),
                "program": self._program,
                "seconds": length.seconds,
                "least_steps": length.least_steps,
                "most_seconds": most,
                "until": max(self.until - 1.0, begun + 5.0),
                "tries": tries and self._ranks == 1,  # else all ranks would have to turn them
                "ranks": self._ranks,
                "rounds": rounds,
                "change": change or {},
            }
            command = [sys.executable, "-m", "faststep.doctor.probe", json.dumps(order)]
            if self._sandbox == "namespaces":
                command = sandbox.sandboxed(command, self._network)
            variables = sandbox.environment(os.environ, self._network)
            if change and "preload" in change:
                variables = preloading(change["preload"], variables)
            errors = self._finish(command, variables, answer.fileno(), most + GRACE)
            answer.seek(0)
            text = answer.read()
        if not text:
            raise DoctorError(f"the script ended without an answer:\n{errors[-2000:]}")
        found: dict[str, Any] = json.loads(text)
        if "error" in found:
            raise DoctorError(f"the script failed:\n{found['error']}{self._hint(found['error'])}")
        self.started = time.monotonic() - begun - sum(found["steps"]) - found["tried_for"]
        return found

    def _hint(self, error: str) -> str:
        if self._sandbox != "scratch" or "ermission" not in error:
            return ""
        return (
            "Without namespaces only Python's own functions and torch.save may write files, and "
            "nothing may use TCP unless --network is passed. --in-place runs the script without a "
            "sandbox: each run then writes its files."
        )

    def _finish(
        self, command: list[str], variables: dict[str, str], answer: int, seconds: float
    ) -> str:
        """Run a command to its end; returns the newest of what it says on stderr."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # as what shows output would read it
            stderr=subprocess.PIPE,
            env=variables,
            pass_fds=(answer,),
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
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DoctorError(f"the script did not end within {seconds:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for one in readers:
                one.join()
        return "".join(said)


def _drain(stream: TextIO | None, kept: list[str] | None) -> None:
    """Read a stream to its end; the newest of it is kept."""
    assert stream is not None
    while text := stream.read(MOST_READ):
        if kept is not None:
            kept[:] = [*kept[-1:], text]
    stream.close()

"""Runs of a script that are thrown away, each in a process and a sandbox of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..run.changes import preloading
from ..run.program import Program
from .fork_server import POLLED, ForkServer
from .nodes import Nodes
from .sandbox import Kind, environment, sandboxed

_REFUSED = re.compile(r"[Pp]ermission|unable to open")  # the latter by SQLite
_OFFLINE = re.compile(r"name resolution|Name or service not known|[Nn]etwork is unreachable")
GRACE = 20.0  # seconds to start and to end, beyond what a run may measure


class DoctorError(Exception):
    """Why there is no answer."""


class Length(NamedTuple):
    """How long a run measures, and the most of the time that is left that it may take."""

    seconds: float
    least_steps: int
    most: float = 1.0


@dataclass(eq=False)
class Runs:
    """Makes them, until the time is over.

    Args:
        program: the script.
        until: `time.monotonic()` of the end; may be set.
        network: let the script use the network.
        sandbox: the kind of sandbox that it runs in.
        ranks: the processes of the script.
        nodes: the machines of these, if there are several.

    Attributes:
        started: seconds that a run takes beside measuring, as the newest one has shown.
    """

    program: Program
    until: float
    network: bool
    sandbox: Kind
    ranks: int = 1
    nodes: Nodes | None = None
    started: float = field(default=0.0, init=False)
    _servers: dict[str, ForkServer] = field(default_factory=dict, init=False)  # by what they load

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.until - time.monotonic()

    def measure(
        self,
        length: Length,
        change: dict[str, Any] | None = None,
        tries: bool = False,
        only: Collection[str] = (),
        rounds: bool = False,
    ) -> dict[str, Any]:
        """The result of a run with a change.

        Args:
            length: how long it measures.
            change: `Changes` of `run`.
            tries: turn switches on and off after that.
            only: kinds of remedies that these are; all if none is named.
            rounds: multiply all gradients by 1 + 2^-23 before each step.

        Raises:
            DoctorError: the script failed, or made no step in time.
        """
        begun = time.monotonic()
        most = max(5.0, self.left * length.most - 2.0)
        order: dict[str, Any] = {
            "seconds": length.seconds,
            "least_steps": length.least_steps,
            "most_seconds": most,
            "until": max(self.until - 1.0, begun + 5.0),
            "tries": tries and self.ranks == 1,  # else all ranks would have to turn them
            "only": [*only],
            "address": "127.0.0.1" if self.nodes is None else self.nodes.address,
            "ports": free_ports(2),
            "rounds": rounds,
            "change": change or {},
        }
        beside = contextlib.nullcontext() if self.nodes is None else self.nodes.running(order)
        with tempfile.TemporaryFile() as answer, beside:
            self._run(order, answer.fileno())
            answer.seek(0)
            text = answer.read()
        found: dict[str, Any] = json.loads(text) if text else {"error": "ended without an answer"}
        if error := found.get("error", ""):
            if "\n" not in error:  # no traceback: what it has said itself
                server = self._servers[order["change"].get("preload", "")]
                error += f":\n{server.said()[-2000:]}".rstrip(":\n")
            raise DoctorError(f"the script {error.rstrip()}{self._hint(error)}")
        if len(found["steps"]) < 2:
            raise DoctorError(
                "the script made fewer than two steps of an optimizer in its main thread, within "
                f"{time.monotonic() - begun:.0f} s"
            )
        self.started = time.monotonic() - begun - sum(found["steps"]) - found["tried_for"]
        return found

    def follow(self) -> None:
        """Run the ranks of this machine as often as that of rank 0 does, until it has enough."""
        assert self.nodes is not None
        self.nodes.follow(lambda order, is_over: self._run(order, None, is_over))

    def _run(
        self,
        order: dict[str, Any],
        answer: int | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run the ranks of this machine to their end, or until it is over."""
        with tempfile.TemporaryDirectory(prefix="faststep-") as empty:
            order = {
                **order,
                "sandbox": self.sandbox,
                "empty": empty,
                "network": self.network,
                "program": self.program,
                "ranks": self.ranks,
                "local": self.ranks if self.nodes is None else self.nodes.local,
            }
            server = self._server_with(order["change"].get("preload", ""))
            server.begin(order, answer)
            end = time.monotonic() + order["most_seconds"] + GRACE
            try:
                while not server.has_ended(POLLED):
                    if is_over() or time.monotonic() > end:
                        server.kill()
                        break
            except BaseException:  # before the folder is removed
                server.kill()
                raise
        if time.monotonic() > end:
            raise DoctorError(f"the script did not end within {order['most_seconds']:.0f} s")

    def _server_with(self, library: str) -> ForkServer:
        """The server whose processes load a library first, if one is named."""
        server = self._servers.get(library)
        if server is not None and server.is_alive:
            return server

        def wrap(command: Sequence[str]) -> Sequence[str]:
            if self.sandbox != "namespaces":
                return command
            return sandboxed(command, self.network)

        variables = environment(os.environ, self.network)
        server = ForkServer(wrap, preloading(library, variables) if library else variables)
        self._servers[library] = server
        weakref.finalize(self, server.kill)
        return server

    def _hint(self, error: str) -> str:
        if not self.network and _OFFLINE.search(error):
            return "\nThe script has no network here, unless --network is passed."
        if self.sandbox != "scratch" or not _REFUSED.search(error):
            return ""
        return (
            "\nWithout namespaces only Python's own functions and torch.save may write files, and "
            "nothing may use TCP unless --network is passed. --in-place runs the script without a "
            "sandbox: each run then writes its files."
        )


def free_ports(count: int) -> list[int]:
    """Numbers of TCP ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in free:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in free]

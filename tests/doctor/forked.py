"""Lets a doctor fork the server of its runs, which would import torch once more."""

import ctypes
import os
import signal
import subprocess
import types
from pathlib import Path
from typing import Any

import torch

from faststep.doctor import fork_server, probe

_NAMESPACES, _NETWORK = 0x20000 | 0x08000000 | 0x10000000 | 0x20000000, 0x40000000  # of unshare(2)


class Forked(subprocess.Popen[bytes]):
    """Instead of the command of a server."""

    def _execute_child(self, command: Any, *given: Any) -> None:  # type: ignore[override]
        env, pipes = given[5], given[9:15]
        self.pid = os.fork()
        if not self.pid:
            try:
                for at, fd in enumerate((pipes[0], pipes[3], pipes[5])):
                    os.dup2(fd, at)
                _serve(command, env)
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _serve(command: list[str], env: dict[str, str]) -> None:
    orders = int(command[-1])
    os.closerange(3, orders)
    os.closerange(orders + 1, 4096)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    if command[0] == "unshare":
        _unshare("--net" in command)
    torch.set_num_threads(1)
    probe.main(fork_server.serve(orders))
    os._exit(0)


def _unshare(network: bool) -> None:
    """As the program does it for `sandboxed`."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    assert libc.unshare(_NAMESPACES | (_NETWORK if network else 0)) == 0
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


fork_server.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
    **{**vars(subprocess), "Popen": Forked}
)

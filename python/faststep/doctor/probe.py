"""One run of a script that is measured and thrown away: `python -m faststep.doctor.probe ORDER`."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..run import swap_silently
from ..run.changes import make_changes
from ..run.program import Program
from . import sandbox, scratch
from .recorder import Recorder

__all__ = ["main"]

SEED = 20170


def main(order: dict[str, Any]) -> None:
    """Run a script as it was ordered, and write what was found to a file descriptor.

    Args:
        order: `sandbox`, its kind; `empty`, a folder for it; `network`, if it may be used;
            `answer`, the file descriptor, or None in a rank that measures nothing; `ranks` of the
            script, all of this machine; `program`, the arguments of `Program`; `change`, `Changes`
            of `run`; `rounds`, to round gradients once more; `seconds`, `least_steps`,
            `most_seconds`, `until`, `tries` of `Recorder`.
    """
    if order["sandbox"] == "namespaces":
        sandbox.enter(order["empty"])
    elif order["sandbox"] == "scratch":
        scratch.enter(order["empty"], order["network"])

    others = _start_others(order) if order["ranks"] > 1 and order["answer"] is not None else []

    def done(found: dict[str, Any]) -> None:
        for one in others:
            one.kill()
        with os.fdopen(order["answer"], "w") as answer:
            json.dump(found, answer)
        if order["sandbox"] != "namespaces":  # which end all processes inside
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    make_changes(order["change"])
    if "parts" in order["change"]:
        swap_silently(order["change"]["parts"])
    if order["rounds"]:
        register_optimizer_step_pre_hook(_round)
    if order["answer"] is None:  # a rank that is not asked
        Program(*order["program"]).run()
        return
    names = ("seconds", "least_steps", "most_seconds", "until", "tries")
    recorder = Recorder(**{name: order[name] for name in names}, done=done)
    recorder.start()
    try:
        Program(*order["program"]).run()
    except SystemExit as error:
        if error.code not in (None, 0):
            done({"error": f"the script ended with status {error.code}"})
    except BaseException:
        if not recorder.is_measured:
            done({"error": traceback.format_exc()})
    recorder.end()


def _start_others(order: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Make this process rank 0 of a script on this machine, and start the other ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = str(order["ranks"])
    ranks = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK="0", LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="False")
    command = [sys.executable, "-m", "faststep.doctor.probe"]
    command.append(json.dumps({**order, "sandbox": "none", "answer": None}))
    return [
        subprocess.Popen(command, env={**os.environ, "RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(1, order["ranks"]))
    ]


def _round(optimizer: Optimizer, *_: object) -> None:
    for param in (one for group in optimizer.param_groups for one in group["params"]):
        if param.grad is not None:
            param.grad.mul_(1.0 + 2.0**-23)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

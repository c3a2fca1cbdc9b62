"""One run of a script that is measured and thrown away: `python -m faststep.doctor.probe ORDER`.

Where ORDER is the number of a socket, it brings orders, each of which is run in a fork.
"""

from __future__ import annotations

import json
import os
import random
import signal
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
from .fork_server import serve
from .peers import Peers
from .recorder import INTERVAL, Recorder
from .watching import Watch

__all__ = ["main"]

SEED = 20170


def main(order: dict[str, Any]) -> None:
    """Run a script as it was ordered, and write what was found to a file descriptor.

    Args:
        order: `sandbox`, its kind; `empty`, a folder for it; `network`, if it may be used;
            `answer`, the file descriptor, or None in a rank that is not asked; `ranks` of the
            script, and `local`, those of this machine; `is_first` of these; `address` of rank 0
            and its `ports`, of the script and of `Peers`; `shared`, bytes of memory that this
            process has beside its own; `program`, the arguments of `Program`; `change`, `Changes`
            of `run`; `rounds`, to round gradients once more; `seconds`, `least_steps`,
            `most_seconds`, `tries` of `Recorder`.
    """
    _enter_sandbox(order)
    is_asked, others = order["answer"] is not None, []
    peers: Peers | None = None
    if order["ranks"] > 1:
        peers = Peers(order["address"], order["ports"][1], is_host=is_asked, ranks=order["ranks"])
        others = _start_others(order) if order["is_first"] else []

    def done(found: dict[str, Any]) -> None:
        if peers is not None:
            found["ranks"] = peers.told()
        if "peak" in found:
            found["peak"] += order["shared"]
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
    if not is_asked:
        with Watch([peers] if peers else [], lambda text: None, INTERVAL):
            Program(*order["program"]).run()
        return
    recorder = Recorder(
        order["seconds"], order["least_steps"], order["most_seconds"], order["tries"], done
    )
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


def _enter_sandbox(order: dict[str, Any]) -> None:
    if order["sandbox"] == "scratch" and not order["is_first"]:
        scratch.join(order["empty"])
    elif order["sandbox"] == "scratch":
        scratch.enter(order["empty"], order["network"])
    elif order["sandbox"] == "namespaces" and order["is_first"]:
        sandbox.leave_others()
        sandbox.enter(order["empty"])


def _start_others(order: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Make this process the first rank of a script on this machine, and start the others."""
    first = int(os.environ.setdefault("RANK", "0"))
    os.environ.setdefault("GROUP_RANK", "0")
    os.environ.update(MASTER_ADDR=order["address"], MASTER_PORT=str(order["ports"][0]))
    os.environ.update(WORLD_SIZE=str(order["ranks"]), LOCAL_WORLD_SIZE=str(order["local"]))
    os.environ.update(LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="False")
    command = [sys.executable, "-m", "faststep.doctor.probe"]
    command.append(json.dumps({**order, "is_first": False, "answer": None}))
    return [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(first + rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(1, order["local"])
    ]


def _round(optimizer: Optimizer, *_: object) -> None:
    for param in (one for group in optimizer.param_groups for one in group["params"]):
        if param.grad is not None:
            param.grad.mul_(1.0 + 2.0**-23)


if __name__ == "__main__":
    given = sys.argv[1]
    main(serve(int(given)) if given.isdigit() else json.loads(given))

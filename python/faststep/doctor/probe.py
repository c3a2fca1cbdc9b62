"""Runs of a script that are measured and thrown away: `python -m faststep.doctor.probe SOCKET`.

The socket of this number brings orders, each of which is run in a fork.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..run import swap_silently
from ..run.changes import make_changes
from ..run.program import Program, ProgramError, of_program
from . import sandbox, scratch
from .fork_server import serve
from .peers import Peers
from .recorder import INTERVAL, Recorder
from .watching import Watch

SEED = 20170


def main(order: dict[str, Any]) -> None:
    """Run a script as it was ordered, and write what was found to a file descriptor.

    Args:
        order: `sandbox`, its kind; `empty`, a folder for it; `network`, if it may be used;
            `answer`, the file descriptor, or None in a rank that is not asked; `ranks` of the
            script, and `local`, those of this machine; `address` of rank 0 and its `ports`, of the
            script and of `Peers`; `shared`, bytes of memory that this
            process has beside its own; `program`, the arguments of `Program`; `change`, `Changes`
            of `run`; `rounds`, to round gradients once more; `seconds`, `least_steps`,
            `most_seconds`, `until`, `tries`, `only` of `Recorder`.
    """
    _enter_sandbox(order)
    if order["ranks"] > 1:
        order = _fork_ranks(order)
    is_asked = order["answer"] is not None
    peers: Peers | None = None
    if order["ranks"] > 1:
        peers = Peers(order["address"], order["ports"][1], is_host=is_asked, ranks=order["ranks"])

    def done(found: dict[str, Any]) -> None:
        if peers is not None:
            found["ranks"] = peers.told()
        if "peak" in found:
            found["peak"] += order["shared"]
        with os.fdopen(order["answer"], "w") as answer:
            json.dump(found, answer)
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
    names = ("seconds", "least_steps", "most_seconds", "until", "tries", "only")
    recorder = Recorder(**{name: order[name] for name in names}, done=done)
    process = os.getpid()
    recorder.start()
    try:
        Program(*order["program"]).run()
    except BaseException as error:
        if os.getpid() != process:  # a fork that has come to its end
            raise
        if (failure := _failure(error)) is not None and not recorder.is_measured:
            done({"error": failure})
    recorder.end()


def _failure(error: BaseException) -> str | None:
    """What to say of the exception that ended a script; None if it is no failure."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return f"ended with status {error.code}" if error.code else None
        return None if error.code is None else f"ended with status 1: {error.code}"
    if isinstance(error, ProgramError):
        return f"cannot be run: {error}"
    shown = traceback.format_exception(type(error), error, of_program(error))
    return f"failed:\n{''.join(shown)}"


def _enter_sandbox(order: dict[str, Any]) -> None:
    if order["sandbox"] == "namespaces":
        sandbox.leave_others()
        sandbox.enter(order["empty"])
    elif order["sandbox"] == "scratch":
        scratch.enter(order["empty"], order["network"])


def _fork_ranks(order: dict[str, Any]) -> dict[str, Any]:
    """Make this process the first rank of a script on this machine, and forks of it the others.

    Returns:
        The order for the rank that this process is.
    """
    first = int(os.environ.setdefault("RANK", "0"))
    os.environ.setdefault("GROUP_RANK", "0")
    os.environ.update(MASTER_ADDR=order["address"], MASTER_PORT=str(order["ports"][0]))
    os.environ.update(WORLD_SIZE=str(order["ranks"]), LOCAL_WORLD_SIZE=str(order["local"]))
    os.environ.update(LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="False")
    for rank in range(1, order["local"]):
        if os.fork() == 0:
            os.environ.update(RANK=str(first + rank), LOCAL_RANK=str(rank))
            return {**order, "answer": None}
    return order


def _round(optimizer: Optimizer, *_: object) -> None:
    for param in (one for group in optimizer.param_groups for one in group["params"]):
        if param.grad is not None:
            param.grad.mul_(1.0 + 2.0**-23)


if __name__ == "__main__":
    main(serve(int(sys.argv[1])))

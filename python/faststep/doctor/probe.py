"""One run of a script that is measured and thrown away: `python -m faststep.doctor.probe ORDER`."""

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
from ..run.program import Program
from . import sandbox
from .recorder import Recorder

__all__ = ["main"]

SEED = 20170


def main(order: dict[str, Any]) -> None:
    """Run a script as it was ordered, and write what was found to a file descriptor.

    Args:
        order: `empty`, a folder for `sandbox.enter`, or None; `answer`, the file descriptor;
            `program`, the arguments of `Program`; `seconds`, `least_steps`, `most_seconds` and
            `tries` for `Recorder`; `rounds`, to round gradients once more; `change`, `Changes` of
            `run`.
    """
    if order["empty"] is not None:
        sandbox.enter(order["empty"])

    def done(found: dict[str, Any]) -> None:
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
    names = ("seconds", "least_steps", "most_seconds", "tries")
    recorder = Recorder(*(order[name] for name in names), done)
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


def _round(optimizer: Optimizer, *_: object) -> None:
    for param in (one for group in optimizer.param_groups for one in group["params"]):
        if param.grad is not None:
            param.grad.mul_(1.0 + 2.0**-23)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

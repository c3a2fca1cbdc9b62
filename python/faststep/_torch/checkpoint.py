"""The form in which torch.distributed.checkpoint wants a state, which it does not say."""

from __future__ import annotations

import sys
from typing import Literal

Wanted = Literal["slices", "whole", "whole everywhere"]


def wanted_states() -> Wanted | None:
    """The form of states, spread over ranks, that the caller's caller needs.

    torch.distributed.checkpoint saves and loads each rank's own part, with the states that
    `state_dict()` of the optimizer gives it. With StateDictOptions(full_state_dict=True) it wants
    all of them, on rank 0 if they go to the CPU, else on every rank. None for other callers.
    torch passes no argument that says so, so the stack does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.startswith("torch.distributed.checkpoint."):
            info = frame.f_locals.get("info")
            if not getattr(info, "full_state_dict", False):
                return "slices"
            return "whole" if getattr(info, "cpu_offload", False) else "whole everywhere"
        frame = frame.f_back  # type: ignore[assignment]
    return None

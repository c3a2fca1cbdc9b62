"""An exception of a signal that comes during an update, as Ctrl-C does: the step stands as a whole.

Python handles signals between two lines, so an exception is raised at each line of ours that
follows the call that updates; but for lines of `with`, whose end Python does not interrupt.
"""

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import faststep
from faststep.optim import SGD, AdamW

from .common import assert_same_bits, parameters, set_gradients

OURS = str(Path(faststep.__file__).parent)
STEPS = {
    "AdamW": lambda params: AdamW(params, lr=0.1),
    "clips": lambda params: AdamW(params, lr=0.1, max_grad_norm=1.0),
    "SGD": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "bf16": lambda params: AdamW(params, lr=0.1, betas=(0.9, 0.99), state_dtype="bf16"),
    "offload": lambda params: offloaded(AdamW(params, lr=0.1, max_grad_norm=1.0)),
}


class StopError(Exception):
    pass


def offloaded(optimizer: Any) -> Any:
    optimizer.kept = faststep.offload(optimizer)
    return optimizer


def step_and_stop(optimizer: Any, line: int) -> bool:
    """Raise an error at a line, counted from the first one after the update; False at none."""
    left = line
    has_updated = False

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, has_updated
        has_updated = has_updated or frame.f_locals.get("what") == "done"
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and has_updated and not text.startswith("with "):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise StopError
        return at_line

    sys.settrace(
        lambda frame, event, arg: at_line if frame.f_code.co_filename.startswith(OURS) else None
    )
    try:
        optimizer.step()
    except StopError:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_update_that_was_made_is_kept(kind: str, steps: int) -> None:
    line = 0
    is_there = True
    while is_there:
        line += 1
        stopped, whole = parameters((3, 4), (5,)), parameters((3, 4), (5,))
        optimizers = STEPS[kind](stopped), STEPS[kind](whole)
        for step in range(steps + 1):
            for params, optimizer in zip((stopped, whole), optimizers, strict=True):
                set_gradients(params, step)
                if step == steps and params is stopped:
                    is_there = step_and_stop(optimizer, line)
                else:
                    optimizer.step()
        assert_same_run(stopped, whole, optimizers)
        for params, optimizer in zip((stopped, whole), optimizers, strict=True):
            set_gradients(params, steps + 1)
            optimizer.step()
        assert_same_run(stopped, whole, optimizers)
    assert line > 5
    assert torch.is_grad_enabled()


def assert_same_run(stopped: list[Parameter], whole: list[Parameter], optimizers: Any) -> None:
    assert_same_bits(stopped, whole)
    states, expected = (one.state_dict()["state"] for one in optimizers)
    torch.testing.assert_close(states, expected, rtol=0, atol=0)

"""torch warns where the gradient of a result is asked for, and Python code shows the warning."""

import gc
import warnings

import pytest
import torch
from torch.nn import Parameter

import faststep
from programs import Programs

# In a process of its own: once any call has met a tensor without a gradient, no later one asks.
DROPPED = """
import warnings, torch, faststep
params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(60)]
for p in params:
    p.grad = torch.ones(64)
faststep.clip_grad_norm_(params, 1e30)  # from here on gradients are read from records
others = []

def drop(*args, **kwargs):
    for p in params:
        p.grad = None
    others.extend(torch.full((64,), 7.0) for _ in range(240))

warnings.showwarning = drop
warnings.simplefilter("always")
norm = faststep.clip_grad_norm_([*params, torch.nn.Parameter(torch.zeros(64)) * 2], 1.0)
assert others, "torch has not warned"
assert norm == 0.0, norm
assert all(bool((other == 7.0).all()) for other in others)
"""


def test_warning_that_drops_gradients(programs: Programs) -> None:
    """What was found before is asked for once more: nothing is written where a gradient was."""
    done = programs.run(DROPPED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_after_calls_in_a_call(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    inner = faststep.optim.SGD(params[:1], lr=0.5)
    outer = faststep.optim.SGD(params[1:], lr=0.5)
    outer.param_groups[0]["params"].append(Parameter(torch.zeros(3)) * 2)
    shown = []

    def step(*args: object, **kwargs: object) -> None:
        inner.step()
        faststep.clip_grad_norm_(params, 1.0)
        shown.append(1)

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            monkeypatch.setattr(warnings, "showwarning", step)
            outer.step()
        assert shown
        assert gc.isenabled() == enabled
        assert torch.equal(params[0], torch.full((3,), -0.5))
    finally:
        (gc.enable if before else gc.disable)()

"""What a script can see of an optimizer that `run` made, beside what torch's shows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

import faststep
from programs import Programs

Run = Callable[..., subprocess.CompletedProcess[str]]

START = """
import copy, functools, io, pickle, types, warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
NAMES = ["Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax",
         "Adadelta", "RAdam", "NAdam", "ASGD", "Rprop", "Adafactor"]
OURS = ["max_grad_norm", "keep_grads", "norm_in_backward", "last_grad_norm", "step_was_skipped",
        "norm_fallbacks"]

def parameters():
    return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(2, 3))]

def steps(optimizer, number=2):
    for _ in range(number):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            p.grad = 100.0 * torch.ones_like(p)
        optimizer.step()
    return [[round(x, 3) for x in p.detach().flatten().tolist()] for p in params]
"""

SCRIPTS = {
    "group keys": """
for name in NAMES:
    kind = getattr(torch.optim, name)
    groups = [{"params": [p], **dict.fromkeys(OURS, 1.0)} for p in parameters()]
    optimizer = kind(groups, lr=0.1)
    optimizer.add_param_group({"params": parameters(), "max_grad_norm": "none"})
    print(name, steps(optimizer), sorted(optimizer.param_groups[0]))
    print([group["max_grad_norm"] for group in optimizer.state_dict()["param_groups"]])
    print(optimizer)
""",
    "notes": """
for name in NAMES:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.1)
    print(name, [hasattr(optimizer, key) or hasattr(type(optimizer), key) for key in OURS])
    before = sorted(optimizer.__dict__)
    for key in OURS:
        setattr(optimizer, key, 1e-3)
    print([getattr(optimizer, key) for key in OURS], sorted(set(vars(optimizer)) - set(before)))
    del optimizer.last_grad_norm
    print(getattr(optimizer, "last_grad_norm", "gone"), steps(optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(sum(p.sum() for p in optimizer.param_groups[0]["params"])).backward()
    scaler.step(optimizer)
    scaler.update()
    print(steps(optimizer), optimizer.max_grad_norm)
""",
    "arguments": """
import inspect
for name in NAMES:
    kind = getattr(torch.optim, name)
    for key in OURS[:3]:
        try:
            kind(parameters(), **{key: 1.0})
        except TypeError as error:
            print(error)
    optimizer = kind(parameters())
    print(type(optimizer).__name__, type(optimizer).__qualname__)
    print(inspect.signature(type(optimizer)), inspect.signature(type(optimizer).__init__))
    print(optimizer.defaults)
""",
    "copies": """
for name in NAMES:
    optimizer = getattr(torch.optim, name)(parameters(), lr=0.1)
    optimizer.max_grad_norm = 0.5
    steps(optimizer)
    state = optimizer.__getstate__()
    print(name, sorted(state), sorted(optimizer.state_dict()))
    text = pickle.dumps(optimizer)
    print(b"faststep" in text)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    print(b"faststep" in buffer.getvalue())
    buffer.seek(0)
    for other in (
        pickle.loads(text), copy.deepcopy(optimizer), copy.copy(optimizer),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(optimizer)
        print(getattr(other, "max_grad_norm", "gone"), steps(copy.deepcopy(other)))
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_torchs_optimizer(run: Run, programs: Programs, name: str) -> None:
    plain = programs.run(START + SCRIPTS[name])
    ours = run(START + SCRIPTS[name])
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout.splitlines() == plain.stdout.splitlines()


@pytest.mark.parametrize("option", ["max_grad_norm", "keep_grads", "norm_in_backward"])
def test_a_group_key_of_ours_is_named_as_ours(option: str) -> None:
    params = [{"params": [torch.ones(2, requires_grad=True)], option: 1.0}]
    with pytest.raises(ValueError, match=f"^{option} is an option of faststep's optimizers"):
        faststep.optim.AdamW(params)

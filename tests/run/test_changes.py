"""Switches of ``faststep run`` that change precision, layout, compilation and windows of steps."""

import json
from pathlib import Path

import torch

from conftest import Run

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
inner = []
model[0].register_forward_hook(lambda module, given, made: inner.append(made))
loss_of = nn.CrossEntropyLoss()
for step in range(STEPS):
    x, y = torch.randn(2, 3, 8, 8), torch.arange(2)
    made = model(x)
    loss = loss_of(made, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
print(made.dtype, loss.dtype, inner[-1].dtype)
print(inner[-1].is_contiguous(memory_format=torch.channels_last))
print(model._compiled_call_impl is not None)
print(schedule.last_epoch)
print(repr(float(model[3].weight.detach().double().sum())))
"""


def said(run: Run, *options: str, steps: int = 4, before: str = "") -> list[str]:
    source = before + MODEL.replace("STEPS", str(steps))
    done = run(source, options=options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_precision_layout_and_compilation(run: Run) -> None:
    """Models run under autocast and losses in fp32; weights of convolutions lie channels last."""
    eager = "import torch\ntorch.compiler.set_stance('force_eager')\n"
    plain, autocast, last = said(run), said(run, "--autocast", "bf16"), said(run, "--channels-last")
    assert plain[:3] == ["torch.float32 torch.float32 torch.float32", "False", "False"]
    assert autocast[0] == "torch.float32 torch.float32 torch.bfloat16"
    assert last[1] == "True"
    assert said(run, "--compile", before=eager)[2] == "True"
    assert 0 < abs(float(autocast[4]) - float(plain[4])) < 0.05
    assert abs(float(last[4]) - float(plain[4])) < 1e-5


def test_a_window_of_steps_is_one_step(run: Run) -> None:
    """As with a loss that is divided, and a step in every fourth pass."""
    changed = said(run, "--accumulate", "4", steps=8)
    by_hand = MODEL.replace("STEPS", "8").replace("loss.backward()", "(loss / 4).backward()")
    by_hand = by_hand.replace(
        "    optimizer.step()\n    optimizer.zero_grad()\n    schedule.step()\n",
        "    if step % 4 == 3:\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n        schedule.step()\n",
    )
    expected = run(by_hand).stdout.splitlines()
    assert changed[3] == expected[3] == "2"
    assert abs(float(changed[4]) - float(expected[4])) < 1e-6


def test_what_the_doctor_has_proven(run: Run, tmp_path: Path) -> None:
    """Changes for which there is no switch."""
    proven = {"set_to_none": True, "freeze": True, "tf32": True, "cudnn_benchmark": True}
    (tmp_path / "proven.json").write_text(json.dumps({"changes": proven}))
    source = (
        "import gc, torch\n"
        "gc.unfreeze()\nFEW = 1000\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for zero_grad in (model.zero_grad, optimizer.zero_grad):\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    zero_grad(set_to_none=False)\n"
        "    print(model.weight.grad)\n"
        "print(gc.get_freeze_count() > FEW, torch.backends.cudnn.benchmark)\n"
        "print(torch.get_float32_matmul_precision())\n"
    )
    done = run(source, options=("--with", str(tmp_path / "proven.json")))
    assert done.stdout.split() == ["None", "None", "True", "True", "high"]
    said = "gradients are set to None; objects are frozen; cudnn.benchmark; products in TF32"
    assert said in done.stderr
    assert run(source).stdout.split()[-3:] == ["False", "False", "highest"]


def test_results_of_any_kind_are_in_fp32() -> None:
    from collections import OrderedDict, namedtuple

    from faststep.run.forward import _in_fp32

    pair = namedtuple("pair", "a b")
    half = torch.ones(2, dtype=torch.bfloat16)
    made = _in_fp32(OrderedDict(x=[half, (half, 3)], y=pair(half, None)), torch.bfloat16)
    assert type(made) is OrderedDict
    assert made["x"][0].dtype == made["x"][1][0].dtype == made["y"].a.dtype == torch.float32
    assert made["x"][1][1] == 3
    assert type(made["y"]) is pair

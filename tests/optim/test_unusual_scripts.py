"""What few scripts do and torch takes: the same here, and the same errors."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import Parameter

import faststep
import faststep.optim

from .common import assert_same_bits, outcome, parameters, set_gradients


def made(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    params = parameters((7,), (2, 3))
    set_gradients(params, 0)
    return kind(params, lr=0.1, **options)


class Equal:
    """Compares like a dataclass, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("base", [torch.optim.AdamW, faststep.optim.AdamW])
def test_a_class_whose_step_is_of_no_module(base: type[torch.optim.Optimizer]) -> None:
    space: dict[str, Any] = {}
    exec("def step(self, closure=None): return 5", space)
    assert space["step"].__module__ is None
    optimizer: Any = made(type("Mine", (base,), {"step": space["step"]}))
    assert optimizer.step() == 5


@pytest.mark.parametrize("base", [torch.optim.AdamW, faststep.optim.AdamW])
def test_a_class_without_a_hash(base: type[torch.optim.Optimizer]) -> None:
    plain, equal = (made(kind) for kind in (base, type("Mine", (Equal, base), {})))
    for optimizer, scaler in (
        (plain, torch.amp.GradScaler("cpu", init_scale=4.0)),
        (equal, faststep.amp.GradScaler("cpu", init_scale=4.0)),
    ):
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    params = [optimizer.param_groups[0]["params"] for optimizer in (plain, equal)]
    assert_same_bits(*params, "after a step under a scaler")


def test_a_window_of_an_optimizer_without_a_hash() -> None:
    model = nn.Linear(3, 1)
    optimizer = type("Mine", (Equal, faststep.optim.SGD), {})(model.parameters(), lr=0.1)
    accum = faststep.accumulate(optimizer, steps=2)
    start = model.bias.item()
    for _ in range(2):
        with accum:
            accum.backward(model(torch.ones(1, 3)).sum())
    assert accum.ready
    optimizer.step()
    assert model.bias.item() == pytest.approx(start - 0.1)
    accum.remove()
    released = faststep.release_gradients(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.bias.item() == pytest.approx(start - 0.2)
    released.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_step_of_parameters_without_memory(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        param = Parameter(torch.ones(4, 4, dtype=dtype))
        param.grad = torch.ones_like(param)
    faststep.optim.AdamW([param], lr=1e-3).step()
    assert param.shape == (4, 4)


def test_saving_where_autograd_records_the_steps_of_fp32_parameters() -> None:
    """`master_weights` asks for nothing where no parameter is in 16 bits."""
    saved = []
    for kind, options in (
        (torch.optim.AdamW, {}),
        (faststep.optim.AdamW, {"master_weights": True}),
    ):
        param = Parameter(torch.ones(3), requires_grad=False)
        param.grad = torch.ones(3)
        optimizer = kind([param], lr=0.1, differentiable=True, **options)
        optimizer.step()
        saved.append(optimizer.state_dict()["state"][0])
    assert saved[0].keys() == saved[1].keys()
    for key, value in saved[0].items():
        assert torch.equal(saved[1][key], value), key


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Lion"])
@pytest.mark.parametrize("lr", ["0.1", None])
def test_a_learning_rate_that_is_no_number(name: str, lr: Any) -> None:
    for module in (torch.optim, faststep.optim):
        if not hasattr(module, name):
            continue  # torch has no Lion
        optimizer = made(getattr(module, name))
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["lr"] = lr
        assert outcome(optimizer.step)[0] is TypeError
        if module is faststep.optim:
            assert_same_bits(params, parameters((7,), (2, 3)), "nothing was updated")

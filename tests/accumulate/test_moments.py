"""release_gradients(accumulate_into_states=True): gradients are added to Adam's moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import faststep

from .common import assert_close, assert_equal, batches, joined, loss_of, make_model, values

BETAS, EPS = (0.8, 0.95), 1e-6
MAKE: dict[str, Any] = {
    "AdamW": lambda ps, **kw: faststep.optim.AdamW(
        ps, lr=0.01, betas=BETAS, eps=EPS, weight_decay=0.1, **kw
    ),
    "Adam": lambda ps, **kw: faststep.optim.Adam(ps, lr=0.01, betas=BETAS, eps=EPS, **kw),
}
over_optimizers = pytest.mark.parametrize("name", MAKE)
DATA = batches([4] * 9)
WINDOW = 3


class Reference:
    """AdamA as in the paper's Algorithm 1, in fp64, with autograd's gradients."""

    def __init__(self, params: list[Tensor], weight_decay: float, sign: float) -> None:
        self.params, self.weight_decay, self.sign, self.step_count = params, weight_decay, sign, 0
        self.m = [torch.zeros_like(p) for p in params]
        self.v = [torch.zeros_like(p) for p in params]

    def add(self, first: bool) -> None:
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            if first:
                m.mul_(BETAS[0])
                v.mul_(BETAS[1])
            m.add_((1 - BETAS[0]) * self.sign * p.grad)
            v.add_((1 - BETAS[1]) * p.grad**2)
            p.grad = None

    def step(self) -> None:
        self.step_count += 1
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            mean = m / (1 - BETAS[0] ** self.step_count)
            square = v / (1 - BETAS[1] ** self.step_count)
            with torch.no_grad():
                p.mul_(1 - 0.01 * self.weight_decay)
                p.sub_(0.01 * mean / (square.sqrt() + EPS))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@over_optimizers
def test_against_the_paper(name: str, dtype: torch.dtype, maximize: bool) -> None:
    model, exact = make_model(dtype), make_model(torch.float64)
    optimizer = MAKE[name](model.parameters(), maximize=maximize)
    sign = -1.0 if maximize else 1.0
    reference = Reference(list(exact.parameters()), 0.1 if name == "AdamW" else 0.0, sign)
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    for number, (x, y) in enumerate(DATA):
        before = values(model)
        (loss_of(model, (x.to(dtype), y)) / WINDOW).backward()
        assert all(p.grad is None for p in model.parameters())
        (loss_of(exact, (x.double(), y)) / WINDOW).backward()
        reference.add(number % WINDOW == 0)
        assert_equal(values(model), before)
        if number % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            assert_close(values(model), values(exact), 2e-5)
    keys = ("exp_avg", "exp_avg_sq")
    for param, m, v in zip(model.parameters(), reference.m, reference.v, strict=True):
        state = optimizer.state[param]
        assert float(state["step"]) == 3
        assert_close([state[key] for key in keys], [m, v], 2e-5)
    release.remove()


@over_optimizers
def test_the_first_moment_is_exact_and_the_second_is_not(name: str) -> None:
    """Against one backward pass over the joined batch."""
    model, whole = make_model(torch.float64), make_model(torch.float64)
    optimizer, plain = MAKE[name](model.parameters()), MAKE[name](whole.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    parts = [(x.double(), y) for x, y in DATA[:WINDOW]]
    for part in parts:
        (loss_of(model, part) / WINDOW).backward()
    optimizer.step()
    loss_of(whole, joined(parts)).backward()
    plain.step()
    pairs = list(zip(model.parameters(), whole.parameters(), strict=True))
    mine, theirs = ([o.state[p[i]] for p in pairs] for i, o in enumerate((optimizer, plain)))
    first = [[state["exp_avg"] for state in states] for states in (mine, theirs)]
    assert_close(*first, 1e-12)
    for a, b in zip(mine, theirs, strict=True):
        # (a + b + c)^2 <= 3 (a^2 + b^2 + c^2)
        assert bool((b["exp_avg_sq"] <= WINDOW * a["exp_avg_sq"] * (1 + 1e-12)).all())
        assert not torch.allclose(a["exp_avg_sq"], b["exp_avg_sq"], rtol=1e-3)
    release.remove()


@over_optimizers
def test_windows_of_one_are_the_ordinary_step(name: str) -> None:
    """But for the rounding of moments that are folded differently: none here."""
    model, reference = make_model(), make_model()
    optimizer, plain = MAKE[name](model.parameters()), MAKE[name](reference.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    for batch in DATA:
        loss_of(model, batch).backward()
        optimizer.step()
        loss_of(reference, batch).backward()
        plain.step()
        plain.zero_grad()
    assert_equal(values(model), values(reference))
    release.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_two_forward_passes_before_their_backward_passes() -> None:
    """Parameters stay as they are, and autograd knows that."""
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    losses = [loss_of(model, batch) for batch in DATA[:2]]
    for loss in losses:
        loss.backward()
    before = values(model)
    versions = [p._version for p in model.parameters()]
    optimizer.step()
    assert all(a._version > b for a, b in zip(model.parameters(), versions, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    release.remove()


def test_a_parameter_without_gradients_in_a_window_stays() -> None:
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    model[2].requires_grad_(False)
    before = values(model)
    loss_of(model, DATA[0]).backward()
    optimizer.step()
    same = [torch.equal(a, b) for a, b in zip(values(model), before, strict=True)]
    assert same == [False, False, True, True, False, False]
    counts = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    assert counts == [1, 1, 0, 0, 1, 1]
    release.remove()


def test_bfloat16_and_a_closure() -> None:
    model = make_model(torch.bfloat16)
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    before = values(model)

    def closure() -> Tensor:
        loss = sum(loss_of(model, (x.bfloat16(), y)) for x, y in DATA[:2])
        loss.backward()
        return loss

    assert bool(optimizer.step(closure) > 0.0)
    assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert all(float(optimizer.state[p]["step"]) == 1 for p in model.parameters())
    release.remove()


def test_what_is_refused() -> None:
    model = make_model()

    def release(optimizer: Any, **kwargs: Any) -> None:
        faststep.release_gradients(model, optimizer, accumulate_into_states=True, **kwargs)

    params = list(model.parameters())
    with pytest.raises(TypeError, match="SGD is neither"):
        release(faststep.optim.SGD(params))
    with pytest.raises(ValueError, match="neither amsgrad nor"):
        release(faststep.optim.AdamW(params, amsgrad=True))
    with pytest.raises(ValueError, match="neither amsgrad nor"):
        release(faststep.optim.Adam(params, weight_decay=0.1))
    with pytest.raises(ValueError, match="needs all gradients"):
        release(faststep.optim.AdamW(params, max_grad_norm=1.0))
    with pytest.raises(ValueError, match="leave clip=None"):
        release(faststep.optim.AdamW(params, max_grad_norm=1.0), clip="per_parameter")
    assert not any(p._post_accumulate_grad_hooks for p in params)


def test_states_that_are_gone_are_an_error() -> None:
    model = make_model()
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    loss_of(model, DATA[0]).backward()
    before = values(model)
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match="taken out of the optimizer's state"):
        optimizer.step()
    assert_equal(values(model), before)
    assert all(p.grad is None for p in model.parameters())
    release.remove()


def test_a_moment_of_another_shape_is_an_error() -> None:
    model = nn.Linear(3, 2)
    optimizer = MAKE["Adam"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    for step in range(2):
        model(torch.ones(4, 3)).sum().backward()
        if step == 0:
            optimizer.step()
    optimizer.state[model.bias]["exp_avg_sq"] = torch.ones(1)
    before = model.weight.clone()
    with pytest.raises(RuntimeError, match="state 'exp_avg_sq' of parameter 1 in group 0"):
        optimizer.step()
    assert_equal([model.weight], [before])
    release.remove()


def test_an_odd_layout() -> None:
    """A transposed parameter, and one without elements."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 5).t()), nn.Parameter(torch.zeros(0))])
    optimizer = MAKE["AdamW"](model.parameters())
    release = faststep.release_gradients(model, optimizer, accumulate_into_states=True)
    weights = torch.arange(15.0).view(5, 3)
    (model[0] * weights).sum().add(model[1].sum()).backward()
    optimizer.step()
    assert_close([optimizer.state[model[0]]["exp_avg"]], [0.2 * weights], 1e-6)
    assert float(optimizer.state[model[1]]["step"]) == 1
    release.remove()

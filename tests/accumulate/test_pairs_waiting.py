"""in_pairs=True: how long the first gradient of a pair waits, and what raises meanwhile."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import faststep

from .common import batches, loss_of, make_model

LOW = torch.bfloat16
Accumulation = faststep.accumulation.Accumulation


def accumulate(optimizer: torch.optim.Optimizer, steps: int) -> Accumulation:
    return faststep.accumulate(optimizer, steps, dtype=torch.float32, in_pairs=True)


@pytest.mark.parametrize("end", ["window", "flush", "reset", "remove", "load", "dropped"])
def test_a_waiting_gradient_is_let_go(end: str) -> None:
    """It lives from one micro-step into the next, and no longer than its window."""
    window, model = batches([4] * 4, 0, LOW), make_model(LOW)
    accum = accumulate(faststep.optim.SGD(model.parameters()), 4)
    before = accum.state_dict()
    seen: list[list[Any]] = []
    for param in model.parameters():
        param.register_hook(lambda grad: seen[-1].append(weakref.ref(grad.untyped_storage())))

    def alive(step: int) -> bool:
        living = [reference() is not None for reference in seen[step]]
        assert len(living) == 6
        assert all(living) or not any(living)
        return all(living)

    def micro_step(batch: Any) -> None:
        seen.append([])
        with accum:
            accum.backward(loss_of(model, batch))

    micro_step(window[0])
    assert alive(0)
    micro_step(window[1])
    assert not alive(0)
    assert not alive(1)
    micro_step(window[2])
    assert alive(2)
    if end == "window":
        micro_step(window[3])
    elif end == "load":
        accum.load_state_dict(before)
    elif end == "dropped":
        del accum
        gc.collect()
    else:
        getattr(accum, end)()
    assert not any(alive(step) for step in range(len(seen)))


def test_without_sums_there_are_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"in_pairs=True is for sums in fp32: pass dtype="):
        faststep.accumulate(faststep.optim.SGD(make_model().parameters()), 2, in_pairs=True)


def one_micro_step(steps: int = 4) -> tuple[nn.Parameter, torch.optim.Optimizer, Accumulation]:
    param = nn.Parameter(torch.ones(3, dtype=LOW))
    optimizer = faststep.optim.SGD([param], lr=1.0)
    accum = accumulate(optimizer, steps)
    with accum:
        accum.backward(param.sum())
    return param, optimizer, accum


@pytest.mark.parametrize("then", ["backward", "flush", "state_dict"])
def test_a_gradient_that_changes_while_it_waits(then: str) -> None:
    """Its sum would have other bits."""
    param = nn.Parameter(torch.ones(3, dtype=LOW))
    accum = accumulate(faststep.optim.SGD([param]), 4)
    grad = torch.ones(3, dtype=LOW)
    with accum:
        param.grad = grad
    grad.mul_(2.0)
    text = "the gradient of 'parameter 0 of group 0 of SGD' was changed in place"
    if then == "backward":
        with pytest.raises(RuntimeError, match=text), accum:
            accum.backward(param.sum())
    else:
        with pytest.raises(RuntimeError, match=text):
            getattr(accum, then)()
    accum.reset()
    for _ in range(4):
        with accum:
            accum.backward(param.sum())
    assert param.grad.tolist() == [4.0] * 3


def test_a_gradient_set_between_micro_steps() -> None:
    param, _, accum = one_micro_step()
    param.grad = torch.ones(3, dtype=LOW)
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 of SGD' was set"), accum:
        pass


@pytest.mark.parametrize("then", ["__enter__", "flush"])
def test_a_backward_between_micro_steps(then: str) -> None:
    param, _, accum = one_micro_step()
    param.sum().backward()
    with pytest.raises(RuntimeError, match="from a backward pass that is no micro-step"):
        getattr(accum, then)()


def test_clearing_and_clipping_between_micro_steps() -> None:
    """They find no gradients, and the sum stays what it is."""
    param, optimizer, accum = one_micro_step(2)
    optimizer.zero_grad()
    assert faststep.clip_grad_norm_([param], 0.1) == 0.0
    with accum:
        accum.backward(param.sum())
    assert param.grad.tolist() == [2.0] * 3


def test_a_shape_that_changes_while_a_gradient_waits() -> None:
    param, _, accum = one_micro_step()
    param.data = torch.ones(2, dtype=LOW)
    with pytest.raises(RuntimeError, match=r"parameter 0 .* changed inside an accum"), accum:
        accum.backward(param.sum())


@pytest.mark.parametrize("backwards", [1, 2, 3])
def test_gradients_of_no_window_are_given_back(backwards: int) -> None:
    """Backward passes after the last step of an installed loop, which removes it then."""
    param = nn.Parameter(torch.ones(3, dtype=LOW))
    optimizer = faststep.optim.SGD([param], lr=1.0)
    accum = accumulate(optimizer, 2).install()
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(backwards):
        (param * 3.0).sum().backward()
    accum.remove()
    assert param.grad.tolist() == [3.0 * backwards] * 3
    assert param.grad.dtype is LOW


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("end", ["flush", "reset"])
def test_a_backward_between_windows(end: str, clears: bool) -> None:
    """Its gradient is there to be cleared, or counts as the first one, as in torch."""
    param, optimizer, accum = one_micro_step()
    getattr(accum, end)()
    optimizer.zero_grad()
    (param * 3.0).sum().backward()
    assert param.grad.tolist() == [3.0] * 3
    if clears:
        optimizer.zero_grad()
    for _ in range(4):
        with accum:
            accum.backward(param.sum())
    assert param.grad.tolist() == [4.0 if clears else 7.0] * 3

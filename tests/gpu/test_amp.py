"""The AMP chain on the device: right, and without ever waiting for it."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch

import faststep
from faststep import _C
from optim.declarations import ALL, OTHERS, Declaration

from .common import (
    CUDA,
    REHEARSAL,
    Twins,
    assert_same_scales,
    needs_two_devices,
    no_synchronization,
    place,
    same_bits,
    scalers,
    values,
)

STEPS, OVERFLOWS = (9, (2, 6, 7)) if REHEARSAL else (100, (7, 50, 51))
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 4}
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (300, 20_003)


class Gradients:
    """A few sets of gradients that lie on both sides before the steps begin."""

    def __init__(self, twins: Twins) -> None:
        self.twins = twins
        drawn = [
            [values(tuple(p.shape), 50 * n + i, p.dtype) for i, p in enumerate(twins.cpu)]
            for n in range(4)
        ]
        drawn.append([g.clone() for g in drawn[0]])
        drawn[-1][-1].view(-1)[-1] = float("inf")
        self.sets = [(g, [place(t, CUDA) for t in g]) for g in drawn]

    def give(self, step: int, pair: tuple[Any, Any], overflows: tuple[int, ...]) -> None:
        """Scaled gradients in new memory, as backward leaves them."""
        chosen = self.sets[-1 if step in overflows else step % 4]
        for params, grads, scaler in zip(
            (self.twins.cpu, self.twins.cuda), chosen, pair, strict=True
        ):
            for p, g in zip(params, grads, strict=True):
                p.grad = None
                p.grad = scaler.scale(g)


@pytest.mark.parametrize("wait", [float, bool, methodcaller("item"), methodcaller("cpu")])
def test_waiting_is_noticed(wait: Callable[[torch.Tensor], object]) -> None:
    """What the tests below rest on."""
    number = place(torch.ones(()), CUDA)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"), no_synchronization():
        wait(number)
    wait(number)


def chain(optimizer: Any, scaler: Any, params: list[Any], way: str) -> torch.Tensor | None:
    norm = None
    if way == "explicit":
        scaler.unscale_(optimizer)
        norm = faststep.clip_grad_norm_(params, 0.5)
        scaler.step(optimizer)
    else:
        scaler.step(optimizer, max_norm=0.5 if way == "clipped" else None)
    scaler.update()
    return norm


@pytest.mark.parametrize("way", ["plain", "clipped", "explicit"])
@pytest.mark.parametrize("declaration", ALL + OTHERS, ids=lambda d: d.name)
def test_many_steps(declaration: Declaration, way: str) -> None:
    twins = Twins([values((n,), n, d) for n, d in zip(SIZES, DTYPES, strict=True)])
    gradients, pair = Gradients(twins), scalers(**OPTIONS)
    both = twins.optimizers(declaration.ours, **declaration.kwargs)
    norms: list[list[torch.Tensor | None]] = [[], []]

    def run(step: int) -> None:
        gradients.give(step, pair, OVERFLOWS)
        for params, optimizer, scaler, seen in zip(
            (twins.cpu, twins.cuda), both, pair, norms, strict=True
        ):
            seen.append(chain(optimizer, scaler, params, way))

    run(0)  # makes the states
    with no_synchronization():
        for step in range(1, STEPS):
            run(step)
    twins.assert_same(*both, grads=True)
    assert_same_scales(*pair)
    assert float(pair[1].get_scale()) != OPTIONS["init_scale"]
    if way == "explicit":
        assert all(same_bits(a, b.cpu()) for a, b in zip(*norms, strict=True))
    elif "step" in declaration.state:
        done = STEPS - len(OVERFLOWS)
        assert all(float(both[1].state[p]["step"]) == done for p in twins.cuda)


@pytest.mark.parametrize("bounded", [False, True])
def test_optimizer_of_torch_with_our_scaler(bounded: bool) -> None:
    twins = Twins([values((n,), n) for n in SIZES])
    options = {**OPTIONS, **({"min_scale": 700.0, "hysteresis": 2} if bounded else {})}
    gradients, pair = Gradients(twins), scalers(**options)
    both = twins.optimizers(torch.optim.AdamW, fused=True)
    for step in range(12):
        gradients.give(step, pair, (2, 3, 4))
        pair[0].step(both[0])
        pair[0].update()
        with no_synchronization():
            pair[1].step(both[1])
            pair[1].update()
        assert_same_scales(*pair)
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())


@pytest.mark.parametrize("fused", [True, None])
def test_our_optimizer_with_torchs_scaler(fused: bool | None) -> None:
    """The scaler leaves unscaling and the check to the step with fused=True only, as in torch."""
    twins = Twins([values((n,), n) for n in SIZES])
    gradients, pair = Gradients(twins), scalers(torch.amp.GradScaler, **OPTIONS)
    both = twins.optimizers(faststep.optim.AdamW, fused=fused)
    for step in range(10):
        gradients.give(step, pair, (0, 5))
        for optimizer, scaler in zip(both, pair, strict=True):
            scaler.step(optimizer)
            scaler.update()
        twins.assert_same(*both)
        assert_same_scales(*pair)
        if fused:
            assert both[0].step_was_skipped is both[1].step_was_skipped is (step in (0, 5))


@pytest.mark.parametrize("count", [1, 1000])
def test_launches_of_a_chain(count: int) -> None:
    params = [torch.nn.Parameter(place(torch.ones(2), CUDA)) for _ in range(count)]
    optimizer = faststep.optim.AdamW(params, max_grad_norm=1.0)
    scaler = scalers(**OPTIONS, max_scale=4096.0)[1]
    for p in params:
        p.grad = place(torch.ones(2), CUDA)
    for step in range(3):
        before = _C.device_counts()
        scaler.step(optimizer)
        scaler.update()
        after = _C.device_counts()
        assert after[0] - before[0] == 3
        if step:
            assert after[1] == before[1], "nothing had changed, but tables were uploaded"


def test_skipped_first_step() -> None:
    for declaration in ALL + OTHERS:
        twins = Twins([values((30,), 0)])
        gradients, pair = Gradients(twins), scalers(**OPTIONS)
        both = twins.optimizers(declaration.ours, **declaration.kwargs)
        for step in range(3):
            gradients.give(step, pair, (0,))
            for optimizer, scaler in zip(both, pair, strict=True):
                scaler.step(optimizer)
                scaler.update()
        twins.assert_same(*both)


def test_devices_agree_on_infinity_and_norm() -> None:
    needs_two_devices()
    twins = Twins([values((500,), i) for i in range(3)], ["cuda:0", "cuda:1", "cpu"])
    pair = scalers(**OPTIONS)
    both = twins.optimizers(faststep.optim.AdamW, max_grad_norm=0.5)
    for step in range(4):
        twins.draw_grads(step, pair[0].get_scale())
        if step in (0, 2):  # on the second device, and on both
            for params in (twins.cpu, twins.cuda):
                for p in params[1 if step == 0 else 0 : 2]:
                    p.grad[3] = float("inf")
        for optimizer, scaler in zip(both, pair, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert_same_scales(*pair)
        assert both[1].step_was_skipped is (step in (0, 2))
    for p, q in zip(twins.cpu, twins.cuda, strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach())

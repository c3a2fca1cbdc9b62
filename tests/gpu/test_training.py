"""Loops whose gradients autograd gives: updates in backward, and windows of micro-steps. The host
is given the same gradients."""

from typing import Any, Literal

import pytest
import torch

import faststep
from faststep import _C

from .common import REHEARSAL, Twins, place, values

SHAPES = [(129, 65), (7,), (3 * 16384 + 5,)]


class Given(torch.autograd.Function):
    """A loss whose gradient is what the test wants, on the parameter's device."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.wanted = grad if REHEARSAL else grad.to(param.device)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.wanted.clone(), None


def make_twins(dtype: torch.dtype) -> Twins:
    twins = Twins([values(shape, i, dtype) for i, shape in enumerate(SHAPES)])
    for param in twins.cuda if REHEARSAL else ():  # autograd's gradients lie on the host there
        param.register_post_accumulate_grad_hook(move_grad)
    return twins


def move_grad(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad = place(param.grad.as_subclass(torch.Tensor), param.device)


def backward(params: list[torch.nn.Parameter], step: int) -> None:
    grads = [values(tuple(p.shape), 100 * step + i, p.dtype) for i, p in enumerate(params)]
    for param, grad in zip(params, grads, strict=True):
        Given.apply(param, grad).as_subclass(torch.Tensor).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, "per_parameter"])
def test_updates_in_backward(dtype: torch.dtype, clip: Literal["per_parameter"] | None) -> None:
    twins = make_twins(dtype)
    limit = None if clip is None else 0.5
    a, b = twins.optimizers(faststep.optim.AdamW, lr=1e-2, max_grad_norm=limit)
    releases = [
        faststep.release_gradients(torch.nn.ParameterList(params), optimizer, clip=clip)
        for params, optimizer in ((twins.cpu, a), (twins.cuda, b))
    ]
    for step in range(3):
        backward(twins.cpu, step)
        backward(twins.cuda, step)
        assert all(p.grad is None for p in [*twins.cpu, *twins.cuda])
        a.step(), b.step()
        twins.assert_same(a, b)
    for release in releases:
        release.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_micro_steps(dtype: torch.dtype) -> None:
    twins = make_twins(dtype)
    a, b = twins.optimizers(faststep.optim.AdamW, lr=1e-2)
    sums = [faststep.accumulate(optimizer, steps=4) for optimizer in (a, b)]
    for window in range(2):
        for micro in range(4):
            backward(twins.cpu, 10 * window + micro)
            backward(twins.cuda, 10 * window + micro)
            a.step(), b.step()
        twins.assert_same(a, b)
    for one in sums:
        one.remove()


def test_updates_of_small_parameters_share_their_launches() -> None:
    """A step for 16 MB of gradients, and one for the rest at the end of backward."""
    twins = Twins([values((n,), n) for n in range(1, 41)])
    for param in twins.cuda if REHEARSAL else ():
        param.register_post_accumulate_grad_hook(move_grad)
    a, b = twins.optimizers(faststep.optim.AdamW, lr=1e-2)
    release = faststep.release_gradients(torch.nn.ParameterList(twins.cuda), b)
    for step in range(3):
        grads = [values(tuple(p.shape), 100 * step + i) for i, p in enumerate(twins.cpu)]
        twins.set_grads(grads)
        for param in twins.cuda:
            param.grad = None
        before = _C.device_counts()[0]
        losses = [Given.apply(p, g) for p, g in zip(twins.cuda, grads, strict=True)]
        torch.stack([loss.as_subclass(torch.Tensor) for loss in losses]).sum().backward()
        assert _C.device_counts()[0] == before + 2
        assert all(param.grad is None for param in twins.cuda)
        a.step(), b.step()
        twins.assert_same(a, b)
    release.remove()

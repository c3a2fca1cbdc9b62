"""The cross-entropy: the bits of the CPU backend in two launches, and torch's results; without
waiting."""

import pytest
import torch

from faststep import _C
from faststep.nn import functional

from .common import CUDA, REHEARSAL, no_synchronization, same_bits, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 33), (1, 1), (5, 33), (300, 1025), (9, 50257)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_bits_of_the_cpu(dtype: torch.dtype, shape: tuple[int, int], smoothing: float) -> None:
    logits, target = values(shape, 1, dtype, 4.0), torch.arange(shape[0]) % shape[1]
    target[2::3] = -100
    weight = values(shape[1:], 2).abs()
    rows = [torch.empty(shape[:1]) for _ in range(2)]
    results = [torch.empty_like(logits), torch.empty(()), torch.empty(2)]
    host = [logits, target, weight, *rows, *results]
    there = [one.to(CUDA) for one in host]
    assert _C.cross_entropy(*host, -100, smoothing, True)
    before = _C.device_counts()
    with no_synchronization():
        assert _C.cross_entropy(*there, -100, smoothing, True)
    launches, *uploads = _C.device_counts()
    assert launches - before[0] == (2 if shape[0] else 1)
    assert uploads == [*before[1:]]
    for one, other in zip(host, there, strict=True):
        assert same_bits(other.cpu(), one)


@pytest.mark.skipif(REHEARSAL, reason="torch's operators take the tensors of the fake machine")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("factor", [1, 2])  # what the kernel of backward multiplies by
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_results(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: int, reduction: str
) -> None:
    """No farther from the exact gradient than torch's, or two roundings to its type."""
    monkeypatch.setattr(functional, "_LOGITS_ON_CUDA", 0)
    target = (torch.arange(300) * 7 % 1030).to(CUDA)
    exact = values((300, 1030), 3, dtype, 4.0).double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, target.cpu(), reduction=reduction)
    (factor * wanted).sum().backward()
    assert exact.grad is not None
    found, apart = [], []
    for function in (functional.cross_entropy, torch.nn.functional.cross_entropy):
        logits = values((300, 1030), 3, dtype, 4.0).to(CUDA).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            loss = function(logits, target, reduction=reduction)
        with no_synchronization():
            (factor * loss).sum().backward()
        assert logits.grad is not None
        found.append(loss.detach().cpu().double())
        error = (logits.grad.cpu().double() - exact.grad).abs()
        apart.append((error / exact.grad.abs().clamp(min=1e-4)).max().item())
    torch.testing.assert_close(found[0], wanted.detach(), rtol=1e-5, atol=1e-5)
    print(f"relative errors of the gradient: {apart[0]:.2e}, torch's {apart[1]:.2e}")
    assert apart[0] <= max(apart[1], 1.01 * torch.finfo(dtype).eps, 1e-5)

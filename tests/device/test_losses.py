"""The cross-entropy on a CUDA device: the bits of the CPU, in two launches, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from faststep import _C
from leaks.test_leaks import assert_no_growth, assert_references_stay, failing

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


def arguments(dtype: torch.dtype, count: int = 5, classes: int = 1030) -> list[Any]:
    """Logits, target, weight, and memory for the results; on the CPU."""
    logits, target = torch.randn(count, classes).to(dtype), torch.randint(classes, (count,))
    target[1::3] = -100
    rows = [torch.empty(count) for _ in range(2)]
    results = [torch.empty_like(logits), torch.empty(()), torch.empty(2)]
    return [logits, target, torch.rand(classes), *rows, *results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_bits_of_the_cpu(machine: fake.Machine, dtype: torch.dtype, count: int) -> None:
    host = arguments(dtype, count)
    there = [fake.claim(one.clone()) for one in host]
    assert _C.cross_entropy(*host, -100, 0.1, True)
    before = _C.device_counts()
    assert _C.cross_entropy(*there, -100, 0.1, True)
    assert _C.device_counts()[0] - before[0] == (2 if count else 1)
    assert _C.device_counts()[1:] == before[1:]  # nothing is uploaded
    machine.synchronize()
    for one, other in zip(host, there, strict=True):
        torch.testing.assert_close(fake.plain(other), one, rtol=0, atol=0, equal_nan=True)


def test_references_memory_and_refusals() -> None:
    right = [fake.claim(one) for one in arguments(torch.float32)]
    cases = [(lambda: _C.cross_entropy(*right, -100, 0.0, True), right)]
    for place in range(1, len(right)):
        for bad in (fake.plain(right[place]), fake.claim(fake.plain(right[place]).clone(), 1)):
            wrong = [*right[:place], bad, *right[place + 1 :]]
            assert _C.cross_entropy(*wrong, -100, 0.0, True) is False
            cases.append((lambda wrong=wrong: _C.cross_entropy(*wrong, -100, 0.0, True), wrong))
    cases.append((failing(_C.cross_entropy, *right, "none", 0.0, True), right))
    for call, kept in cases:
        assert_references_stay(call, kept)
    assert_no_growth(*(call for call, _ in cases))

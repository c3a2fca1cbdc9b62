"""The cross-entropy on a CUDA device: references, memory, and what is refused."""

import pytest
import torch

from faststep import _C
from leaks.test_leaks import assert_no_growth, assert_references_stay, failing

from . import fake

pytestmark = pytest.mark.usefixtures("machine")


def test_references_memory_and_refusals() -> None:
    logits, results = torch.randn(5, 1030), [torch.empty(()), torch.empty(2)]
    rows = [torch.empty(5) for _ in range(2)]
    host = [logits, torch.arange(5), torch.rand(1030), *rows, torch.empty_like(logits), *results]
    right = [fake.claim(one) for one in host]
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

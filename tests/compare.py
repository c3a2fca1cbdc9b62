"""Comparing two ways to do a thing: what came out, be it a value or an error."""

from collections.abc import Callable
from typing import Any

import torch


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """("value", result) or ("error", type, text) of `call`."""
    try:
        return ("value", call())
    except Exception as error:
        return ("error", type(error), str(error))


def assert_same_tensors(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal shapes, dtypes and elements, bit for bit except that any NaN equals any NaN."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

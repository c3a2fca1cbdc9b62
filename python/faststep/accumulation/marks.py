"""Marks: gradients as they were, to notice who changes them inside a window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mark(NamedTuple):
    """The gradient of a parameter as it was: where it lay, and its version."""

    param: Tensor
    address: int
    version: int

    def change(self) -> str | None:
        """The change of the gradient since: "cleared", "changed" or None."""
        grad = self.param.grad
        if grad is None:
            return "cleared"
        same = (grad.data_ptr(), grad._version) == (self.address, self.version)
        return None if same else "changed"


def mark_of(param: Tensor) -> Mark | None:
    """A mark of the gradient; None without a dense one."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return None
    return Mark(param, grad.data_ptr(), grad._version)

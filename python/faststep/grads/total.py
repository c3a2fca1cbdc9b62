"""Returns and errors of torch's functions for the norm of several tensors."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_NONFINITE = (  # torch's text
    "The total norm of order {} for gradients from "
    "`parameters` is non-finite, so it cannot be clipped. To disable "
    "this error and scale the gradients by the non-finite norm anyway, "
    "set `error_if_nonfinite=False`"
)


@functools.cache
def promoted(dtypes: int) -> torch.dtype:
    """The promoted dtype of a set of dtypes, given as bits in the order of `every`."""
    every = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    return functools.reduce(
        torch.promote_types, [dtype for bit, dtype in enumerate(every) if dtypes >> bit & 1]
    )


def returned(
    norm: Tensor, dtype: torch.dtype, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """A norm in the dtype in which torch returns it.

    Raises:
        RuntimeError: it is not finite in that dtype, and `error_if_nonfinite` is set.
    """
    norm = norm.to(dtype)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(_NONFINITE.format(norm_type))
    return norm

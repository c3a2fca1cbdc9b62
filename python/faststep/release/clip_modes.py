"""Clipping of gradients that are used before all of them are known: two approximations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import _C
from ..optim.base import FusedOptimizer
from ..optim.by_torch import values_of
from ..optim.request import check_limit

Clip = Literal["per_parameter", "lagged"]


class Clipping:
    """By what the gradients of one optimizer are clipped.

    "per_parameter" clips each gradient by its own norm. "lagged" clips by the norm of all gradients
    of the step before, and measures those of this step for the next one.
    """

    def __init__(self, way: Clip | None) -> None:
        self.way = way
        self.scale: Tensor | None = None  # what the gradients of this step are divided by
        self._norm: float | None = None  # of all gradients of the step before

    def prepare(self, hook: _C.ReleaseHook) -> None:
        """Tell the hook of a parameter how its gradient is clipped."""
        hook.clips = self.way is not None
        hook.measures = self.way == "lagged"
        if self._norm is not None:
            hook.last_norm = self._norm

    def limit_of(self, grad: Tensor, max_norm: float | None, hook: _C.ReleaseHook) -> float | None:
        """The norm to clip this gradient alone by, or None; sets `scale` if that is lagged."""
        if self.way is None:
            return None
        if self.way == "per_parameter":
            return max_norm
        # Also in a step without a limit: the next one may have one.
        hook.square_sum = _C.measure([values_of(grad)], 1.0)[0]
        if max_norm is None or self._norm is None:
            return max_norm
        coefficient = max_norm / (self._norm + 1e-6)
        if coefficient >= 1.0:
            self.scale = None
        elif self.scale is None:
            divisor = 1.0 / coefficient if coefficient else math.inf
            self.scale = torch.tensor(divisor, dtype=torch.float64, device="cpu")
        return None

    def end_step(self, hooks: Sequence[_C.ReleaseHook]) -> float:
        """The norm of the gradients of this step, by which "lagged" clips the next ones.

        `hooks` are those of all parameters.
        """
        # An exact sum: ranks whose buckets arrive in another order must get the same.
        norm = math.sqrt(math.fsum(hook.square_sum for hook in hooks if hook.updated))
        for hook in hooks:
            hook.last_norm = norm
        self._norm = norm
        return norm


def check_clipping(optimizer: FusedOptimizer, clip: Clip | None) -> None:
    """Raise where gradients would have to wait for the step, and for a limit that is none."""
    if optimizer._max_grad_norm is not None and clip is None:
        raise ValueError(
            "max_grad_norm needs all gradients before the first update, which release_gradients() "
            'does not have. Set it to None, or pass clip="per_parameter" (each gradient by its own '
            'norm) or clip="lagged" (all by the norm of the step before)'
        )
    check_limit("max_grad_norm", optimizer._max_grad_norm)

"""How the loss scale follows the overflows: torch's rule, with bounds and hysteresis on top.

A step without overflow raises the growth tracker; at `growth_interval` the scale is multiplied by
`growth_factor`, unless that overflows float32, and the tracker starts again. A step with overflow
clears the growth tracker and, with hysteresis 1, multiplies the scale by `backoff_factor`. This is
torch._amp_update_scale_.

Hysteresis n tolerates n - 1 overflows between two growths. The hysteresis tracker starts at n. Each
overflow subtracts 1. If the tracker is then at 0 or below, the overflow reduces the scale. Growth
(the full interval without overflow) resets the tracker to n. This is DynamicGradScaler of
Megatron-LM (megatron/core/optimizer/grad_scaler.py).

Each update ends with the scale clamped to [min_scale, max_scale].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _C
from .._devices import has_kernels_for
from .._torch.modes import is_watched
from .._torch.optim import increment_version, update_scale_as_torch


@dataclass(frozen=True)
class ScaleUpdate:
    """The constants of one update, as GradScaler has them."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1

    def update(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        hysteresis_tracker: Tensor | None,
        found_inf: Tensor,
    ) -> None:
        """Update `scale` and the trackers in place, without waiting for the device.

        Args:
            scale: 0-d float32.
            growth_tracker: 0-d int32.
            hysteresis_tracker: 0-d int32, or None where `hysteresis` is 1.
            found_inf: 0-d float32; anything but 0 is an overflow. Read only. All on one device.
        """
        if self.min_scale is None and self.max_scale is None and self.hysteresis == 1:
            update_scale_as_torch(scale, growth_tracker, found_inf, *self._factors)
        elif not is_watched() and (scale.is_cpu or (scale.is_cuda and has_kernels_for(scale))):
            self._update_in_c(scale, growth_tracker, hysteresis_tracker, found_inf)
        else:
            self._update_in_torch(scale, growth_tracker, hysteresis_tracker, found_inf)

    @property
    def _factors(self) -> tuple[float, float, int]:
        return self.growth_factor, self.backoff_factor, self.growth_interval

    @property
    def _bounds(self) -> tuple[float, float]:
        low = 0.0 if self.min_scale is None else self.min_scale
        high = math.inf if self.max_scale is None else self.max_scale
        return low, high

    def _update_in_c(
        self, scale: Tensor, growth_tracker: Tensor, hysteresis: Tensor | None, found_inf: Tensor
    ) -> None:
        written = scale, growth_tracker, hysteresis
        _C.update_scale(*written, found_inf, *self._factors, self.hysteresis, *self._bounds)
        increment_version([one for one in written if one is not None])

    @torch.no_grad()
    def _update_in_torch(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        hysteresis_tracker: Tensor | None,
        found_inf: Tensor,
    ) -> None:
        wide = scale.double()  # for products, as in torch's kernel and in C
        overflow = found_inf != 0
        successful = growth_tracker + 1
        grows = ~overflow & (successful == self.growth_interval)
        backs_off = overflow
        if hysteresis_tracker is not None:
            left = hysteresis_tracker - overflow.to(hysteresis_tracker.dtype)
            backs_off = overflow & (left <= 0)
            hysteresis_tracker.copy_(left.masked_fill(grows, self.hysteresis))
        grown = (wide * self.growth_factor).to(scale.dtype)
        grown = torch.where(torch.isfinite(grown), grown, scale)
        backed_off = (wide * self.backoff_factor).to(scale.dtype)
        new_scale = torch.where(grows, grown, torch.where(backs_off, backed_off, scale))
        low, high = self._bounds
        scale.copy_(new_scale.clamp(min=low, max=high))
        growth_tracker.copy_(successful.masked_fill(overflow | grows, 0))


def check_bounds(init_scale: float, min_scale: float | None, max_scale: float | None) -> None:
    """Raise ValueError unless the bounds are positive, in order and around `init_scale`."""
    for name, bound in (("min_scale", min_scale), ("max_scale", max_scale)):
        if bound is not None and not 0.0 < bound < math.inf:
            raise ValueError(f"{name} must be positive and finite, but is {bound}.")
    low = 0.0 if min_scale is None else min_scale
    high = math.inf if max_scale is None else max_scale
    if low > high:
        raise ValueError(f"min_scale ({low}) must not be above max_scale ({high}).")
    if (min_scale is not None or max_scale is not None) and not low <= init_scale <= high:
        raise ValueError(
            f"init_scale ({init_scale}) must lie between min_scale ({min_scale}) and "
            f"max_scale ({max_scale})."
        )


def check_hysteresis(hysteresis: int) -> None:
    """Raise TypeError or ValueError unless `hysteresis` is an int of at least 1."""
    if not isinstance(hysteresis, int) or isinstance(hysteresis, bool):
        raise TypeError(f"hysteresis must be an int, but is a {type(hysteresis).__name__}.")
    if hysteresis < 1:
        raise ValueError(f"hysteresis must be at least 1, but is {hysteresis}.")

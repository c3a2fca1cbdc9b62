"""Which optimizers update their parameters in backward, for those who come too late."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .divide import params_of, those_with

__all__ = ["is_released", "refuse_clipping", "set_released"]

_released: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def is_released(optimizer: Optimizer) -> bool:
    """Whether `release_gradients` acts on this optimizer."""
    known = _released.get(optimizer)
    return known is not None and known() is not None


def set_released(optimizer: Optimizer, by: Any) -> None:
    """Note by whom; None if no longer."""
    _released.pop(optimizer, None)
    if by is not None:
        _released[optimizer] = weakref.ref(by)


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Raise if one of these has been updated already when its gradient is to be clipped."""
    if any(map(is_released, those_with(parameters, _released, params_of))):
        raise RuntimeError(
            "these gradients cannot be clipped: release_gradients() has used and freed them in "
            "backward. Set max_grad_norm of the optimizer, and release with "
            'clip="per_parameter" or clip="lagged"; or remove() the release'
        )

"""Gradients under a scaler, which leaves unscaling to the step of an offloaded optimizer.

torch's scaler would unscale gradients that are copied already, and would move no version counter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _C
from .._torch.dtensor import any_dtensor
from .._torch.optim import dtypes_of, increment_version
from .._torch.ranks import is_distributed
from ..amp.protocol import AskedToUnscale, can_be_seen
from ..grads.owners import accumulating
from ..grads.params import grads_of, params_of
from ..optim.base import FusedOptimizer
from ..optim.request import StepRequest
from .places import inverse_of


class Scaled(AskedToUnscale):
    """Asks the scaler, and leaves gradients as if it had not been asked."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._is_new = not optimizer._is_asked_to_unscale
        super().__init__(optimizer)

    def rounds(self, optimizer: FusedOptimizer, request: StepRequest) -> bool:
        """True if the scaler would have rounded gradients that it unscales.

        It makes a difference where the scale is no power of two.
        """
        scale = request.grad_scale
        if scale is None or not self._is_new or not request.write_grads:
            return False
        is_scaled = request.found_inf is not None and optimizer not in accumulating
        is_divided = is_distributed() and any_dtensor(params_of(optimizer))
        if not is_scaled or not (
            is_divided or can_be_seen(optimizer) or not request.looks_for_inf
        ):  # faststep's scaler unscales in the step, where nobody sees it
            return False
        narrow = dtypes_of(grads_of(optimizer)) & {torch.bfloat16, torch.float16}
        return bool(narrow) and math.frexp(scale.item())[0] != 0.5

    def unscale_skipped(self, params: list[Tensor], request: StepRequest) -> None:
        """Unscale the gradients of a step that is skipped."""
        if self._is_new and request.write_grads:
            unscale(params, request)


def unscale(params: list[Tensor], request: StepRequest) -> None:
    """Unscale gradients in place."""
    if params and (params[0].is_cuda or any_dtensor(params)):
        inverse = inverse_of(request.grad_scale)
        for grad in _C.collect_grads(params):
            grad.mul_(inverse)
        return
    increment_version(_C.unscale_grads(params, inverse_of(request.grad_scale), True)[2])

"""Updates that begin in backward, with the gradients that are there."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..optim.base import FusedOptimizer
from ..optim.request import Rule, StepRequest
from ..release.before_step import refuse_code_before_step
from .places import Place

_TOGETHER = 4 << 20  # bytes of parameters for which an update begins


class Updates(Protocol):
    """What copies gradients to the host, and updates there."""

    def bring(self, place: Place, grad: Tensor) -> None:
        """Begin to copy a gradient."""

    def update(
        self,
        optimizer: FusedOptimizer,
        rules: list[Rule],
        request: StepRequest,
        only: dict[Tensor, None],
    ) -> None:
        """Allow the update of these."""


class EarlyUpdates:
    """Those of one optimizer: parameters wait until together they are worth a step."""

    def __init__(self) -> None:
        self._updated: dict[Tensor, None] = {}  # since the step, or waits
        self._waiting: dict[Tensor, None] = {}
        self._bytes = 0  # of those
        self._rules: list[Rule] = []  # of these updates

    def update(
        self, updates: Updates, optimizer: FusedOptimizer, place: Place, param: Tensor, grad: Tensor
    ) -> None:
        """Take a gradient, which is freed when it was copied."""
        if not self._rules:  # the first one since the step
            refuse_code_before_step(optimizer, None)
            self._rules = optimizer._rules()
        if param in self._updated:
            raise RuntimeError(
                "a second gradient of a parameter before optimizer.step(): with in_backward=True "
                "it was updated with the first one. Gradients cannot be accumulated: leave "
                "in_backward away for that"
            )
        updates.bring(place, grad)
        place.seen = None  # it would keep the gradient
        self._updated[param] = self._waiting[param] = None
        self._bytes += param.nbytes
        if self._bytes >= _TOGETHER:
            self._update_waiting(updates, optimizer)
        param.grad = None

    def _update_waiting(self, updates: Updates, optimizer: FusedOptimizer) -> None:
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        with torch.no_grad():
            updates.update(optimizer, self._rules, StepRequest(), waiting)

    def end(self, updates: Updates, optimizer: FusedOptimizer, request: StepRequest) -> None:
        """Update the last ones, and raise if the step asks for what backward had to know."""
        rules, now = self._rules, optimizer._rules()
        try:
            if self._waiting:
                self._update_waiting(updates, optimizer)
        finally:
            self._rules, self._updated, self._waiting, self._bytes = [], {}, {}, 0
        if not rules:
            return
        if request.grad_scale is not None or request.found_inf is not None or request.measures:
            raise RuntimeError(
                "the step cannot skip, unscale or clip: parameters were updated in backward "
                "already (offload with in_backward=True). Leave in_backward away for that"
            )
        if [rule._replace(lr=None) for rule in rules] != [rule._replace(lr=None) for rule in now]:
            raise RuntimeError(
                "the learning rate or another number of a group was changed between backward and "
                "optimizer.step(): with in_backward=True backward has updated the parameters "
                "already, with the number of before. Change it before backward"
            )

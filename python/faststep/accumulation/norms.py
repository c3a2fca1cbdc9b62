"""Norms that are measured in backward (`norm_in_backward`) while gradients accumulate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ..grads.norm import BackwardNorm
from ..grads.params import params_of
from ..optim.base import FusedOptimizer

__all__ = ["Norms"]


class Norms:
    """The norms of those of these optimizers that measure in backward; they may begin any time."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[tuple[FusedOptimizer, BackwardNorm]]:
        for optimizer in self._optimizers:
            if isinstance(optimizer, FusedOptimizer):
                norm = optimizer._measured_in_backward()
                if norm is not None:
                    yield optimizer, norm

    def set_idle(self, idle: bool) -> None:
        """Measure nothing in the next micro-step, or what comes."""
        for _, norm in self:
            norm.idle = idle

    def expect(self, divisor: float, of_idle: bool) -> None:
        """Announce what the next step divides by."""
        for _, norm in self:
            if of_idle or not norm.idle:
                norm.expect(divisor)

    def measure(self, param: Tensor) -> None:
        """Measure a gradient that is reduced, where the model's hook has not."""
        for _, norm in self:
            norm.measure_reduced(param)

    def measure_all(self) -> None:
        """Measure again: the buckets in which gradients were measured are no more."""
        for optimizer, _ in self:
            for param in params_of(optimizer):
                self.measure(param)

    def run_last(self) -> None:
        """Let the hooks that measure run after all others, which may replace the gradient."""
        for optimizer, norm in self:
            norm.reattach(optimizer)

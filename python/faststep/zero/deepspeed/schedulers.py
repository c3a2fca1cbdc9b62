"""The schedulers of DeepSpeed's configuration, as torch's schedulers.

DeepSpeed's engine begins at the lowest rate, and its first call of `step` stays there.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupLR(LRScheduler):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps` steps, and then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        if not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ValueError(f"warmup_num_steps must be positive, not {warmup_num_steps!r}")
        if warmup_type not in ("log", "linear"):
            raise ValueError(f'warmup_type must be "log" or "linear", not {warmup_type!r}')
        self.steps = max(2, warmup_num_steps)
        self.low = warmup_min_lr
        self.high = optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr
        self.warmup_type = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """The rate of each group."""
        share = self.share(max(0, self.last_epoch - 1))
        return [self.low + (self.high - self.low) * share for _ in self.optimizer.param_groups]

    def share(self, step: int) -> float:
        """How much of the way from the lowest rate to the highest."""
        if step >= self.steps:
            return self.after(step)
        is_log = self.warmup_type == "log"
        return math.log(step + 1) / math.log(self.steps) if is_log else step / self.steps

    def after(self, step: int) -> float:
        """That after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """The same, and then linearly to `warmup_min_lr` in step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def after(self, step: int) -> float:
        return max(0.0, (self.total - step) / max(1, self.total - self.steps))


SCHEDULERS = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR)}

"""Mixed precision: the gradient scaler."""

from faststep.amp.grad_scaler import GradScaler

__all__ = ["GradScaler"]

"""Mixed precision: the gradient scaler, and weights in lower precision."""

from .grad_scaler import GradScaler
from .low_precision import low_precision_weights

__all__ = ["GradScaler", "low_precision_weights"]

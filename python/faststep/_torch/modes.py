"""Finds out whether something watches torch's operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

_depth: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", None) or (
    lambda: int(_get_current_dispatch_mode() is not None)
)
_tracing_state = torch._C._get_tracing_state


def is_watched() -> bool:
    """True in a TorchDispatchMode and in torch.jit.trace.

    Both see torch's operators, and nothing that C does.
    """
    return _depth() > 0 or _tracing_state() is not None


def watched_by() -> str | None:
    """What sees torch's operators."""
    if _depth() > 0:
        return "in a TorchDispatchMode"
    return None if _tracing_state() is None else "in torch.jit.trace"


def is_batched(tensor: torch.Tensor) -> bool:
    """True for several gradients in one, of `torch.autograd.grad(..., is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def is_transformed() -> bool:
    """True in a transform of `torch.func`, in forward-mode differentiation and while tracing."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or _tracing_state() is not None
    )

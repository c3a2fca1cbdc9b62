"""Whether a tensor that was saved for backward may be written there, because nobody reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tensors import uses_of

_of: Any = torch._C._autograd


def are_hooked() -> bool:
    """True if hooks of a script may keep the tensors that are saved now."""
    ask = getattr(_of, "_top_saved_tensors_default_hooks", None)
    return ask is None or ask(False) is not None


def is_free(saved: Tensor) -> bool:
    """True if backward may write what forward had saved without hooks, an output of its own.

    Then the graph is freed after this pass, and no other tensor has this memory.
    """
    is_kept = getattr(_of, "_get_current_graph_task_keep_graph", None)
    if is_kept is None or is_kept():
        return False
    one = torch.empty(1, device="cpu")
    other = one.detach()  # so autograd has one tensor, and gives backward another one
    return uses_of(saved)[1] == uses_of(other)[1]


def is_wrapped(tensor: Tensor) -> bool:
    """True if a tensor is one of torch.func's transforms, which has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))

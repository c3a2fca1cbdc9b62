"""Embeddings that share their weight with another layer, as GPT-2's does with its head.

autograd adds up the gradients of both uses. The embedding's comes last, when every other gradient
has been released. It is as large as the weight, but zero outside the rows of the batch's tokens.
Together with the other gradient and the sum, three tensors of that size are alive at once. This
module makes the embedding's gradient sparse, with those rows only. autograd adds it to the other
gradient without a third tensor, with the same bits. If a forward uses the weight in
the embedding only, its gradient is sparse until the parameter's hook makes it dense. A tensor hook
cannot do that, because it may not change the layout.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def tied_embeddings(model: nn.Module) -> Iterator[nn.Embedding]:
    """Embeddings in CPU memory whose weight is a parameter of another module too."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for module in model.modules():
        if type(module) is nn.Embedding and uses[id(module.weight)] > 1 and not _is_special(module):
            yield module


def _is_special(module: nn.Embedding) -> bool:
    special = module.sparse or module.scale_grad_by_freq or module.max_norm is not None
    return special or not module.weight.is_cpu


def give_rows(module: nn.Embedding) -> Any:
    """Let the embedding's backward give a sparse gradient; returns a handle to undo it.

    The hook runs before all others, so that they see the output that they would see without it.
    """
    hook = _ThroughRows(module)
    return module.register_forward_hook(hook, prepend=True, with_kwargs=True)


class _ThroughRows:
    """A forward hook for one module; for a copy of the module it does nothing."""

    def __init__(self, module: nn.Embedding | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._weight = None if module is None else weakref.ref(module.weight)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ThroughRows, ()

    def __call__(
        self, module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """The same output, gathered from one row per distinct token, where gradients are added."""
        if torch.compiler.is_compiling() or not output.requires_grad:
            return None
        if self._module is None or self._module() is not module:
            return None
        if self._weight is None or self._weight() is not module.weight:
            return None
        tokens = args[0] if args else kwargs["input"]
        found, places = torch.unique(tokens, return_inverse=True)
        rows = functional.embedding(found, module.weight, module.padding_idx, sparse=True)
        return functional.embedding(places, rows)

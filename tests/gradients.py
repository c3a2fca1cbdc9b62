"""Gradients for tests: layouts, and parameters that carry given gradients."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "packed": lambda: torch.randn(7, 5),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "transposed": lambda: torch.randn(7, 5).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other column": lambda: torch.randn(6, 10)[:, ::2],
    "long": lambda: torch.randn(40000),
    "negated": lambda: torch._neg_view(torch.randn(7, 5)),
    "negated 0-d": lambda: torch.randn((), dtype=torch.complex64).conj().imag,
    "negated, every other number": lambda: torch.randn(6, 5, dtype=torch.complex64).conj().imag,
    "negated, transposed": lambda: torch._neg_view(torch.randn(7, 5)).t(),
    "negated, long": lambda: torch._neg_view(torch.randn(40000)),
}


def params_with(grads: list[Tensor]) -> list[Parameter]:
    params = []
    for grad in grads:
        param = Parameter(torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype))
        param.grad = grad
        params.append(param)
    return params


def twice(grads: list[Tensor]) -> tuple[list[Parameter], list[Parameter]]:
    """Two lists of parameters with equal gradients that share no memory."""
    copies = [torch.empty_strided(g.shape, g.stride(), dtype=g.dtype).copy_(g) for g in grads]
    return params_with(grads), params_with(copies)


def grads_of(params: list[Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def exact_norm(tensors: list[Tensor], norm_type: float) -> float:
    """torch's total norm, in fp64."""
    norms = [torch.linalg.vector_norm(t.double(), norm_type) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type))

"""Tensors that a step must not take for each other, whatever torch they come from.

The experiment of records.py makes one of each and looks for what tells them apart: two that look
alike turn the records off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .tensors import neg_view, new_subclass, new_wrapper

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int8)


class _Dispatching(Tensor):
    """A subclass that sees every operator, as DTensor, FakeTensor and quantized weights do."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


def _wrapper(device: str = "cpu", **policy: Any) -> Tensor:
    return new_wrapper(_Dispatching, (4,), device=device, **policy)


_KINDS: dict[str, Callable[[], Tensor]] = {
    "a tensor on another device": lambda: torch.zeros(4, device="meta"),
    "a negated view": lambda: neg_view(torch.zeros(4)),
    "a conjugated view": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "a sparse tensor": lambda: torch.zeros(4).to_sparse(),
    "an inference tensor": _inference_tensor,
    "a subclass with its own __torch_dispatch__": lambda: new_subclass(
        _Dispatching, torch.zeros(4)
    ),
    "a subclass that says on which device it is": lambda: _wrapper(dispatch_device=True),
    "a subclass that says what its strides are": lambda: _wrapper(
        dispatch_sizes_strides_policy="strides"
    ),
    "a subclass that says what its sizes are": lambda: _wrapper(
        dispatch_sizes_strides_policy="sizes"
    ),
    "a subclass that says what its layout is": lambda: _wrapper(dispatch_layout=True),
    "a wrapper on a device's number 1": lambda: _wrapper("meta:1"),
    "a wrapper on a device's number 2": lambda: _wrapper("meta:2"),
}


def different_tensors() -> Iterator[tuple[str, Tensor]]:
    """The tensors, each with what it is called in a message."""
    for dtype in _DTYPES:
        yield f"a tensor of {dtype}", torch.zeros(4, dtype=dtype)
    for name, make in _KINDS.items():
        yield name, make()

"""Plain CPU tensors, and tensors over memory that something else owns."""

from __future__ import annotations

import torch

__all__ = ["tensor_over", "why_not_plain"]


def tensor_over(
    block: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A tensor over the bytes of a block: its storage, but not a view."""
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    where = (offset, size) if stride is None else (offset, size, stride)
    return tensor.set_(block.untyped_storage(), *where)


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """Why torch has to handle a tensor; "" if it has no elements, None if it is a plain one."""
    if type(tensor) is not torch.Tensor:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "not a dense tensor"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    if tensor.requires_grad:
        return "requires a gradient"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated tensor"
    return None if tensor.numel() else ""

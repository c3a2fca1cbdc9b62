"""Private names of torch: tensors and storages."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl  # the `__torch_function__` of a class


def foreach_norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each tensor, 0-d in float64."""
    if not tensors:
        return []
    return list(torch._foreach_norm(list(tensors), order, dtype=torch.float64))


def has_no_memory(tensor: torch.Tensor) -> bool:
    """True for a tensor that only torch's operators can work on: meta, fake or mkldnn."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # slow to import, and often not needed
    is_fake = fake is not None and isinstance(tensor, fake.FakeTensor)
    return tensor.is_meta or tensor.is_mkldnn or is_fake


def record_of(tensor: torch.Tensor) -> int:
    """The address of torch's record of a tensor."""
    return int(tensor._cdata)


def storage_record_of(tensor: torch.Tensor) -> int:
    """The address of torch's record of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def storage_records_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The same of many."""
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def nbytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a dense tensor's elements, else 0; without code of a subclass."""
    if type(tensor) is torch.Tensor:
        return tensor.nbytes if tensor.layout == torch.strided else 0
    with torch._C.DisableTorchFunctionSubclass():
        of: Any = torch.Tensor
        is_dense = of.layout.__get__(tensor) == torch.strided
        return int(of.nbytes.__get__(tensor)) if is_dense else 0


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """A clone that shares the memory until one of the two is written."""
    return torch._lazy_clone(tensor)


def let_foreach_take(kind: type[torch.Tensor]) -> None:
    """Let torch's clipping give its foreach operators a subclass, which answers them itself."""
    from torch.utils import _foreach_utils

    if kind not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(kind)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, to be read with the other sign."""
    return torch._neg_view(tensor)


def new_subclass(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass, with the memory of `tensor`."""
    made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor)
    return made


def new_wrapper(
    kind: type[torch.Tensor], size: tuple[int, ...], *, device: str, **policy: Any
) -> torch.Tensor:
    """A tensor of a subclass with its own `__torch_dispatch__`, without memory.

    Args:
        policy: which questions the subclass answers itself, as torch names them:
            `dispatch_sizes_strides_policy`, `dispatch_device`, `dispatch_layout`.
    """
    place = torch.device(device)
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(kind, size, device=place, **policy)
    return made


def uses_of(tensor: torch.Tensor) -> tuple[object, object]:
    """How often torch itself refers to a tensor, and to its storage.

    To be compared with what a new tensor has. Where this torch does not tell, no two are equal.
    """
    of_tensor = getattr(tensor, "_use_count", object)
    of_storage = getattr(torch._C, "_storage_Use_Count", lambda storage: object())
    return of_tensor(), of_storage(storage_record_of(tensor))

"""Whether a script's CUDA parameters have kernels here, asked without starting CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _C

NO_KERNELS = "no CUDA kernels of this package can be used here"


def why_none() -> str:
    """Why a torch with CUDA has no kernels here; empty if it may have some, or has no CUDA."""
    if torch.version.cuda is None:
        return ""
    if not _C.has_kernels():
        return NO_KERNELS
    try:
        _C.check_driver()
    except RuntimeError as error:
        return str(error)
    return ""


def cuda_is_used() -> bool:
    """True if this process may have CUDA tensors."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def listed(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """The arguments of an optimizer, with lists in place of iterators, and its parameters."""
    given = args[0] if args else kwargs.get("params")
    if isinstance(given, Iterator):
        given = list(given)
    groups: Any = given if isinstance(given, (list, tuple)) else []
    if any(isinstance(group, dict) for group in groups):
        given = groups = [_with_list(group) for group in groups]
    if args:
        args = (given, *args[1:])
    elif "params" in kwargs:
        kwargs = {**kwargs, "params": given}
    return args, kwargs, list(_tensors(groups))


def _with_list(group: Any) -> Any:
    """A parameter group whose iterator of parameters, if it has one, is a list."""
    if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
        group["params"] = list(group["params"])  # as torch does
    return group


def _tensors(groups: Iterable[Any]) -> Iterator[Tensor]:
    for entry in groups:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, dict) and isinstance(entry.get("params"), Tensor):
            yield entry["params"]
        elif isinstance(entry, dict) and isinstance(entry.get("params"), Iterable):
            yield from _tensors(entry["params"])
        elif isinstance(entry, tuple) and len(entry) == 2:  # of a name and a parameter
            yield from _tensors(entry[1:])

"""Private names of torch: DTensors, which are divided among ranks.

Nothing here imports torch.distributed.tensor, which takes long. As long as no script has imported
it there are no DTensors.
"""

from __future__ import annotations

import copy
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import _C

_read_spec: Callable[[torch.Tensor], Any] = operator.attrgetter("_spec")
_known: Any = None  # the class DTensor, once it is imported


def learn_dtensors() -> bool:
    """Tell the C side of DTensors, if a script may have some by now; True if that is new to it.

    A torch whose DTensors have no slots for what they consist of has none that can be used.
    """
    global _known
    if _known is not None:
        return False
    found = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if isinstance(found, type):
        local, spec = (vars(found).get(name) for name in ("_local_tensor", "_spec"))
        if all(isinstance(slot, types.MemberDescriptorType) for slot in (local, spec)):
            _C.use_dtensors(found, local, spec)
            _known = found
    return _known is not None


def is_dtensor(tensor: object) -> bool:
    """True if this is a DTensor; not for those of a subclass, which may mean anything."""
    learn_dtensors()
    return _known is not None and type(tensor) is _known


def any_dtensor(tensors: Iterable[object]) -> bool:
    """True if one of these is a DTensor."""
    learn_dtensors()
    return _C.any_dtensor(tensors)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: the tensor itself, where `to_local` makes a view for autograd."""
    divided: Any = tensor
    local: torch.Tensor = divided._local_tensor
    return local


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return local_of(tensor) if is_dtensor(tensor) else tensor


def set_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Give a DTensor another local tensor."""
    divided: Any = tensor
    divided._local_tensor = local


def spec_of(tensor: torch.Tensor) -> Any:
    """How a DTensor is divided: `mesh`, `placements` and the whole tensor's shape and strides."""
    divided: Any = tensor
    return divided._spec


def specs_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The specs of many tensors, None for those that are no DTensors."""
    try:
        return list(map(_read_spec, tensors))
    except AttributeError:
        return [spec_of(tensor) if is_dtensor(tensor) else None for tensor in tensors]


def like_dtensor(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor that is divided as `tensor` is, with another local tensor, on its own device."""
    made: torch.Tensor = _known(local, copy.copy(spec_of(tensor)), requires_grad=False)
    return made


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, for which ranks communicate; another tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    divided: Any = tensor
    whole: torch.Tensor = divided.full_tensor()
    return whole


def replicate() -> Any:
    """The placement of what all ranks have."""
    from torch.distributed.tensor import Replicate

    return Replicate()


def replicated(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that all ranks have, as a DTensor on the mesh of another one."""
    mesh = spec_of(like).mesh
    made: torch.Tensor = _known.from_local(tensor, mesh, [replicate()] * mesh.ndim)
    return made


def devices_of_group(group: Any) -> list[str]:
    """The types of devices whose tensors a process group sends, "cpu" first."""
    names = sorted(device.type for device in group._device_types)
    return sorted(names, key=lambda name: name != "cpu")

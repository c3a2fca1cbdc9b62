"""Private names of torch: FSDP2 (`fully_shard`) and FSDP1 (FullyShardedDataParallel)."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .ranks import instances_of

_Found = tuple[weakref.ref[Tensor], Any]
_groups_of_shards: dict[int, _Found] = {}  # by the id of the parameter


def is_fsdp_shard(tensor: Tensor) -> bool:
    """True if FullyShardedDataParallel leaves only a part of this parameter on each rank.

    FSDP2 has tensors of a class of its own (DTensor) instead.
    """
    return bool(getattr(tensor, "_fsdp_flattened", False))


def group_of_shard(param: Tensor) -> Any:
    """The process group over whose ranks such a parameter is divided; None if each has all of it.

    Parameters do not know their model, so the first call looks for all of them.

    Raises:
        KeyError: there is no FullyShardedDataParallel with this parameter.
    """
    found = _groups_of_shards.get(id(param))
    if found is None or found[0]() is not param:
        _find_shards()
        found = _groups_of_shards[id(param)]
    return found[1]


def _find_shards() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _groups_of_shards.clear()
    for module in instances_of(FullyShardedDataParallel):
        handle: Any = vars(module).get("_handle")
        if handle is None:
            continue
        group = handle.process_group if handle.uses_sharded_strategy else None
        flat = handle.flat_param
        for param in (flat, *(flat._params or ()), *(flat._shared_params or ())):
            _groups_of_shards[id(param)] = weakref.ref(param), group


def fsdp_modules_of(model: nn.Module) -> list[Any]:
    """The modules to which fully_shard was applied; none without an import of it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not isinstance(kind, type):
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def _param_groups_of(module: Any) -> list[Any]:
    """The groups that fully_shard reduces at once; one per module before torch 2.12."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def groups_of_fsdp(modules: list[Any]) -> list[Any]:
    """The process groups over whose ranks gradients are averaged, of the first module with any."""
    for group in itertools.chain.from_iterable(map(_param_groups_of, modules)):
        info = group.mesh_info
        found = (
            getattr(info, name, None) for name in ("shard_process_group", "replicate_process_group")
        )
        return [one for one in found if one is not None]
    return []


def shards_of_fsdp(model: nn.Module) -> set[int]:
    """The ids of the parameters that fully_shard has made of the model's: parts on each rank."""
    return {id(param.sharded_param) for param in _sharded_params_of(fsdp_modules_of(model))}


def reduce_local_grads(modules: list[Any]) -> None:
    """Reduce what backward passes without synchronization have left on the ranks; a collective.

    It is what FSDP2 does at the end of a backward that did not reach a module.
    """
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root:  # None before the first forward, when there is nothing
            state._root_post_backward_final_callback()


def drop_local_grads(modules: list[Any]) -> None:
    """Drop what such passes have left."""
    for param in _sharded_params_of(modules):
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):  # else there was no forward
            param._unsharded_param.grad = None


def _sharded_params_of(modules: list[Any]) -> Iterator[Any]:
    for group in itertools.chain.from_iterable(map(_param_groups_of, modules)):
        yield from group.fsdp_params

"""What torch keeps private of FSDP2: models to which `fully_shard` was applied."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["drop_local_grads", "fsdp_modules_of", "groups_of_fsdp", "reduce_local_grads"]


def fsdp_modules_of(model: nn.Module) -> list[Any]:
    """The modules to which fully_shard was applied; none without an import of it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not isinstance(kind, type):
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def _param_groups_of(module: Any) -> list[Any]:
    """What fully_shard reduces at once; one per module before torch 2.12."""
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
